"""Where the stages of an encoder end, a way to change what passes there, and running statistics of it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)  # they end the last stage, and are no part of it


class FeatureStatistics(nn.ModuleList):
    """Running means of the mean and the standard deviation that each channel has within an image, stage by stage."""

    def __init__(self, channels: Mapping[str, int]) -> None:
        super().__init__(Running(count) for count in channels.values())
        self.places = tuple(channels)


class Running(nn.Module):
    """Of one stage."""

    mean: Tensor
    std: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))

    @torch.no_grad()
    def update(self, mean: Tensor, std: Tensor, momentum: float) -> None:
        """Move towards the mean over a batch of these (B, C)."""
        self.mean.lerp_(mean.mean(0), 1 - momentum)
        self.std.lerp_(std.mean(0), 1 - momentum)


def stage_ends(encoder: nn.Module, example: Tensor) -> dict[str, int]:
    """The parts of an encoder that end its stages, by name, and how many channels each gives on a batch like this.

    A stage begins with a part that holds a convolution, and ends with the last one before the next that gives images
    of channels. An encoder without any is one stage, whose features are its channels.
    """
    own = copy.deepcopy(encoder).eval()
    parts = dict(_parts(own))
    passed: list[tuple[str, Any]] = []
    for name, part in parts.items():
        part.register_forward_hook(lambda _, inputs, output, name=name: passed.append((name, output)))
    with torch.no_grad():
        features = own(example)
    once = [name for name, _ in passed]
    ends: dict[int, tuple[str, int]] = {}
    stage = 0
    for name, output in passed:
        stage += _convolves(parts[name])
        images = isinstance(output, Tensor) and output.ndim in (4, 5) and not isinstance(parts[name], POOLS)
        if stage and images and once.count(name) == 1:
            ends[stage] = name, output.shape[1]
    return dict(ends.values()) or {"": features.shape[1]}


@contextmanager
def changed_at(encoder: nn.Module, places: Sequence[str], change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Within it, `change` is asked for what each of these parts of the encoder gives on, with the part's number."""
    with ExitStack() as hooks:
        for number, place in enumerate(places):
            part = encoder.get_submodule(place)
            hooks.enter_context(part.register_forward_hook(partial(_changed, change, number)))
        yield


def _changed(change: Callable[[int, Tensor], Tensor], number: int, part: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return change(number, out)


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children, each of a list by itself, and those of an only child that convolves in its place."""
    children = dict(module.named_children())
    inner = [name for name, child in children.items() if _convolves(child)]
    for name, child in children.items():
        only = inner == [name] and not isinstance(child, _ConvNd)
        if only or isinstance(child, nn.ModuleList):
            yield from _parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(each, _ConvNd) for each in module.modules())
