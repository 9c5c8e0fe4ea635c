"""Pure functions on named tensors: copies, means, norms, sizes and checks."""

import hashlib
import math
from collections.abc import Iterable
from itertools import repeat

import torch
from torch import Tensor, nn

from fedcir.types import Aggregator, Groups, Tensors


def snapshot(module: nn.Module) -> Tensors:
    """Copy a module's parameters and buffers to the CPU, contiguous."""
    return to_cpu(module.state_dict())


def to_cpu(bag: Tensors) -> Tensors:
    """Copy tensors to the CPU, contiguous."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in bag.items()
    }


def clone(groups: Groups) -> Groups:
    """Return a deep copy."""
    return {group: {name: tensor.clone() for name, tensor in bag.items()} for group, bag in groups.items()}


def count_bytes(groups: Groups) -> int:
    """Count the bytes of the tensors, without headers."""
    return sum(tensor.numel() * tensor.element_size() for bag in groups.values() for tensor in bag.values())


class RunningMean(Aggregator):
    """Weighted mean of tensors added one by one; integer tensors take the maximum.

    Sums are in double precision, so that the mean of equal tensors in single precision is that tensor, bit for bit.
    """

    def __init__(self, broadcast: Tensors | None = None, settings: object = None) -> None:
        self._sums: Tensors = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0.0

    def add(self, bag: Tensors, weight: float = 1.0) -> None:
        first = not self._sums
        for name, tensor in bag.items():
            if not tensor.is_floating_point():
                self._sums[name] = tensor.clone() if first else torch.maximum(self._sums[name], tensor)
            elif first:
                self._sums[name] = tensor.double() * weight
                self._dtypes[name] = tensor.dtype
            else:
                self._sums[name].add_(tensor, alpha=weight)
        self._weight += weight

    def value(self) -> Tensors:
        if not self._weight:
            raise ValueError("there is nothing to average: add tensors first")
        return {
            name: (total / self._weight).to(self._dtypes[name]) if name in self._dtypes else total
            for name, total in self._sums.items()
        }


HEAD = frozenset({"head.weight", "head.bias"})
"""Names of the head's tensors in every model."""


def is_statistic(name: str) -> bool:
    """Check whether a name is that of a BatchNorm buffer."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def batchnorm_names(module: nn.Module) -> frozenset[str]:
    """Names of the weights and statistics of the BatchNorm layers in the state_dict."""
    layers = [(at, part) for at, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return frozenset(f"{at}.{name}" for at, layer in layers for name in layer.state_dict())


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module that train, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def hash_tensors(tensors: Tensors, start: bytes = b"") -> str:
    """Hash these bytes, and then names, types, shapes and values of tensors."""
    digest = hashlib.blake2b(start, digest_size=32)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {describe_tensor(tensor)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def to_second_moments(bag: Tensors) -> Tensors:
    """Replace running variances by second moments, variance + mean^2, which can be averaged; in double precision."""
    moments = {name: t.double() if name.endswith(("running_mean", "running_var")) else t for name, t in bag.items()}
    for name in bag:
        if name.endswith("running_var"):
            moments[name] = moments[name] + moments[name.removesuffix("var") + "mean"].square()
    return moments


def from_second_moments(bag: Tensors) -> Tensors:
    """The inverse of `to_second_moments`: with averaged moments, the variance of the mixture of all clients."""
    variances = {
        name: (tensor - bag[name.removesuffix("var") + "mean"].square()).clamp_min(0)
        for name, tensor in bag.items()
        if name.endswith("running_var")
    }
    moved = {**bag, **variances}
    return {name: t.float() if name.endswith(("running_mean", "running_var")) else t for name, t in moved.items()}


def average(bags: Iterable[Tensors], weights: Iterable[float] | None = None) -> Tensors:
    """Mean of several sets of tensors; see RunningMean."""
    running = RunningMean()
    for bag, weight in zip(bags, repeat(1.0) if weights is None else weights, strict=weights is not None):
        running.add(bag, weight)
    return running.value()


def update_norm(bag: Tensors, sent: Tensors, statistics: bool = False) -> float:
    """L2 norm of an update in double precision, without BatchNorm statistics or of these alone."""
    names = [name for name, t in bag.items() if t.is_floating_point() and is_statistic(name) == statistics]
    return math.sqrt(sum(float((bag[name].double() - sent.get(name, 0)).square().sum()) for name in names))


def clip_update(bag: Tensors, sent: Tensors, limit: float) -> Tensors:
    """Scale the change from `sent` down to the norm `limit`, statistics by the same factor; unchanged if below it."""
    norm = update_norm(bag, sent)
    if norm <= limit:
        return bag
    share = limit / norm
    return {
        name: sent[name].double().lerp(t.double(), share).to(t.dtype) if t.is_floating_point() else t
        for name, t in bag.items()
    }


def find_mismatch(groups: Groups, template: Groups) -> str | None:
    """Describe the first difference of names, shapes or dtypes from a template; None if they agree."""
    for group in sorted(groups.keys() | template.keys()):
        if group not in template or group not in groups:
            return f"group {group!r} is {'missing' if group in template else 'not expected'}"
        for name in sorted(groups[group].keys() | template[group].keys()):
            if name not in template[group] or name not in groups[group]:
                return f"{group}/{name} is {'missing' if name in template[group] else 'not expected'}"
            got, want = describe_tensor(groups[group][name]), describe_tensor(template[group][name])
            if got != want:
                return f"{group}/{name} is {got}, expected {want}"
    return None


def find_non_finite(groups: Groups) -> str | None:
    """Name the first tensor that holds a NaN or an infinity; None if all are finite."""
    for group, bag in groups.items():
        for name, tensor in bag.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{group}/{name}"
    return None


def describe_tensor(tensor: Tensor) -> str:
    """Dtype and shape, such as float32[64, 3, 7, 7]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
