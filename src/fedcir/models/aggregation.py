"""How the server makes one model of many: their mean, or a form that a few bad clients cannot move far.

Bags come one by one, in client order. The mean is folded as they come. The other forms need all of them at once, so
they hold them: in memory up to a limit, and beyond it in a temporary file.
"""

import math
import statistics
import weakref
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import Protocol

import torch
from torch import Tensor

from fedcir.models.tensors import RunningMean, clipped, is_statistic, update_norm
from fedcir.types import Arrays, RunError, ServerContext

HELD_IN_MEMORY = 2**30
"""Bytes of replies that are held in memory; more go to a temporary file."""
CHUNK = 2**22
"""Numbers of all clients together that are worked on at a time."""


class Aggregator(Protocol):
    """Makes one bag of those that are added, in client order."""

    def add(self, bag: Arrays, weight: float) -> None: ...

    def value(self) -> Arrays: ...


def aggregator(ctx: ServerContext, sent: Arrays) -> Aggregator:
    """The form that the run's settings ask for; `sent` is what the clients started from."""
    match ctx.aggregation:
        case "mean":
            return RunningMean()
        case "median":
            return TrimmedMean(0.5)
        case "trimmed-mean":
            return TrimmedMean(ctx.trim)
        case "krum":
            return Krum(ctx.byzantine, sent)
        case "norm-clip":
            return NormClip(ctx.clip, sent)
    raise ValueError(f"there is no aggregation {ctx.aggregation!r}")


class Held:
    """Bags of the same names, types and shapes, until all are there."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=HELD_IN_MEMORY)  # noqa: SIM115 (closed with this value)
        weakref.finalize(self, self._file.close)
        self._kinds: Arrays = {}
        self._starts: dict[str, int] = {}
        self._size = 0
        self.count = 0

    def add(self, bag: Arrays) -> None:
        if not self.count:
            for name, tensor in bag.items():
                self._starts[name] = self._size
                self._size += tensor.numel() * tensor.element_size()
                self._kinds[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name in self._kinds:
            self._file.write(bag[name].contiguous().view(-1).view(torch.uint8).numpy().data)
        self.count += 1

    def bag(self, place: int) -> Arrays:
        """One of them again."""
        return {name: self._read(place, name, 0, kind.numel()).view(kind.shape) for name, kind in self._kinds.items()}

    def columns(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """A tensor of all bags, some of its coordinates at a time: which, and their values (K, some)."""
        size = self._kinds[name].numel()
        step = max(1, CHUNK // self.count)
        for start in range(0, size, step):
            end = min(start + step, size)
            yield slice(start, end), torch.stack([self._read(at, name, start, end) for at in range(self.count)])

    def kinds(self) -> Arrays:
        """Types and shapes by name."""
        return self._kinds

    def _read(self, place: int, name: str, start: int, end: int) -> Tensor:
        dtype, width = self._kinds[name].dtype, self._kinds[name].element_size()
        self._file.seek(place * self._size + self._starts[name] + start * width)
        return torch.frombuffer(bytearray(self._file.read((end - start) * width)), dtype=dtype)


class TrimmedMean:
    """The mean of each coordinate without its smallest and largest values; if no more can go, the median.

    Yin et al., ICML 2018. https://arxiv.org/abs/1803.01498
    """

    def __init__(self, trim: float) -> None:
        self.trim, self._held = trim, Held()

    def add(self, bag: Arrays, weight: float) -> None:
        self._held.add(bag)

    def value(self) -> Arrays:
        count = self._held.count
        cut = min(math.ceil(self.trim * count - 1e-9), (count - 1) // 2)  # one or two always stay
        found = {}
        for name, kind in self._held.kinds().items():
            flat = torch.empty(kind.numel(), dtype=kind.dtype)
            for where, values in self._held.columns(name):
                ranked = values.sort(0).values
                flat[where] = (
                    ranked[cut : count - cut].double().mean(0).to(kind.dtype)
                    if kind.is_floating_point()
                    else ranked[(count - 1) // 2]  # the mean of integers may be none
                )
            found[name] = flat.view(kind.shape)
        return found


class Krum:
    """The one bag whose nearest others are the nearest of all; BatchNorm statistics have no say.

    Blanchard et al., NeurIPS 2017. https://arxiv.org/abs/1703.02757
    """

    def __init__(self, byzantine: int | None, sent: Arrays) -> None:
        self.byzantine, self._sent, self._held = byzantine, sent, Held()
        self.chosen = -1
        """Which bag it was, once the value is known."""

    def add(self, bag: Arrays, weight: float) -> None:
        self._held.add(bag)

    def value(self) -> Arrays:
        count = self._held.count
        bad = most_byzantine(count) if self.byzantine is None else self.byzantine
        if count < 2 * bad + 3:
            raise RunError(
                f"krum needs {2 * bad + 3} replies where {bad} may be bad, but {count} are usable: "
                "lower server.byzantine, or choose another server.aggregation"
            )
        nearest = self._squares().sort(1).values[:, : count - bad - 2]
        scores = nearest.sum(1).tolist()
        self.chosen = scores.index(min(scores))
        return self._held.bag(self.chosen)

    def _squares(self) -> Tensor:
        """Squared distances between the updates (K, K), infinite to oneself."""
        squares = torch.zeros(self._held.count, self._held.count, dtype=torch.float64)
        for name, kind in self._held.kinds().items():
            if kind.is_floating_point() and not is_statistic(name):
                for where, values in self._held.columns(name):
                    update = values.double() - self._sent[name].reshape(-1)[where]
                    products = update @ update.T
                    squares += products.diag() + products.diag().unsqueeze(1) - 2 * products
        return squares.clamp_min_(0).fill_diagonal_(math.inf)


def most_byzantine(count: int) -> int:
    """How many bad clients of so many Krum can stand."""
    return max(0, (count - 3) // 2)


class NormClip:
    """The mean of updates that are no longer than a limit, or than the median of all if there is none.

    Sun et al., 2019. https://arxiv.org/abs/1911.07963
    """

    def __init__(self, clip: float | None, sent: Arrays) -> None:
        self.clip, self._sent = clip, sent
        self._mean, self._held = RunningMean(), Held()
        self._norms: list[float] = []
        self._weights: list[float] = []

    def add(self, bag: Arrays, weight: float) -> None:
        if self.clip is not None:
            self._mean.add(clipped(bag, self._sent, self.clip), weight)
            return
        self._held.add(bag)
        self._norms.append(update_norm(bag, self._sent))
        self._weights.append(weight)

    def value(self) -> Arrays:
        for place, weight in enumerate(self._weights):
            limit = statistics.median(self._norms)
            self._mean.add(clipped(self._held.bag(place), self._sent, limit), weight)
        return self._mean.value()
