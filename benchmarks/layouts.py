"""Which memory layout makes a local step faster, by model and image size: the table in runtime/resolution.py.

    python benchmarks/layouts.py [--sizes 28,32,64,128]

Steps of both layouts alternate in one run; one thread, batch of 32. Above 1, channels_last is faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.config import ModelConfig
from fedcir.machine import retain_freed_memory
from fedcir.models.builder import make_image_builder
from fedcir.models.networks import use_matmul_conv
from fedcir.models.optimizers import SGD

BATCH = 32


def prepared_step(
    model: ModelConfig, size: int, layout: torch.memory_format, compiled: bool = False
) -> Callable[[], None]:
    network = make_image_builder(model, 10, 3, seed=0).classifier()
    network.to(memory_format=layout).train()  # type: ignore[call-overload]
    use_matmul_conv(network)
    for part in network.children() if compiled else ():
        part.compile()
    return step_of(network, torch.randn(BATCH, 3, size, size).contiguous(memory_format=layout))


def step_of(network: nn.Module, x: Tensor) -> Callable[[], None]:
    """A local step of a network in training, always on this batch."""
    optimizer, y = SGD(network.parameters()), torch.randint(10, (len(x),))

    def step() -> None:
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(0.01, 0.9, 5e-4)

    return step


def in_turn(steps: list[Callable[[], None]], seconds: float) -> list[list[float]]:
    """The times of every step, taken in turn."""
    taken: list[list[float]] = [[] for _ in steps]
    for step in steps * 3:  # to warm up
        step()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(taken[0]) < 3:
        for step, times in zip(steps, taken, strict=True):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="cnn,resnet18")
    parser.add_argument("--sizes", default="28,32,64,96,128")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each pair")
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    print("| model | pixels | contiguous | channels_last | ratio |\n|---|---:|---:|---:|---:|")
    for model in given.models.split(","):
        for size in map(int, given.sizes.split(",")):
            config = ModelConfig(name=model)
            steps = [prepared_step(config, size, kind) for kind in (torch.contiguous_format, torch.channels_last)]
            first, second = map(statistics.median, in_turn(steps, given.seconds))
            print(
                f"| {model} | {size} | {1e3 * first:.1f} ms | {1e3 * second:.1f} ms | {first / second:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
