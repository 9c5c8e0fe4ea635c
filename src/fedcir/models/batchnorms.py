"""Another's network without BatchNorm: `renormalise` puts the norms of `model.norm = "invariant"` in its place.

For encoders from torchvision, timm or MONAI, pretrained or not, that go into `fedcir.train`.
"""

import copy
import math
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcir.config import Between
from fedcir.models.norm import InstanceNorm, groups_of
from fedcir.types import InputError


def renormalise(
    module: nn.Module, example: Tensor, kind: Literal["invariant", "group"] = "invariant", first: int | None = None
) -> nn.Module:
    """A copy of the network with InstanceNorm and GroupNorm in the place of BatchNorm, each with its weight and bias.

    `example` is a batch as the network takes it; it shows in which order the layers run and how large their maps are.
    The first stage gets InstanceNorm, and what comes after it GroupNorm; with `kind="group"` all get GroupNorm.
    `first` says how many BatchNorm layers, in the order in which they run, are the first stage. If it is not given, the
    stage ends where maps become smaller than those of the last layer that is as wide as the first: the stem and layer1
    of a ResNet, the first dense block of a DenseNet. Layers with maps of a single value get GroupNorm.
    """
    if kind not in ("invariant", "group"):
        raise InputError(f"kind must be invariant or group, got {kind!r}")
    if first is not None:
        Between(0, 1_000).check("first", first)
    own = copy.deepcopy(module)
    layers = [layer for layer in own.modules() if isinstance(layer, _BatchNorm)]
    if not layers:
        raise InputError(f"{type(module).__name__} has no BatchNorm layers to replace")
    sizes = {layer: size for layer, size in _map_sizes(own, layers, example).items() if size > 1}
    stage = list(sizes)[: _first_stage(sizes) if first is None else first] if kind == "invariant" else []
    norms: dict[nn.Module, nn.Module] = {layer: _norm_for(layer, instance=layer in stage) for layer in layers}
    _replace(own, norms)
    return norms.get(own, own)


def _map_sizes(module: nn.Module, layers: list[_BatchNorm], example: Tensor) -> dict[nn.Module, int]:
    """How many values a channel's map has at each layer, at its least, in the order in which the layers run."""
    sizes: dict[nn.Module, int] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        size = math.prod(inputs[0].shape[2:])
        sizes[layer] = min(size, sizes.get(layer, size))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    modes = {each: each.training for each in module.modules()}
    with torch.no_grad():
        module.eval()(example)
    for each, training in modes.items():
        each.training = training
    for hook in hooks:
        hook.remove()
    return sizes


def _first_stage(sizes: dict[nn.Module, int]) -> int:
    """How many layers run before maps become smaller than those of the last layer that is as wide as the first."""
    layers = list(sizes)
    if not layers:
        return 0
    alike = list(takewhile(lambda layer: layer.num_features == layers[0].num_features, layers))
    last = alike[-1] if len(alike) < len(layers) else layers[0]  # of one width throughout: the first map decides
    return sum(1 for _ in takewhile(lambda layer: sizes[layer] >= sizes[last], layers))


def _norm_for(layer: _BatchNorm, instance: bool) -> nn.Module:
    channels = layer.num_features
    norm = (
        InstanceNorm(channels, layer.eps, layer.affine)
        if instance
        else nn.GroupNorm(groups_of(channels), channels, layer.eps, layer.affine)
    )
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    others = list(layer.children())  # timm's BatchNormAct2d brings a dropout and an activation along
    return (nn.Sequential(norm, *others) if others else norm).train(layer.training)


def _replace(module: nn.Module, norms: dict[nn.Module, nn.Module]) -> None:
    for name, child in module._modules.items():  # named_children() leaves a layer out that stands in two places
        if child in norms:
            module.register_module(name, norms[child])
        elif child is not None:
            _replace(child, norms)
