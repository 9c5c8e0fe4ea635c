"""What happens on a client: fit() is the one local training loop, evaluate() the one test loop."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedcir.algorithm import Algorithm
from fedcir.arrays import snapshot
from fedcir.config import LocalConfig
from fedcir.cost import step_flops
from fedcir.federation import Client
from fedcir.rng import numpy_rng, torch_rng
from fedcir.types import Arrays, ClientReply, Groups, LocalContext, Modules

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Worker:
    """A process's own copy of the networks, and what every client of a run is told once."""

    algorithm: Algorithm
    modules: Modules
    seed: int
    total_rounds: int
    num_classes: int
    local: LocalConfig
    device: torch.device
    layout: torch.memory_format
    flops: dict[tuple[str, ...], int] = field(default_factory=dict)
    """FLOPs of a step by the groups received, each counted once."""

    def __post_init__(self) -> None:
        for module in self.modules.values():
            module.to(self.device, memory_format=self.layout)  # type: ignore[call-overload]


def fit(worker: Worker, client: Client, received: Groups, round: int) -> ClientReply:
    """Train on one client's data from what was received, and give the reply that it uploads."""
    assert client.train is not None
    algorithm, modules = worker.algorithm, worker.modules
    ctx = _receive(worker, received, round, torch_rng(worker.seed, "local", round, client.id))
    for name, module in modules.items():
        module.train(name in algorithm.trains)
    parameters = [p for name in algorithm.trains for p in modules[name].parameters()]
    optimizer = torch.optim.SGD(
        parameters,
        lr=learning_rate(worker.local, round, worker.total_rounds),
        momentum=worker.local.momentum,
        weight_decay=worker.local.weight_decay,
        fused=True,
    )
    sums: Arrays = {}
    flops = 0
    rng = numpy_rng(worker.seed, "batches", round, client.id)
    for positions in batches(len(client.train), worker.local.batch_size, worker.local.steps, rng):
        x, y = client.train.batch(positions, worker.device, worker.layout)
        if not flops:
            flops = _counted_flops(worker, x, y, ctx)
        losses = algorithm.local_loss(modules, x, y, ctx)
        optimizer.zero_grad()
        losses.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for name, term in {**losses.terms, "total": losses.total}.items():
            sums[name] = sums[name] + term.detach() if name in sums else term.detach()
    for module in modules.values():
        module.eval()
    arrays = {name: snapshot(modules[name]) for name in algorithm.trains}
    with torch.inference_mode():
        summary = algorithm.local_summary(modules, client.train, ctx)
    if summary.keys() != set(algorithm.sends):
        raise TypeError(
            f"{type(algorithm).__name__}.local_summary gave {sorted(summary)}, declared is {algorithm.sends}"
        )
    metrics = {f"loss/{name}": float(total) / worker.local.steps for name, total in sums.items()}
    return ClientReply(
        client.id, len(client.train), arrays | summary, {**metrics, "flops": float(flops * worker.local.steps)}
    )


@torch.inference_mode()
def evaluate(worker: Worker, client: Client, received: Groups, round: int) -> ClientReply:
    """Test the received model on the client's test set; the reply carries counts, so that they can be added."""
    ctx = _receive(worker, received, round, torch_rng(worker.seed, "evaluate", round, client.id))
    for module in worker.modules.values():
        module.eval()
    correct, loss = 0, 0.0
    for start in range(0, len(client.test), EVALUATION_BATCH):
        positions = np.arange(start, min(start + EVALUATION_BATCH, len(client.test)))
        x, y = client.test.batch(positions, worker.device, worker.layout)
        logits = worker.algorithm.predict(worker.modules, x, ctx)
        correct += int((logits.argmax(-1) == y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    count = len(client.test)
    return ClientReply(client.id, count, {}, {"correct": float(correct), "count": float(count), "loss": loss / count})


def batches(samples: int, size: int, steps: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Positions of so many full batches: a shuffled stream over the data that wraps."""
    stream = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        while len(stream) < size:
            stream = np.concatenate([stream, rng.permutation(samples)])
        yield stream[:size]
        stream = stream[size:]


def learning_rate(local: LocalConfig, round: int, total_rounds: int) -> float:
    """The rate of a round: constant, or half a cosine from the full rate in round 1 towards 0 after the last."""
    if local.schedule == "cosine":
        return local.lr * 0.5 * (1 + math.cos(math.pi * (round - 1) / total_rounds))
    return local.lr


def _receive(worker: Worker, received: Groups, round: int, rng: torch.Generator) -> LocalContext:
    for name, module in worker.modules.items():
        if name in received:
            module.load_state_dict(received[name])
    on_device = {
        group: {name: tensor.to(worker.device) for name, tensor in bag.items()} for group, bag in received.items()
    }
    return LocalContext(round, worker.total_rounds, worker.num_classes, worker.local.batch_size, on_device, rng)


def _counted_flops(worker: Worker, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> int:
    key = tuple(sorted(ctx.received))
    if key not in worker.flops:
        worker.flops[key] = step_flops(worker.algorithm, worker.modules, x, y, ctx)
    return worker.flops[key]
