"""What torch.compile brings to a local step: `cnn` at 32 pixels, batch of 32, one thread, steps in turn.

    python benchmarks/compiled.py

Needs a C++ compiler. Prints the first call's seconds too, since that is what it costs.
"""

import statistics
import time

import torch
from layouts import prepared_step

from fedcir.config import ModelConfig

STEPS = 60


def main() -> None:
    torch.set_num_threads(1)
    steps = {
        name: prepared_step(ModelConfig(), 32, torch.channels_last, name == "compiled")
        for name in ("plain", "compiled")
    }
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
