"""Aggregation rules: how the server combines the models of a round's replies, as `server.aggregation` names them.

The mean is folded as replies come. The robust rules limit what a few bad clients can do; they need all replies at
once, so they buffer them: in memory up to a limit, and beyond it in a temporary file.
"""

import inspect
import math
import statistics
import weakref
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fedcir.config import ServerConfig
from fedcir.errors import RunError
from fedcir.models.tensors import RunningMean, clip_update, is_statistic, update_norm
from fedcir.plugins import find_plugin
from fedcir.types import Aggregator, Tensors

MAX_MEMORY = 2**30
"""Bytes of replies that are buffered in memory; more go to a temporary file."""
CHUNK = 2**22
"""Numbers of all clients together that are processed at a time."""


def find_aggregator(name: str) -> type[Aggregator]:
    """Find an aggregation rule by its name, by a file such as ./mine.py, or by entry point (`fedcir.aggregators`)."""
    builtin = {rule: (lambda rule=rule: RULES[rule]) for rule in RULES}
    rule = find_plugin("aggregator", name, builtin, _is_aggregator, "one subclass of fedcir.Aggregator")
    return cast(type[Aggregator], rule)


def _is_aggregator(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Aggregator)


class ReplyBuffer:
    """Tensors of several replies, all with the same names, dtypes and shapes."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=MAX_MEMORY)  # noqa: SIM115 (closed with this object)
        weakref.finalize(self, self._file.close)
        self.template: Tensors = {}
        """Dtypes and shapes by name, without data."""
        self.count = 0
        self._offsets: dict[str, int] = {}
        self._reply_size = 0

    def add(self, tensors: Tensors) -> None:
        if not self.count:
            for name, tensor in tensors.items():
                self._offsets[name] = self._reply_size
                self._reply_size += tensor.numel() * tensor.element_size()
                self.template[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name in self.template:
            self._file.write(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
        self.count += 1

    def get(self, index: int) -> Tensors:
        """Read one reply back."""
        return {name: self._read(index, name, 0, t.numel()).view(t.shape) for name, t in self.template.items()}

    def columns(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over a tensor of all K replies in chunks: the coordinates, and their values (K, chunk)."""
        size = self.template[name].numel()
        step = max(1, CHUNK // self.count)
        for start in range(0, size, step):
            end = min(start + step, size)
            yield slice(start, end), torch.stack([self._read(k, name, start, end) for k in range(self.count)])

    def _read(self, index: int, name: str, start: int, end: int) -> Tensor:
        dtype, width = self.template[name].dtype, self.template[name].element_size()
        self._file.seek(index * self._reply_size + self._offsets[name] + start * width)
        return torch.frombuffer(bytearray(self._file.read((end - start) * width)), dtype=dtype)


class TrimmedMean(Aggregator):
    """Coordinate-wise mean without the share `server.trim` of the smallest and of the largest values.

    Yin et al., ICML 2018. https://arxiv.org/abs/1803.01498
    """

    uses_weights: ClassVar[bool] = False
    averages: ClassVar[bool] = False

    def __init__(self, broadcast: Tensors, settings: ServerConfig) -> None:
        super().__init__(broadcast, settings)
        self.trim, self._replies = settings.trim, ReplyBuffer()

    @classmethod
    def min_clients(cls, settings: ServerConfig) -> int:
        return 3

    def add(self, tensors: Tensors, weight: float) -> None:
        self._replies.add(tensors)

    def value(self) -> Tensors:
        count = self._replies.count
        cut = min(math.ceil(self.trim * count - 1e-9), (count - 1) // 2)  # one or two values always remain
        combined = {}
        for name, template in self._replies.template.items():
            flat = torch.empty(template.numel(), dtype=template.dtype)
            for where, values in self._replies.columns(name):
                ranked = values.sort(0).values
                flat[where] = (
                    ranked[cut : count - cut].double().mean(0).to(template.dtype)
                    if template.is_floating_point()
                    else ranked[(count - 1) // 2]  # the mean of integers may not be an integer
                )
            combined[name] = flat.view(template.shape)
        return combined


class Median(TrimmedMean):
    """Coordinate-wise median: the trimmed mean that leaves out all but the middle."""

    def __init__(self, broadcast: Tensors, settings: ServerConfig) -> None:
        super().__init__(broadcast, settings)
        self.trim = 0.5


class Krum(Aggregator):
    """The one model whose nearest neighbours are the nearest; BatchNorm statistics do not count in distances.

    Blanchard et al., NeurIPS 2017. https://arxiv.org/abs/1703.02757
    """

    uses_weights: ClassVar[bool] = False

    def __init__(self, broadcast: Tensors, settings: ServerConfig) -> None:
        super().__init__(broadcast, settings)
        self._replies = ReplyBuffer()

    @classmethod
    def min_clients(cls, settings: ServerConfig) -> int:
        return 2 * (settings.byzantine or 0) + 3

    def add(self, tensors: Tensors, weight: float) -> None:
        self._replies.add(tensors)

    def value(self) -> Tensors:
        count = self._replies.count
        byzantine = self.settings.byzantine
        if byzantine is None:
            byzantine = max(0, (count - 3) // 2)
        if count < 2 * byzantine + 3:
            raise RunError(
                f"krum needs {2 * byzantine + 3} replies where {byzantine} may be bad, but {count} are usable: "
                "lower server.byzantine, or choose another server.aggregation"
            )
        neighbours = self._squared_distances().sort(1).values[:, : count - byzantine - 2]
        scores = neighbours.sum(1).tolist()
        self.chosen = scores.index(min(scores))
        return self._replies.get(self.chosen)

    def _squared_distances(self) -> Tensor:
        """Squared distances between the updates (K, K), infinite on the diagonal."""
        squares = torch.zeros(self._replies.count, self._replies.count, dtype=torch.float64)
        for name, template in self._replies.template.items():
            if template.is_floating_point() and not is_statistic(name):
                for where, values in self._replies.columns(name):
                    update = values.double() - self.broadcast[name].reshape(-1)[where]
                    products = update @ update.T
                    squares += products.diag() + products.diag().unsqueeze(1) - 2 * products
        return squares.clamp_min_(0).fill_diagonal_(math.inf)


class NormClip(Aggregator):
    """Mean of updates clipped to the norm `server.clip`, or to the median norm of the round if it is not set.

    Sun et al., 2019. https://arxiv.org/abs/1911.07963
    """

    def __init__(self, broadcast: Tensors, settings: ServerConfig) -> None:
        super().__init__(broadcast, settings)
        self._mean, self._replies = RunningMean(), ReplyBuffer()
        self._norms: list[float] = []
        self._weights: list[float] = []

    def add(self, tensors: Tensors, weight: float) -> None:
        if self.settings.clip is not None:
            self._mean.add(clip_update(tensors, self.broadcast, self.settings.clip), weight)
            return
        self._replies.add(tensors)
        self._norms.append(update_norm(tensors, self.broadcast))
        self._weights.append(weight)

    def value(self) -> Tensors:
        for index, weight in enumerate(self._weights):
            limit = statistics.median(self._norms)
            self._mean.add(clip_update(self._replies.get(index), self.broadcast, limit), weight)
        return self._mean.value()


RULES: dict[str, type[Aggregator]] = {
    "mean": RunningMean,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "krum": Krum,
    "norm-clip": NormClip,
}
