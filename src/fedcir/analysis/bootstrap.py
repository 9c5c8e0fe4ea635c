"""Intervals by the bootstrap: what an estimate would have been on test samples drawn again from those there are.

Efron, 1979 (Bootstrap methods: another look at the jackknife). They tell of the chance in the test samples, and nothing
of another seed of training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.rng import numpy_rng

RESAMPLES = 1000
TOGETHER = 20
"""Resamples that are drawn at a time: numpy takes longer to be called than to draw a small one."""
LEVEL = 0.95

Draws = NDArray[np.float64]  # (RESAMPLES,), an estimate in each resample
Weights = NDArray[np.float32]  # (RESAMPLES, N), how often each sample was drawn


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether 0 is outside."""
        return self.low > 0 or self.high < 0

    def scaled(self, by: float) -> "Interval":
        return Interval(by * self.value, by * self.low, by * self.high)

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def weights(name: str, samples: int, seed: int = 0) -> Weights:
    """How often each sample of a client is drawn: the same whenever it is asked for, so that numbers can be paired."""
    drawn = np.empty((RESAMPLES, samples), np.float32)
    for row, counts in zip(drawn, _resamples(name, samples, seed), strict=True):
        row[:] = counts
    return drawn


def _resamples(name: str, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    rng = numpy_rng(seed, "bootstrap", name)
    for _ in range(RESAMPLES // TOGETHER):
        drawn = rng.integers(0, samples, (TOGETHER, samples)) + samples * np.arange(TOGETHER)[:, None]
        yield from np.bincount(drawn.ravel(), minlength=TOGETHER * samples).reshape(TOGETHER, samples)


def interval(value: float, draws: Draws) -> Interval:
    """An estimate with the percentiles of its resamples; the estimate itself is always inside."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), min(float(low), float(value)), max(float(high), float(value)))


def mean_of(clients: Mapping[str, NDArray[Any]], seed: int = 0) -> Interval:
    """The mean over clients of the mean of their samples (N,), each client resampled by itself."""
    means, draws = [], []
    for name, each in clients.items():
        samples = each.astype(np.float64)
        means.append(float(each.mean()))
        draws.append([counts @ samples / len(samples) for counts in _resamples(name, len(samples), seed)])
    return interval(float(np.mean(means)), np.mean(draws, axis=0))
