"""How far apart clients are in representation space: the proxy A-distance.

Ben-David et al., 2006 (Analysis of representations for domain adaptation): label two sets of representations 0 and 1,
train a linear classifier to tell them apart, and take its error e on what it has not seen: 2(1 - 2e), from 0 for sets
that cannot be told apart to 2 for sets that always can.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.bootstrap import Draws, Interval, Weights, interval, weights
from fedcir.config import cores
from fedcir.data.domains import Indices
from fedcir.rng import numpy_rng, seed_for
from fedcir.types import InputError

Representations = NDArray[np.floating[Any]]  # (N, Z)
Part = tuple[Weights, Indices]
"""A client's weights in the resamples, and which of its samples are on one side."""

LEAST = 4
"""Samples of each side."""
FOLDS = 5


def proxy_a_distance(a: Representations, b: Representations, seed: int = 0) -> float:
    """The distance of two sets of representations (N, Z) and (M, Z), from 0 to 2."""
    return distance(a, b, seed).value


def distance(a: Representations, b: Representations, seed: int = 0) -> Interval:
    """The same with its interval. The larger set is cut to the size of the smaller, so that e is 1/2 by chance."""
    _check(a, b)
    sides = [[(weights(name, len(rows), seed), np.arange(len(rows)))] for name, rows in (("a", a), ("b", b))]
    return _bounded(*_measured(a, b, sides, seed))


@dataclass(frozen=True)
class Divergences:
    """Every pair of clients, and each client against the mixture of all."""

    pairs: dict[tuple[str, str], Interval]
    to_mixture: dict[str, Interval]
    pair_draws: Draws
    """The mean over pairs in every resample: clients are resampled, so that pairs that share one move together."""
    mixture_draws: Draws
    """The same of the mean distance to the mixture."""

    def between(self, a: str, b: str) -> Interval | None:
        """The distance of two, whichever comes first; None of one to itself."""
        return self.pairs.get((a, b)) or self.pairs.get((b, a))

    @property
    def mean_pair(self) -> Interval:
        return _mean(self.pairs.values(), self.pair_draws)

    @property
    def mean_to_mixture(self) -> Interval:
        """The second term of the bound (Theorem 2), clients weighing the same."""
        return _mean(self.to_mixture.values(), self.mixture_draws)


NOWHERE = Divergences({}, {}, np.zeros(0), np.zeros(0))
"""Where nothing could be measured."""


def divergences(
    clients: Mapping[str, Representations], seed: int = 0, on_distance: Callable[[int, int], None] | None = None
) -> Divergences:
    """All distances. The mixture has the same number of samples of each client, none of them used on both sides.

    `on_distance` is told how many are done, of how many.
    """
    if len(clients) < 2:
        raise InputError(f"distances need at least two clients, got {len(clients)}")
    drawn = {name: weights(name, len(rows), seed) for name, rows in clients.items()}
    halves = {name: _halves(len(rows), name, seed) for name, rows in clients.items()}
    least = min(len(mixed) for _, mixed in halves.values())
    mixture = [(name, mixed[:least]) for name, (_, mixed) in halves.items()]
    everyone = {name: [(name, np.arange(len(rows)))] for name, rows in clients.items()}
    comparisons: dict[Any, Any] = {(a, b): (everyone[a], everyone[b]) for a, b in combinations(clients, 2)}
    comparisons |= {name: ([(name, own)], mixture) for name, (own, _) in halves.items()}

    def measured(sides: Any) -> tuple[float, Draws]:
        a, b = (np.concatenate([clients[name][rows] for name, rows in side]) for side in sides)
        _check(a, b)
        return _measured(a, b, [[(drawn[name], rows) for name, rows in side] for side in sides], seed)

    found, draws = {}, {}
    with ThreadPoolExecutor(min(cores(), len(comparisons))) as pool:  # a fit does not hold Python's lock
        for key, (value, each) in zip(comparisons, pool.map(measured, comparisons.values()), strict=True):
            found[key], draws[key] = _bounded(value, each), each
            if on_distance is not None:
                on_distance(len(found), len(comparisons))
    pairs, alone = [key for key in found if isinstance(key, tuple)], list(clients)
    return Divergences(
        {key: found[key] for key in pairs},
        {name: found[name] for name in alone},
        np.mean([draws[key] for key in pairs], axis=0),
        np.mean([draws[name] for name in alone], axis=0),
    )


