"""FedAvg on Flower's simulation engine; the server writes the seconds of each round to a file."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()
kept: dict[str, Any] = {}


def workload(context: Context) -> Any:
    sys.path.insert(0, str(context.run_config["contestants"]))
    import workload as module

    return module


@client.train()
def train(message: Message, context: Context) -> Message:
    module = workload(context)
    work = module.WORKLOADS[context.run_config["workload"]]
    torch.set_num_threads(1)
    model = kept.setdefault("model", None) or module.network(work)
    kept["model"] = model
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(context.node_config["partition-id"])
    module.local_steps(model, work, *module.images(work, number), seed=number)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": work.images})}
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    seconds: list[float]

    def configure_train(self, *arguments: Any, **more: Any) -> Any:
        self.started = time.perf_counter()
        return super().configure_train(*arguments, **more)

    def aggregate_train(self, *arguments: Any, **more: Any) -> Any:
        result = super().aggregate_train(*arguments, **more)
        self.seconds.append(time.perf_counter() - self.started)
        return result


@server.main()
def main(grid: Grid, context: Context) -> None:
    module = workload(context)
    work = module.WORKLOADS[context.run_config["workload"]]
    strategy = Timed(
        fraction_train=work.active / work.clients,
        fraction_evaluate=0.0,
        min_train_nodes=work.active,
        min_available_nodes=work.clients,
    )
    strategy.seconds = []
    strategy.start(grid, ArrayRecord(module.network(work).state_dict()), num_rounds=work.rounds)
    Path(str(context.run_config["out"])).write_text(json.dumps(strategy.seconds), encoding="utf-8")
