"""Convolutions of 3x3 on small maps: torch's kernel beside matmul_conv.

Forward and backward passes, batch of 32, one thread.

    python benchmarks/matmul_conv.py [--seconds 2]

In channels_last. The ratio is the median of those to torch's own just before. `MATMUL_CHANNELS` in models/networks.py
follows this table.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from layouts import BATCH, in_turn
from torch import nn

from fedcir.machine import retain_freed_memory
from fedcir.models import networks
from fedcir.reporting.page import to_markdown

CHANNELS = (64, 128, 256, 512)
SIDES = (1, 2, 4, 8)


def prepared(channels: int, side: int, by_matmul: bool) -> Callable[[], None]:
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if by_matmul:
        layer.__class__ = networks.MatmulConv2d
    x = torch.randn(BATCH, channels, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()
    slope = torch.randn_like(x)

    def step() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(slope)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each pair")
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    networks.MATMUL_CHANNELS = 0  # everywhere
    rows = [["channels", *(f"{side}x{side}" for side in SIDES)]]
    for channels in CHANNELS:
        row = [str(channels)]
        for side in SIDES:
            usual, ours = in_turn([prepared(channels, side, each) for each in (False, True)], given.seconds)
            ratio = statistics.median(a / b for a, b in zip(usual, ours, strict=True))
            row.append(f"{1e3 * statistics.median(usual):.1f} ms, {ratio:.2f}")
        rows.append(row)
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    main()
