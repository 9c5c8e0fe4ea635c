"""What a training step costs with each normalisation beside one with BatchNorm: one thread, batch of 32.

    python benchmarks/norms.py [--seconds 10] [--layouts auto,contiguous,channels_last]

Steps alternate in one process. The ratio is the median of those to the BatchNorm step before it in the same layout, so
it holds on a noisy machine where the milliseconds do not. `auto` is the layout that a run would take.
"""

import argparse
import statistics

import torch
from layouts import in_turn, prepared_step

from fedcir.config import ModelConfig
from fedcir.machine import retain_freed_memory
from fedcir.reporting.page import to_markdown
from fedcir.runtime.resolution import choose_layout

NORMS = ("batch", "group", "invariant", "standardised")
CASES = [("cnn", 16, 32), ("resnet18", 16, 64)]  # model, width, pixels
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each model and layout")
    parser.add_argument("--layouts", default="auto", help="auto, contiguous or channels_last; several by commas")
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    rows = [["model", "pixels", "layout", "norm", "a step", "of BatchNorm's"]]
    for name, width, size in CASES:
        for layout in given.layouts.split(","):
            models = [ModelConfig(name=name, width=width, norm=norm) for norm in NORMS]  # type: ignore[arg-type]
            used = [choose_layout(model) if layout == "auto" else layout for model in models]
            steps = [prepared_step(m, size, LAYOUTS[each]) for m, each in zip(models, used, strict=True)]
            base, *_ = taken = in_turn(steps, given.seconds)
            for norm, each, times in zip(NORMS, used, taken, strict=True):
                ratio = statistics.median(own / batch for own, batch in zip(times, base, strict=True))
                milliseconds = f"{1e3 * statistics.median(times):.1f} ms"
                rows.append([name, str(size), each, norm, milliseconds, f"{ratio:.2f}"])
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    main()
