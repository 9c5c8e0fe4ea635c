"""Partial training: an encoder of which some parts train, or low-rank adapters (LoRA) on its layers.

E. J. Hu, Y. Shen, P. Wallis, Z. Allen-Zhu, Y. Li, S. Wang, L. Wang, W. Chen. LoRA: Low-Rank Adaptation of Large
Language Models. ICLR 2022. https://arxiv.org/abs/2106.09685
"""

import copy
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedcir.config import ModelConfig
from fedcir.errors import InputError
from fedcir.models.pretrained import ForeignEncoder
from fedcir.models.tensors import snapshot
from fedcir.rng import seeded_init
from fedcir.types import Tensors

HEAD_PART = "head"
"""Name of the head in `model.train`; it trains anyway."""
RANK, ALPHA = 8, 16.0
ADAPTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Kinds of layers that get adapters; a grouped convolution has too few weights for one."""


class LowRank(nn.Module):
    """A change of a layer's weight by the product of two matrices, which is zero at first.

    It adds to a convolution one with the same kernel to `rank` channels, followed by a 1x1 convolution.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, weight[0].numel()))
        self.up = nn.Parameter(torch.zeros(len(weight), rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.scale * self.up @ self.down).view(weight.shape)


class PartialEncoder(nn.Module):
    """An encoder of which the tensors `trained` train; the others do not change, and no message holds them.

    Parts without a trained tensor stay in evaluation mode, so that their BatchNorm uses its running statistics.
    """

    def __init__(self, network: nn.Module, trained: frozenset[str]) -> None:
        super().__init__()
        self.network, self.trained = network, trained
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in trained)
        mixed = {prefix for name in trained for prefix in ("", *_list_prefixes(name))}
        self.frozen_parts = [at for at, part in network.named_modules() if at not in mixed and part.state_dict()]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.network(x))

    def train(self, mode: bool = True) -> "PartialEncoder":
        super().train(mode)
        for at in self.frozen_parts:
            self.network.get_submodule(at).eval()
        return self


def limit_training(encoder: nn.Module, model: ModelConfig, seed: int) -> PartialEncoder:
    """Freeze an encoder but for the parts that `model.train` names, and add the adapters of `model.adapter`."""
    inner = "network." if isinstance(encoder, ForeignEncoder) else ""  # which users do not see
    names = {name: name.removeprefix(inner) for name in encoder.state_dict()}
    trained: set[str] = set()
    for part in set(model.train or ()) - {HEAD_PART}:
        chosen = {name for name, shown in names.items() if _is_within(shown, part)}
        if not chosen:
            raise InputError(
                f"model.train: the encoder has no part {part!r}; choose from {_list_parts(encoder, inner)}"
            )
        trained |= chosen
    for at, part in encoder.named_modules():  # the buffers beside what trains, such as BatchNorm's statistics
        kinds = (part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        parameters, buffers = ({f"{at}.{name}".lstrip(".") for name, _ in tensors} for tensors in kinds)
        if (parameters | buffers) & trained:
            trained |= buffers & names.keys()
    if model.adapter == "lora":
        _add_adapters(encoder, model, seed, trained, inner)
        adapters = (at for at, part in encoder.named_modules() if isinstance(part, LowRank))
        trained |= {f"{at}.{matrix}" for at in adapters for matrix in ("down", "up")}
    return PartialEncoder(encoder, frozenset(trained))


def _add_adapters(encoder: nn.Module, model: ModelConfig, seed: int, trained: set[str], inner: str) -> None:
    """Add adapters to the layers that `model.adapter_targets` names, or to all, without those that train."""
    layers = {
        at.removeprefix(inner): layer
        for at, layer in encoder.named_modules()
        if isinstance(layer, ADAPTED) and getattr(layer, "groups", 1) == 1 and f"{at}.weight".lstrip(".") not in trained
    }
    if not layers:
        raise InputError("model.adapter: the encoder has no linear layer or plain convolution that is frozen")
    targets = model.adapter_targets or ("*",)
    for target in targets:
        if not any(_is_within(at, target) for at in layers):
            raise InputError(
                f"model.adapter_targets: {target!r} is no linear layer, no plain convolution and no part with one; "
                f"choose from {', '.join(layers)}"
            )
    with seeded_init(seed, "init", "adapter"):
        for layer in (layer for at, layer in layers.items() if any(_is_within(at, target) for target in targets)):
            adapter = LowRank(layer.weight, model.adapter_rank or RANK, model.adapter_alpha or ALPHA)
            parametrize.register_parametrization(layer, "weight", adapter)


def merge_adapters(network: nn.Module) -> nn.Module:
    """Return a copy of a network with its adapters added into the weights; the network itself if it has none."""
    if not any(isinstance(part, LowRank) for part in network.modules()):
        return network
    merged = copy.deepcopy(network)
    layers = [part for part in merged.modules() if parametrize.is_parametrized(part, "weight")]
    for layer in [layer for layer in layers if any(isinstance(part, LowRank) for part in layer.modules())]:
        # remove_parametrizations would change the class of the layer, which its original shares.
        weight = cast(Tensor, layer.weight).detach().clone()
        del layer.parametrizations
        layer.__class__ = type(layer).__bases__[0]
        layer.weight = nn.Parameter(weight)
    return merged


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of the tensors of a model that never change."""
    encoders = [(at, part) for at, part in model.named_modules() if isinstance(part, PartialEncoder)]
    return frozenset(
        f"{at}.network.{name}".lstrip(".")
        for at, encoder in encoders
        for name in encoder.network.state_dict().keys() - encoder.trained
    )


def select_frozen(model: nn.Module) -> Tensors:
    """Select the tensors of a model that never change."""
    names = frozen_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def snapshot_trained(model: nn.Module) -> Tensors:
    """Copy a model's tensors to the CPU, without those that never change."""
    frozen = frozen_names(model)
    return {name: tensor for name, tensor in snapshot(model).items() if name not in frozen}


def load_trained(model: nn.Module, tensors: Tensors) -> None:
    """Load tensors of a model, which keeps those that are missing."""
    model.load_state_dict({**model.state_dict(), **tensors})


def _is_within(name: str, pattern: str) -> bool:
    """Check whether a tensor or module is what a pattern names, or a part of it."""
    return any(fnmatchcase(prefix, pattern) for prefix in _list_prefixes(name))


def _list_prefixes(name: str) -> Iterator[str]:
    """Yield the name of each module around a tensor, and its own."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _list_parts(encoder: nn.Module, inner: str) -> str:
    """List the parts of an encoder for an error; those of a list of parts as a range."""
    names = []
    for at, part in (encoder.get_submodule("network") if inner else encoder).named_children():
        inside = [name for name, _ in part.named_children() if name.isdecimal()]
        if part.state_dict():
            names.append(f"{at}.{inside[0]} to {at}.{inside[-1]}" if len(inside) > 1 else at)
    return ", ".join([*names, HEAD_PART])