def _measured(
    a: Representations, b: Representations, sides: Sequence[Sequence[Part]], seed: int
) -> tuple[float, Draws]:
    """The distance and what it is in every resample, neither of them bounded by 0 yet."""
    picks, wrong = _errors(a, b, seed)
    errors = []
    for parts, picked, missed in zip(sides, picks, wrong, strict=True):
        starts = np.cumsum([0, *(len(rows) for _, rows in parts)])
        sums = np.zeros((len(parts[0][0]), 2))  # weight of the samples that are wrong, and of all
        for (weight, rows), start in zip(parts, starts, strict=False):
            mine = (picked >= start) & (picked < start + len(rows))
            told = np.zeros((weight.shape[1], 2), np.float32)
            told[rows[picked[mine] - start]] = np.stack([missed[mine], np.ones(mine.sum())], axis=1)
            sums += weight @ told
        nobody = sums[:, 1] == 0  # none of a few samples may be drawn
        errors.append(np.where(nobody, missed.mean(), sums[:, 0] / np.maximum(sums[:, 1], 1)))
    return 2 * (1 - 2 * float(wrong.mean())), 2 * (1 - 2 * np.mean(errors, axis=0))


def _errors(a: Representations, b: Representations, seed: int) -> tuple[Indices, NDArray[np.bool_]]:
    """Which samples of each side a linear SVM gets wrong that was trained on others: each is tested once in five folds.

    The larger side is cut at random. Gives the rows that are left and whether each is wrong, both (2, size).
    """
    from sklearn import config_context
    from sklearn.model_selection import StratifiedKFold
    from sklearn.svm import LinearSVC

    size = min(len(a), len(b))
    rng = numpy_rng(seed, "pad", "balance")
    all_of_it = np.arange(size)
    picks = [all_of_it if len(rows) == size else np.sort(rng.permutation(len(rows))[:size]) for rows in (a, b)]
    x = np.concatenate([a[picks[0]], b[picks[1]]]).astype(np.float64)
    sides = np.repeat([0, 1], size)
    state = seed_for(seed, "pad") % 2**31
    wrong = np.zeros(2 * size, dtype=np.bool_)
    for train, test in StratifiedKFold(min(FOLDS, size), shuffle=True, random_state=state).split(x, sides):
        mean, std = x[train].mean(axis=0), x[train].std(axis=0)
        std[std < 1e-12 * np.abs(mean).clip(1)] = 1  # a feature that is always the same
        # The primal problem: it converges where the dual of a few samples with features alike does not.
        svm = LinearSVC(random_state=state, dual=False, max_iter=5000, tol=1e-3)
        with config_context(assume_finite=True, skip_parameter_validation=True):  # a third of the time of small ones
            svm.fit((x[train] - mean) / std, sides[train])
            wrong[test] = svm.predict((x[test] - mean) / std) != sides[test]
    return np.stack(picks), wrong.reshape(2, size)


def _check(a: Representations, b: Representations) -> None:
    for rows in (a, b):
        if rows.ndim != 2 or len(rows) < LEAST:
            raise InputError(f"a distance needs at least {LEAST} samples (N, Z) on each side, got {list(rows.shape)}")
        if not np.isfinite(rows).all():
            raise InputError("representations must be finite")
    if a.shape[1] != b.shape[1]:
        raise InputError(f"representations must have the same width, got {a.shape[1]} and {b.shape[1]}")


def _bounded(value: float, draws: Draws) -> Interval:
    return interval(float(np.clip(value, 0, 2)), np.clip(draws, 0, 2))


def _mean(distances: Any, draws: Draws) -> Interval:
    return _bounded(float(np.mean([each.value for each in distances])), draws)


def _halves(samples: int, name: str, seed: int) -> tuple[Indices, Indices]:
    if samples < 2 * LEAST:
        raise InputError(f"{name!r} has {samples} samples, but its distance to the mixture needs at least {2 * LEAST}")
    order = numpy_rng(seed, "pad", "halves", name).permutation(samples)
    return order[: samples // 2], order[samples // 2 :]
