"""How far apart clients are in representation space: the proxy A-distance.

Ben-David et al., 2006 (Analysis of representations for domain adaptation): label two sets of representations 0 and 1,
train a linear classifier to tell them apart, and take its error e on what it has not seen: 2(1 - 2e), from 0 for sets
that cannot be told apart to 2 for sets that always can.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.rng import numpy_rng, seed_for
from fedcir.types import InputError

Representations = NDArray[np.floating[Any]]  # (N, Z)

LEAST = 4
"""Samples of each side."""
FOLDS = 5
RESAMPLES = 1000


@dataclass(frozen=True)
class Distance:
    """An estimate between 0 and 2, and its 95 % interval over resampled test samples."""

    value: float
    low: float
    high: float


def proxy_a_distance(a: Representations, b: Representations, seed: int = 0) -> float:
    """The distance of two sets of representations (N, Z) and (M, Z), from 0 to 2."""
    return distance(a, b, seed).value


def distance(a: Representations, b: Representations, seed: int = 0) -> Distance:
    """The same with its interval. The larger set is cut to the size of the smaller, so that e is 1/2 by chance."""
    wrong = _errors(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64), seed)
    rng = numpy_rng(seed, "pad", "bootstrap")
    resampled = wrong[rng.integers(0, len(wrong), (RESAMPLES, len(wrong)))].mean(axis=1)
    low, high = np.quantile(resampled, [0.975, 0.025])  # a large error is a small distance
    return Distance(_from_error(wrong.mean()), _from_error(low), _from_error(high))


@dataclass(frozen=True)
class Divergences:
    """Every pair of clients, and each client against the mixture of all."""

    pairs: dict[tuple[str, str], Distance]
    to_mixture: dict[str, Distance]

    @property
    def mean_pair(self) -> float:
        return float(np.mean([each.value for each in self.pairs.values()]))

    @property
    def mean_to_mixture(self) -> float:
        """The second term of the bound (Theorem 2), clients weighing the same."""
        return float(np.mean([each.value for each in self.to_mixture.values()]))


def divergences(clients: Mapping[str, Representations], seed: int = 0) -> Divergences:
    """All distances. The mixture has the same number of samples of each client, none of them used on both sides."""
    if len(clients) < 2:
        raise InputError(f"distances need two clients at least, got {len(clients)}")
    pairs = {(a, b): distance(clients[a], clients[b], seed) for a, b in combinations(clients, 2)}
    halves = {name: _halves(rows, name, seed) for name, rows in clients.items()}
    least = min(len(mixed) for _, mixed in halves.values())
    mixture = np.concatenate([mixed[:least] for _, mixed in halves.values()])
    return Divergences(pairs, {name: distance(own, mixture, seed) for name, (own, _) in halves.items()})


def _errors(a: Representations, b: Representations, seed: int) -> NDArray[np.bool_]:
    """Which samples a linear SVM gets wrong that was trained on the others, in five folds: each is tested once."""
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    for rows in (a, b):
        if rows.ndim != 2 or len(rows) < LEAST:
            raise InputError(f"a distance needs {LEAST} samples (N, Z) of each side at least, got {list(rows.shape)}")
        if not np.isfinite(rows).all():
            raise InputError("representations must be finite")
    if a.shape[1] != b.shape[1]:
        raise InputError(f"representations must have one width, got {a.shape[1]} and {b.shape[1]}")
    size = min(len(a), len(b))
    rng = numpy_rng(seed, "pad", "balance")
    some = [rows if len(rows) == size else rows[np.sort(rng.permutation(len(rows))[:size])] for rows in (a, b)]
    sides = np.repeat([0, 1], size)
    state = seed_for(seed, "pad") % 2**31
    folds = StratifiedKFold(min(FOLDS, size), shuffle=True, random_state=state)
    classifier = make_pipeline(StandardScaler(), LinearSVC(random_state=state, dual="auto", max_iter=5000, tol=1e-3))
    wrong: NDArray[np.bool_] = cross_val_predict(classifier, np.concatenate(some), sides, cv=folds) != sides
    return wrong


def _from_error(error: float) -> float:
    return float(np.clip(2 * (1 - 2 * error), 0.0, 2.0))


def _halves(rows: Representations, name: str, seed: int) -> tuple[Representations, Representations]:
    if len(rows) < 2 * LEAST:
        raise InputError(f"{name!r} has {len(rows)} samples, its distance to the mixture needs {2 * LEAST} at least")
    order = numpy_rng(seed, "pad", "halves", name).permutation(len(rows))
    return rows[order[: len(rows) // 2]], rows[order[len(rows) // 2 :]]
