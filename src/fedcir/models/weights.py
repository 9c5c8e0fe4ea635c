"""Published weights: read without running code, their names matched to a network's, and loaded."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedcir.models.tensors import is_statistic, kind_of
from fedcir.types import Arrays, InputError

WRAPPED = ("state_dict", "model_state_dict", "model")
"""Under what training scripts save the state dict, beside an optimiser and other things."""
SHOWN = 3
"""How many names an error tells of each kind."""


def read_weights(path: Path) -> Arrays:
    """Tensors from a .safetensors file, or from a .pth file by torch's loader that runs no code."""
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


def load_weights(network: nn.Module, arrays: Arrays, source: str) -> None:
    """Load published weights into a network.

    Names may begin otherwise in the file than in the network (`module.`, `backbone.`). Tensors that the network does
    not have, such as those of a classifier, are left out; all that it has must be there, in its shape.
    """
    own = network.state_dict()
    found = matched(arrays, own)
    missing = [name for name in own if name not in found and not name.endswith("num_batches_tracked")]
    wrong = [name for name, tensor in found.items() if tensor.shape != own[name].shape]
    if missing or wrong:
        used = {id(tensor) for tensor in found.values()}
        unused = [name for name, tensor in arrays.items() if id(tensor) not in used and not is_statistic(name)]
        parts = [
            _some(len(missing), "missing", [f"{name} {kind_of(own[name])}" for name in missing]),
            _some(
                len(wrong),
                "of another shape",
                [f"{name} is {kind_of(found[name])}, expected {kind_of(own[name])}" for name in wrong],
            ),
            _some(len(unused), "in the file only", [f"{name} {kind_of(arrays[name])}" for name in unused]),
        ]
        told = "; ".join(part for part in parts if part)
        raise InputError(
            f"model.weights: {source} does not fit {type(network).__name__}, which has {len(own)} tensors: {told}"
        )
    network.load_state_dict({**own, **{name: tensor.to(own[name].dtype) for name, tensor in found.items()}})


def matched(arrays: Arrays, own: Mapping[str, Tensor]) -> Arrays:
    """The tensors by the names of the network, which may lack or have a prefix that those of the file have or lack."""
    longer = Counter(prefix for name in arrays for prefix, rest in _cuts(name) if rest in own)
    shorter = Counter(prefix for name in own for prefix, rest in _cuts(name) if rest in arrays)
    strip, stripped = max(longer.items(), key=lambda each: each[1], default=("", 0))
    add, added = max(shorter.items(), key=lambda each: each[1], default=("", 0))
    if stripped >= added:
        named = {name.removeprefix(strip): t for name, t in arrays.items() if name.startswith(strip)}
    else:
        named = {add + name: tensor for name, tensor in arrays.items()}
    return {name: named[name] for name in own if name in named}


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """A name cut in two at each of its dots, and before its beginning."""
    parts = name.split(".")
    for place in range(len(parts)):
        yield "".join(f"{part}." for part in parts[:place]), ".".join(parts[place:])


def _some(count: int, what: str, names: Sequence[str]) -> str:
    more = ", ..." if count > SHOWN else ""
    return f"{count} {what} ({', '.join(names[:SHOWN])}{more})" if count else ""
