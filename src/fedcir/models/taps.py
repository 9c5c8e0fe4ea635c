"""Convolutions of small maps as products of matrices, one for each tap of the kernel.

On a CPU, torch's gradients of a convolution are slow where maps are small and channels many, as at the end of a ResNet:
at 2x2 pixels two to three times as slow as these products (benchmarks/taps.py). There, many taps meet nothing but
padding, and are left out here.
"""

from itertools import starmap
from typing import Any, cast

import torch
from torch import Tensor, nn

CHANNELS = 64  # for each pixel of a map's side; with fewer, calling the products takes longer than what they save

Span = tuple[int, slice, slice]
"""A tap, the positions of the output that it has a part in, and those of the input that it meets there."""


def use_taps(network: nn.Module) -> None:
    """Have a network's own convolutions of small maps done by taps while it trains. Its tensors stay what they are."""
    for layer in network.modules():
        if type(layer) is nn.Conv2d and _fits(layer):
            layer.__class__ = TapConv2d


def leave_taps(network: nn.Module) -> None:
    """Undo it."""
    for layer in network.modules():
        if type(layer) is TapConv2d:
            layer.__class__ = nn.Conv2d  # type: ignore[assignment]


def _fits(layer: nn.Conv2d) -> bool:
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return plain and not isinstance(layer.padding, str) and layer.in_channels >= CHANNELS and layer.kernel_size > (1, 1)


class TapConv2d(nn.Conv2d):
    """nn.Conv2d, by taps where that is faster: in training, on a CPU, in channels_last, and where maps are small."""

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self._usual(x)):
            return super().forward(x)
        sides = zip(x.shape[2:], self.kernel_size, self.stride, cast(tuple[int, int], self.padding), strict=True)
        (height, rows), (width, columns) = starmap(tap_spans, sides)
        if height * width * CHANNELS**2 > self.in_channels**2:
            return super().forward(x)
        y = cast(Tensor, _Taps.apply(x, self.weight, (height, width), rows, columns))  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias[:, None, None]

    def _usual(self, x: Tensor) -> bool:
        weight = self.weight
        last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        right = x.ndim == 4 and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
        apart = torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()  # see norm.py
        return last and right and not apart and not torch.is_autocast_enabled("cpu")


def tap_spans(size: int, kernel: int, stride: int, padding: int) -> tuple[int, list[Span]]:
    """Along one side: the size of the output, and the taps that meet something of an input of this size."""
    out = (size + 2 * padding - kernel) // stride + 1
    spans = []
    for tap in range(kernel):
        offset = tap - padding  # of the input's position to the output's times the stride
        first, end = max(0, -(offset // stride)), min(out, (size - 1 - offset) // stride + 1)
        if first < end:
            start = first * stride + offset
            spans.append((tap, slice(first, end), slice(start, start + (end - first - 1) * stride + 1, stride)))
    return out, spans


class _Taps(torch.autograd.Function):
    """Everything lies as (B, H, W, C), and the weights as (O, H, W, C)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, size: tuple[int, int], rows: list[Span], columns: list[Span]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.columns = rows, columns
        inputs, weights = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
        # Not a view, which an activation that works in place would refuse.
        y = torch.empty(len(x), len(weight), *size, dtype=x.dtype, memory_format=torch.channels_last).zero_()
        outputs = y.permute(0, 2, 3, 1)
        for i, to_row, row in rows:
            for j, to_column, column in columns:
                outputs[:, to_row, to_column] += inputs[:, row, column] @ weights[:, i, j].T
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        inputs, weights, slopes = (each.permute(0, 2, 3, 1) for each in (x, weight, slope))
        to_weights = torch.zeros_like(weights)
        to_inputs = torch.zeros_like(inputs, memory_format=torch.contiguous_format)
        wanted = ctx.needs_input_grad[0]
        for i, to_row, row in ctx.rows:
            for j, to_column, column in ctx.columns:
                part = slopes[:, to_row, to_column]  # (B, h, w, O)
                met = inputs[:, row, column]  # (B, h, w, C)
                to_weights[:, i, j] = part.flatten(0, 2).T @ met.flatten(0, 2)
                if wanted:
                    to_inputs[:, row, column] += part @ weights[:, i, j]
        return to_inputs.permute(0, 3, 1, 2) if wanted else None, to_weights.permute(0, 3, 1, 2), None, None, None
