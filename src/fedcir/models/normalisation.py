"""Normalisation layers, and `renormalise`, which replaces the BatchNorm layers of any network by them.

It is meant for encoders from torchvision, timm or MONAI, pretrained or not, that are passed to `fedcir.train`.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fedcir.errors import InputError
from fedcir.validation import Between

GROUP = 16  # channels in a group, approximately: the number of groups divides the number of channels


def make_norm(kind: str, channels: int, first: bool = False) -> nn.Module:
    """Make a layer of this kind, which may depend on whether it is in the first stage of a network.

    `invariant` removes each image's contrast and colour in the first stage, by InstanceNorm, and normalises by groups
    of channels after it. Neither has statistics of the data.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "standardised":
        return nn.Identity()  # the weights are standardised, see StandardisedConv
    if kind == "invariant" and first:
        return InstanceNorm(channels)
    return nn.GroupNorm(count_groups(channels), channels)


def count_groups(channels: int) -> int:
    """Number of groups that GroupNorm divides the channels into."""
    return max(n for n in range(1, max(2, channels // GROUP + 1)) if channels % n == 0)


class InstanceNorm(nn.GroupNorm):
    """nn.InstanceNorm2d(channels, affine=True) for maps of any dimensions, faster on a CPU.

    GroupNorm with one channel per group is faster, but not with channels_last, where torch processes groups value by
    value; that layout has an implementation of its own.
    """

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(channels, channels, eps, affine)

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[2:]) < 2:  # every value would be its own mean
            raise InputError(f"InstanceNorm needs maps of two values or more, got {list(x.shape)}: take larger images")
        last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        usual = x.device.type == "cpu" and self.affine and x.dtype == self.weight.dtype
        if last and usual and not torch._C._are_functorch_transforms_active():  # gradients of single examples
            return cast(Tensor, _ChannelsLast.apply(x, self.weight, self.bias, self.eps))  # type: ignore[no-untyped-call]
        return super().forward(x)


class _ChannelsLast(torch.autograd.Function):
    """InstanceNorm as operations on the whole batch that are fast with channels_last."""

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


def renormalise(
    module: nn.Module, example: Tensor, kind: Literal["invariant", "group"] = "invariant", first: int | None = None
) -> nn.Module:
    """Copy a network with InstanceNorm and GroupNorm instead of BatchNorm, each with its weight and bias.

    `example` is an input batch, with which the order of the layers and the sizes of their maps are found.
    The first stage gets InstanceNorm, and later layers GroupNorm; with `kind="group"` all get GroupNorm.
    `first` is the number of BatchNorm layers, in the order in which they run, of the first stage. Without it the stage
    ends where maps become smaller than those of the last layer that is as wide as the first: the stem and layer1
    of a ResNet, the first dense block of a DenseNet. Layers with maps of a single value get GroupNorm.
    """
    if kind not in ("invariant", "group"):
        raise InputError(f"kind must be invariant or group, got {kind!r}")
    if first is not None:
        Between(0, 1_000).check("first", first)
    copied = copy.deepcopy(module)
    layers = [layer for layer in copied.modules() if isinstance(layer, _BatchNorm)]
    if not layers:
        raise InputError(f"{type(module).__name__} has no BatchNorm layers to replace")
    sizes = {layer: size for layer, size in _map_sizes(copied, layers, example).items() if size > 1}
    stage = []
    if kind == "invariant" and sizes:
        stage = list(sizes)[: _find_first_stage(sizes) if first is None else first]
    norms: dict[nn.Module | None, nn.Module] = {}
    for layer in layers:
        channels, groups = layer.num_features, count_groups(layer.num_features)
        norm = nn.GroupNorm(groups, channels, layer.eps, layer.affine)
        if layer in stage:
            norm = InstanceNorm(channels, layer.eps, layer.affine)
        if layer.affine:
            norm.weight, norm.bias = layer.weight, layer.bias
        children = list(layer.children())  # timm's BatchNormAct2d has a dropout and an activation
        norms[layer] = (nn.Sequential(norm, *children) if children else norm).train(layer.training)
    for parent in list(copied.modules()):
        for name, child in parent._modules.items():  # named_children() lists a layer once that is used twice
            if child in norms:
                parent.register_module(name, norms[child])
    return norms.get(copied, copied)


def _map_sizes(module: nn.Module, layers: list[_BatchNorm], example: Tensor) -> dict[_BatchNorm, int]:
    """Return the smallest number of values of a channel's map at each layer, in the order in which they run."""
    sizes: dict[_BatchNorm, int] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        size = math.prod(inputs[0].shape[2:])
        sizes[layer] = min(size, sizes.get(layer, size))

    modes = {part: part.training for part in module.modules()}
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(note))
        module.eval()(example)
    for part, training in modes.items():
        part.training = training
    return sizes


def _find_first_stage(sizes: dict[_BatchNorm, int]) -> int:
    """Count the layers before maps become smaller than those of the last layer that is as wide as the first."""
    layers = list(sizes)
    alike = list(takewhile(lambda layer: layer.num_features == layers[0].num_features, layers))
    last = alike[-1] if len(alike) < len(layers) else layers[0]  # if all have one width, the first map decides
    return sum(1 for _ in takewhile(lambda layer: sizes[layer] >= sizes[last], layers))


def find_statistics_layers(network: nn.Module) -> list[_BatchNorm]:
    """Return the layers that normalise by running statistics of training data."""
    return [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


@contextmanager
def estimate_statistics(network: nn.Module, layers: Sequence[Any] | None = None) -> Iterator[None]:
    """Replace BatchNorm statistics by those of the batches that pass within, each with the same weight (AdaBN).

    `layers` are the ones to change; all if not given.
    """
    layers = find_statistics_layers(network) if layers is None else layers
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.train().reset_running_stats()
        layer.momentum = None  # the plain mean of all batches
    yield
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.eval().momentum = momentum
