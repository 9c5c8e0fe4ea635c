"""What torch.compile brings to a local step: `cnn` at 32 pixels, batch of 32, one thread, steps in turn.

    python benchmarks/compiled.py

Needs a C++ compiler. Prints the first call's seconds too, since that is what it costs.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fedcir.config import ModelConfig
from fedcir.models.task import image_task
from fedcir.optim import SGD

STEPS = 60


def prepared_step(compiled: bool) -> Callable[[], None]:
    network = image_task(ModelConfig(), 10, 3, seed=0).classifier()
    network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    if compiled:
        for part in network.children():
            part.compile()
    optimizer = SGD(network.parameters())
    x = torch.randn(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (32,))

    def step() -> None:
        loss = F.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(0.01, 0.9, 5e-4)

    return step


def main() -> None:
    torch.set_num_threads(1)
    steps = {name: prepared_step(name == "compiled") for name in ("plain", "compiled")}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        started = time.perf_counter()
        step()
        print(f"first {name} step: {time.perf_counter() - started:.1f} s")
    for _ in range(STEPS):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - started)
    plain, compiled = (statistics.median(times[5:]) for times in taken.values())
    print(f"plain {1e3 * plain:.1f} ms, compiled {1e3 * compiled:.1f} ms: {plain / compiled:.2f} times as fast")


if __name__ == "__main__":
    main()
