"""How much of a training step could still be saved: one thread, batch of 32, channels_last.

    python benchmarks/steps.py [--seconds 10]

The first table says how much of a step the convolutions take, each timed alone, and how fast they are beside a large
product of matrices, which is as fast as this processor gets. The second one compares the small CNN with a form of it
whose norm, pooling and ReLU are one function that works on pooled maps where it can. Steps alternate.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from contestants.workload import WORKLOADS, network
from layouts import BATCH, in_turn, prepared_step, step_of
from torch import Tensor, nn

from fedcir.config import ModelConfig
from fedcir.machine import retain_freed_memory
from fedcir.models.builder import make_image_builder
from fedcir.models.networks import CNN
from fedcir.reporting.page import to_markdown

aten = torch.ops.aten


class NormPoolReLU(torch.autograd.Function):
    """A norm with statistics, pooling of 2x2 and ReLU. The statistics need all pixels; the rest works on a quarter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        ctx.groups, ctx.pixels = groups, x.shape[2] * x.shape[3]
        centred = x - _mean(x.sum((2, 3)), groups, ctx.pixels)[:, :, None, None]
        variance = _mean((centred * centred).sum((2, 3)), groups, ctx.pixels)
        precision = (variance + eps).rsqrt()  # (B or 1, C)
        signs = torch.where(weight < 0, -1.0, 1.0)[:, None, None] if bool((weight < 0).any()) else None
        pooled, places = F.max_pool2d(centred if signs is None else centred * signs, 2, return_indices=True)
        pooled = pooled if signs is None else pooled * signs
        y = torch.addcmul(bias[:, None, None], pooled, (precision * weight)[:, :, None, None]).relu_()
        ctx.save_for_backward(centred, precision, weight, pooled, places, y)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        centred, precision, weight, pooled, places, y = ctx.saved_tensors
        slope = aten.threshold_backward(slope, y, 0)
        total, along = slope.sum((2, 3)), (slope * pooled).sum((2, 3)) * precision
        shift = _mean(total * weight, ctx.groups, ctx.pixels) * precision
        tilt = _mean(along * weight, ctx.groups, ctx.pixels) * precision.square()
        scaled = slope * (precision * weight)[:, :, None, None]
        to_x = aten.max_pool2d_with_indices_backward(scaled, centred, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        to_x.addcmul_(centred, tilt[:, :, None, None], value=-1).sub_(shift[:, :, None, None])
        return to_x, along.sum(0), total.sum(0), None, None


def _mean(sums: Tensor, groups: int, pixels: int) -> Tensor:
    """Sums over maps (B, C) to means: over the batch if there are no groups, else within each group of channels."""
    if not groups:
        return sums.sum(0, keepdim=True) / (len(sums) * pixels)
    size = sums.shape[1] // groups
    return (sums.unflatten(1, (groups, size)).sum(2) / (size * pixels)).repeat_interleave(size, 1)


def one_function(self: CNN, x: Tensor) -> Tensor:
    """The network's forward pass. BatchNorm's running statistics stay as they are, which only makes it faster."""
    for conv, norm in zip(self.convs, self.norms, strict=True):
        x = NormPoolReLU.apply(conv(x), norm.weight, norm.bias, getattr(norm, "num_groups", 0), norm.eps)
    return F.relu(self.fc(torch.flatten(x, 1)), inplace=True)


def fused_step(model: ModelConfig, size: int) -> Callable[[], None]:
    step, plain = prepared_step(model, size, torch.channels_last), CNN.forward

    def fused() -> None:
        CNN.forward = one_function  # type: ignore[method-assign]
        step()
        CNN.forward = plain  # type: ignore[method-assign]

    return fused


def networks() -> dict[str, tuple[nn.Module, int]]:
    found = {name: (network(work), work.size) for name, work in WORKLOADS.items()}
    small = make_image_builder(ModelConfig(name="cnn"), 10, 3, seed=0).classifier()
    return {**found, "cnn": (small, 32)}


def convolutions(net: nn.Module, x: Tensor) -> tuple[Callable[[], None], float]:
    """All convolutions of a step alone, forwards and backwards, and how many FLOPs they are."""
    calls: list[tuple[nn.Conv2d, Tensor, Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda layer, given, y: calls.append((layer, given[0].detach(), y.detach())))
        for layer in net.modules()
        if isinstance(layer, nn.Conv2d)
    ]
    net(x)
    for hook in hooks:
        hook.remove()
    inner = [given.data_ptr() != x.data_ptr() for _, given, _ in calls]  # images need no gradient
    flops = sum(2 * y.numel() * c.weight[0].numel() * (2 + each) for (c, _, y), each in zip(calls, inner, strict=True))

    @torch.no_grad()
    def every() -> None:
        for (layer, given, y), to_input in zip(calls, inner, strict=True):
            layer(given)
            settings = (layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups)
            bias = None if layer.bias is None else [len(layer.bias)]
            aten.convolution_backward(y, given, layer.weight, bias, *settings, [to_input, True, bias is not None])

    return every, float(flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    square = torch.randn(1024, 1024)
    rows = [["network", "a step", "its convolutions alone", "share", "GFLOP/s", "of a product of matrices"]]
    for name, (net, size) in networks().items():
        net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        x = torch.randn(BATCH, 3, size, size).contiguous(memory_format=torch.channels_last)
        alone, flops = convolutions(net, x)
        step, convs, product = map(
            statistics.median, in_turn([step_of(net, x), alone, lambda: square @ square], given.seconds)
        )
        speed = flops / convs / 1e9
        cells = [name, f"{1e3 * step:.1f} ms", f"{1e3 * convs:.1f} ms", f"{convs / step:.2f}"]
        rows.append([*cells, f"{speed:.0f}", f"{speed / (2 * 1024**3 / product / 1e9):.2f}"])
    print(to_markdown(rows))
    rows = [["cnn", "plain", "norm, pooling and ReLU as one", "ratio"]]
    for norm in ("batch", "invariant"):
        model = ModelConfig(name="cnn", norm=norm)  # type: ignore[arg-type]
        plain, fused = in_turn([prepared_step(model, 32, torch.channels_last), fused_step(model, 32)], given.seconds)
        ratio = statistics.median(b / a for a, b in zip(plain, fused, strict=True))
        times = [f"{1e3 * statistics.median(taken):.1f} ms" for taken in (plain, fused)]
        rows.append([norm, *times, f"{ratio:.2f}"])
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    main()
