"""A Flower app with nothing around it: the same network, bytes and steps, Flower's own FedAvg; seconds to a file."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


def network() -> torch.nn.Module:
    from fedcir.config import ModelConfig
    from fedcir.models.builder import make_image_builder

    return make_image_builder(ModelConfig(), 10, 1, seed=0).classifier()


def data(context: Context, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    files = sorted(Path(str(context.run_config["root"])).glob("*.npz"))
    arrays = np.load(files[int(context.node_config["partition-id"])])
    images = torch.from_numpy(arrays[f"x_{part}"]).permute(0, 3, 1, 2).float() / 255
    return images, torch.from_numpy(arrays[f"y_{part}"])


def received(message: Message) -> torch.nn.Module:
    torch.set_num_threads(1)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


@client.train()
def train(message: Message, context: Context) -> Message:
    model, (images, labels) = received(message).train(), data(context, "train")
    for step in range(int(context.run_config["steps"])):
        rows = torch.arange(32 * step, 32 * step + 32) % len(images)
        model.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(images)})}
    return Message(RecordDict(content), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, (images, labels) = received(message).eval(), data(context, "test")
    with torch.inference_mode():
        correct = int((model(images).argmax(-1) == labels).sum())
    metrics = MetricRecord({"num-examples": len(images), "accuracy": correct / len(images)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


class Timed(FedAvg):
    seconds: list[float]

    def configure_train(self, *arguments: Any, **more: Any) -> Any:
        self.started = time.perf_counter()
        return super().configure_train(*arguments, **more)

    def aggregate_evaluate(self, *arguments: Any, **more: Any) -> Any:
        result = super().aggregate_evaluate(*arguments, **more)
        self.seconds.append(time.perf_counter() - self.started)
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    sites = int(context.run_config["sites"])
    strategy = Timed(min_train_nodes=sites, min_evaluate_nodes=sites, min_available_nodes=sites)
    strategy.seconds = []
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=int(context.run_config["rounds"]))
    Path(str(context.run_config["out"])).write_text(json.dumps(strategy.seconds), encoding="utf-8")
