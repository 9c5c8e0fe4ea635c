"""The normalisation layer that a model's convolutions are followed by.

BatchNorm: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167; GroupNorm: Wu and He, https://arxiv.org/abs/1803.08494;
InstanceNorm: Ulyanov et al., https://arxiv.org/abs/1607.08022
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedcir.types import InputError

GROUP = 16  # channels, or about as many: what divides a layer's decides


def norm_layer(kind: str, channels: int, first: bool = False) -> nn.Module:
    """A layer of this kind, which in the first stage of a network may be another than after it.

    `invariant` takes each image's own contrast and colour out in the first stage, by InstanceNorm, and normalises by
    groups of channels after it. Neither keeps statistics of the data.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "standardised":
        return nn.Identity()  # the weights are, see conv.py
    if kind == "invariant" and first:
        return InstanceNorm(channels)
    return nn.GroupNorm(groups_of(channels), channels)


def groups_of(channels: int) -> int:
    """Into how many groups GroupNorm splits so many channels."""
    return max(n for n in range(1, max(2, channels // GROUP + 1)) if channels % n == 0)


class InstanceNorm(nn.GroupNorm):
    """Each channel of each image to mean 0 and variance 1, then by weight and bias. Maps of any dimensions.

    The same as nn.InstanceNorm2d(channels, affine=True), and faster on a CPU: GroupNorm with a group a channel is, but
    in channels_last torch walks through its groups value by value, so that layout has a form of its own.
    """

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(channels, channels, eps, affine)

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[2:]) < 2:  # every value would be its own mean
            raise InputError(f"InstanceNorm needs maps of two values or more, got {list(x.shape)}: take larger images")
        last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        usual = x.device.type == "cpu" and self.affine and x.dtype == self.weight.dtype
        if last and usual and not torch._C._are_functorch_transforms_active():  # of single examples, see dpsgd.py
            return cast(Tensor, _ChannelsLast.apply(x, self.weight, self.bias, self.eps))  # type: ignore[no-untyped-call]
        return super().forward(x)


class _ChannelsLast(torch.autograd.Function):
    """InstanceNorm in passes over the whole batch, each of which is a fast one in channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        pixels = math.prod(x.shape[2:])
        centred = x - _sum(x).div_(pixels)
        precision = _sum(centred.square()).div_(pixels).add_(eps).rsqrt_()  # (B, C, 1, 1)
        weight = weight[:, None, None]
        ctx.save_for_backward(centred, precision, weight)
        return torch.addcmul(bias[:, None, None], centred, precision * weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        centred, precision, weight = ctx.saved_tensors
        total, along = _sum(slope), _sum(slope * centred) * precision  # of the slope, and of it times the output
        scale = precision * weight
        share = scale / -math.prod(slope.shape[2:])
        to_x = torch.addcmul(share * total, centred, share * along * precision).addcmul_(slope, scale)
        return to_x, along.sum((0, 2, 3)), total.sum((0, 2, 3)), None


def _sum(maps: Tensor) -> Tensor:
    return maps.sum((2, 3), keepdim=True)  # (B, C, 1, 1)
