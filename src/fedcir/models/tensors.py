"""Pure functions on bags of tensors: copies, means, sizes and checks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedcir.types import Arrays, Groups


def snapshot(module: nn.Module) -> Arrays:
    """A copy of the module's parameters and buffers on the CPU, in the ordinary memory layout."""
    return at_rest(module.state_dict())


def at_rest(bag: Arrays) -> Arrays:
    """A copy of the tensors on the CPU, in the ordinary memory layout."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in bag.items()
    }


def clone(groups: Groups) -> Groups:
    """A deep copy."""
    return {group: {name: tensor.clone() for name, tensor in bag.items()} for group, bag in groups.items()}


def tensor_bytes(groups: Groups) -> int:
    """Bytes of the tensors alone, without headers."""
    return sum(tensor.numel() * tensor.element_size() for bag in groups.values() for tensor in bag.values())


class RunningMean:
    """The weighted mean of bags added one by one; integer tensors take the maximum.

    Sums are kept in double precision, so that the mean of equal bags of single precision is that bag, bit for bit.
    """

    def __init__(self) -> None:
        self._sums: Arrays = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0.0

    def add(self, bag: Arrays, weight: float = 1.0) -> None:
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

    def value(self) -> Arrays:
        if not self._weight:
            raise ValueError("the mean of no bags is not defined")
        return {
            name: (total / self._weight).to(self._dtypes[name]) if name in self._dtypes else total
            for name, total in self._sums.items()
        }


def is_statistic(name: str) -> bool:
    """Whether a name is that of a BatchNorm buffer."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def batchnorm_names(module: nn.Module) -> frozenset[str]:
    """The weights and statistics of its BatchNorm layers, as its state_dict names them."""
    layers = [(at, part) for at, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return frozenset(f"{at}.{name}" for at, layer in layers for name in layer.state_dict())


def second_moments(bag: Arrays) -> Arrays:
    """The bag with every running variance replaced by variance + mean^2, which can be averaged; both in double."""
    moments = {name: t.double() if name.endswith(("running_mean", "running_var")) else t for name, t in bag.items()}
    for name in bag:
        if name.endswith("running_var"):
            moments[name] = moments[name] + moments[_mean_of(name)].square()
    return moments


def pooled_variances(bag: Arrays) -> Arrays:
    """The inverse of `second_moments`: with averaged moments, the variance of the mixture of all clients."""
    variances = {
        name: (tensor - bag[_mean_of(name)].square()).clamp_min(0)
        for name, tensor in bag.items()
        if name.endswith("running_var")
    }
    moved = {**bag, **variances}
    return {name: t.float() if name.endswith(("running_mean", "running_var")) else t for name, t in moved.items()}


def _mean_of(name: str) -> str:
    return name.removesuffix("running_var") + "running_mean"


def mean(bags: Iterable[Arrays], weights: Iterable[float] | None = None) -> Arrays:
    """The mean of several bags in the order given; see RunningMean."""
    running = RunningMean()
    if weights is None:
        for bag in bags:
            running.add(bag)
    else:
        for bag, weight in zip(bags, weights, strict=True):
            running.add(bag, weight)
    return running.value()


def update_norm(bag: Arrays, sent: Arrays, statistics: bool = False) -> float:
    """The length of what a client changed, in double precision: of all but BatchNorm statistics, or of these alone."""
    changed = [
        t.double() - sent.get(name, 0)
        for name, t in bag.items()
        if t.is_floating_point() and is_statistic(name) == statistics
    ]
    return math.sqrt(sum(float(change.square().sum()) for change in changed))


def clipped(bag: Arrays, sent: Arrays, limit: float) -> Arrays:
    """The bag with its change from `sent` shortened to a length, statistics by the same factor; itself if short."""
    norm = update_norm(bag, sent)
    if norm <= limit:
        return bag
    share = limit / norm
    return {
        name: sent[name].double().lerp(t.double(), share).to(t.dtype) if t.is_floating_point() else t
        for name, t in bag.items()
    }


def difference(groups: Groups, template: Groups) -> str | None:
    """The first way in which names, shapes or dtypes differ from a template's, in words; None if they agree."""
    for group in sorted(groups.keys() | template.keys()):
        if group not in template:
            return f"group {group!r} is not expected"
        if group not in groups:
            return f"group {group!r} is missing"
        for name in sorted(groups[group].keys() | template[group].keys()):
            if name not in template[group]:
                return f"{group}/{name} is not expected"
            if name not in groups[group]:
                return f"{group}/{name} is missing"
            got, want = kind_of(groups[group][name]), kind_of(template[group][name])
            if got != want:
                return f"{group}/{name} is {got}, expected {want}"
    return None


def not_finite(groups: Groups) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; None if all are finite."""
    for group, bag in groups.items():
        for name, tensor in bag.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{group}/{name}"
    return None


def kind_of(tensor: Tensor) -> str:
    """Its type and shape, such as float32[64, 3, 7, 7]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
