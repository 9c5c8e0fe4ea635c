"""Another's network as an encoder: called by its name, its classifier cut off, its maps pooled.

`package.module:callable` (monai.networks.nets:DenseNet121), `timm:NAME`, or `./mine.py:callable`: whatever returns an
nn.Module on images.
"""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedcir.config import ModelConfig, nearest
from fedcir.config.own_file import import_file
from fedcir.types import InputError

TIMM = "timm"
ENDS = (nn.Identity, nn.Softmax, nn.LogSoftmax, nn.Sigmoid, nn.Dropout)
"""What may follow a classifier's last layer."""


class ForeignEncoder(nn.Module):
    """A network that gives features (B, F), or maps of channels, which are pooled to (B, C) by their mean."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        features = self.network(x)
        if isinstance(features, tuple | list):  # some give more beside, such as what their blocks gave
            features = features[0]
        return features.flatten(2).mean(2) if isinstance(features, Tensor) and features.ndim > 3 else features


def call_foreign(model: ModelConfig) -> nn.Module:
    """The network that the configured callable returns."""
    function = find_callable(model.name)
    called = f"model.name: {model.name}({', '.join(f'{name}={value!r}' for name, value in model.arguments.items())})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of others' code, which the user cannot mend
            network = function(**model.arguments)
    except (Exception, SystemExit) as error:
        raise InputError(f"{called} fails: {one_line(error)}; set model.arguments") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"{called} must return an nn.Module, got {type(network).__name__}")
    return network


def find_callable(name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    module = import_file(Path(place), "model") if place.endswith(".py") else _imported(place, name)
    if place == TIMM:
        create = module.create_model
        return lambda **arguments: create(attribute, **{"pretrained": False, **arguments})
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [each for each in dir(found) if not each.startswith("_")]
            raise InputError(f"model.name: {place} has no {part!r}; {nearest(part, known) if known else 'it is empty'}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"model.name: {name} is of type {type(found).__name__}: name a class or a function")
    return cast(Callable[..., Any], found)


def _imported(place: str, name: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise InputError(f"model.name: {place} cannot be imported: {one_line(error)}") from error
        package = place.partition(".")[0]
        fix = f"install {package}" if error.name == package else f"{package} is there, but has no such module"
        raise InputError(f"model.name: {name} needs the module {place}, which is not here: {fix}") from None
    except (Exception, SystemExit) as error:
        raise InputError(f"model.name: {place} cannot be imported: {one_line(error)}") from error


def without_classifier(network: nn.Module, example: Tensor, name: str) -> nn.Module:
    """The network with the linear layer that ends it, if one does, replaced by the identity.

    It is the last layer with weights that runs on the example, and what it gives is what the network gives, but for a
    softmax or the like.
    """
    last: list[tuple[nn.Module, Any]] = []
    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(lambda leaf, _, output: last.append((leaf, output))) for leaf in leaves]
    try:
        with torch.no_grad():
            output = network.eval()(example)
    except Exception as error:
        what = f"images of {example.shape[1]} channels and {example.shape[-1]} pixels"
        raise InputError(f"model.name: {name} fails on {what}: {one_line(error)}; set model.arguments") from error
    finally:
        for hook in hooks:
            hook.remove()
        network.train()
    output = output[0] if isinstance(output, tuple | list) and output else output
    while last and isinstance(last[-1][0], ENDS) and last[-1][1] is output:
        last.pop()
        output = last[-1][1] if last else None
    if not last or not isinstance(last[-1][0], nn.Linear) or last[-1][1] is not output:
        return network
    return _replaced(network, last[-1][0])


def _replaced(network: nn.Module, layer: nn.Module) -> nn.Module:
    if network is layer:
        return nn.Identity()
    for module in network.modules():
        for name, child in module._modules.items():
            if child is layer:
                module._modules[name] = nn.Identity()
    return network


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
