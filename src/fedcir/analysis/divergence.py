"""Distances between clients in representation space: proxy A-distance, alignment to class Gaussians, and the bound.

Proxy A-distance (Ben-David et al., 2006, Analysis of representations for domain adaptation): train a linear classifier
to separate two sets of representations. With its error e on held-out samples, the distance is 2(1 - 2e): 0 if the sets
cannot be separated, 2 if they always can.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcir.data.domains import Indices
from fedcir.errors import InputError
from fedcir.inference.evaluation import DomainPredictions
from fedcir.losses import gaussian_kl
from fedcir.machine import count_cores
from fedcir.rng import numpy_rng, seed_for
from fedcir.runs.statistics import (
    RESAMPLES,
    Draws,
    Interval,
    Weights,
    bootstrap_mean,
    draw_resamples,
    percentile_interval,
)
from fedcir.types import RoundRecord, Tensors

Representations = NDArray[np.floating[Any]]  # (N, Z)
Part = tuple[Weights, Indices]
"""Resampling weights of a client, and its samples that belong to one side."""

LEAST = 4
"""Smallest number of samples of each side."""
FOLDS = 5


def proxy_a_distance(a: Representations, b: Representations, seed: int = 0) -> float:
    """Proxy A-distance of two sets of representations (N, Z) and (M, Z), from 0 to 2."""
    return distance(a, b, seed).value


def distance(a: Representations, b: Representations, seed: int = 0) -> Interval:
    """Proxy A-distance with its interval. The larger set is cut to the size of the smaller, so that chance is 1/2."""
    _check_representations(a, b)
    sides = [[(draw_resamples(name, len(rows), seed), np.arange(len(rows)))] for name, rows in (("a", a), ("b", b))]
    return _clip_to_bounds(*_measure_distance(a, b, sides, seed))


@dataclass(frozen=True)
class Divergences:
    """Distances of every pair of clients, and of each client to the mixture of all."""

    pairs: dict[tuple[str, str], Interval]
    to_mixture: dict[str, Interval]
    pair_draws: Draws
    """Mean over pairs in every resample of the clients."""
    mixture_draws: Draws
    """Mean distance to the mixture in every resample."""

    def between(self, a: str, b: str) -> Interval | None:
        """Distance of two clients in either order; None for a client to itself."""
        return self.pairs.get((a, b)) or self.pairs.get((b, a))

    @property
    def mean_pair(self) -> Interval:
        return _average_intervals(self.pairs.values(), self.pair_draws)

    @property
    def mean_to_mixture(self) -> Interval:
        """Second term of the bound (Theorem 2), with equal weights for all clients."""
        return _average_intervals(self.to_mixture.values(), self.mixture_draws)


NO_DIVERGENCES = Divergences({}, {}, np.zeros(0), np.zeros(0))
"""Value for networks without representations."""


def divergences(
    clients: Mapping[str, Representations], seed: int = 0, on_distance: Callable[[int, int], None] | None = None
) -> Divergences:
    """Measure all distances. The mixture has equally many samples of each client, none of them on both sides.

    `on_distance` receives the numbers of finished and of all distances.
    """
    if len(clients) < 2:
        raise InputError(f"distances need at least two clients, got {len(clients)}")
    drawn = {name: draw_resamples(name, len(rows), seed) for name, rows in clients.items()}
    halves = {name: _split_halves(len(rows), name, seed) for name, rows in clients.items()}
    least = min(len(mixed) for _, mixed in halves.values())
    mixture = [(name, mixed[:least]) for name, (_, mixed) in halves.items()]
    everyone = {name: [(name, np.arange(len(rows)))] for name, rows in clients.items()}
    comparisons: dict[Any, Any] = {(a, b): (everyone[a], everyone[b]) for a, b in combinations(clients, 2)}
    comparisons |= {name: ([(name, half)], mixture) for name, (half, _) in halves.items()}

    def measure(sides: Any) -> tuple[float, Draws]:
        a, b = (np.concatenate([clients[name][rows] for name, rows in side]) for side in sides)
        _check_representations(a, b)
        return _measure_distance(a, b, [[(drawn[name], rows) for name, rows in side] for side in sides], seed)

    distances, draws = {}, {}
    with ThreadPoolExecutor(min(count_cores(), len(comparisons))) as pool:  # a fit does not hold Python's lock
        for key, (value, values) in zip(comparisons, pool.map(measure, comparisons.values()), strict=True):
            distances[key], draws[key] = _clip_to_bounds(value, values), values
            if on_distance is not None:
                on_distance(len(distances), len(comparisons))
    pairs = [key for key in distances if isinstance(key, tuple)]
    return Divergences(
        {key: distances[key] for key in pairs},
        {name: distances[name] for name in clients},
        np.mean([draws[key] for key in pairs], axis=0),
        np.mean([draws[name] for name in clients], axis=0),
    )


def _measure_distance(
    a: Representations, b: Representations, sides: Sequence[Sequence[Part]], seed: int
) -> tuple[float, Draws]:
    """Measure a distance and its value in every resample, not yet clipped at 0."""
    picks, wrong = _compute_errors(a, b, seed)
    errors = []
    for parts, picked, missed in zip(sides, picks, wrong, strict=True):
        starts = np.cumsum([0, *(len(rows) for _, rows in parts)])
        sums = np.zeros((len(parts[0][0]), 2))  # weight of the samples that are wrong, and of all
        for (weight, rows), start in zip(parts, starts, strict=False):
            members = (picked >= start) & (picked < start + len(rows))
            flags = np.zeros((weight.shape[1], 2), np.float32)
            flags[rows[picked[members] - start]] = np.stack([missed[members], np.ones(members.sum())], axis=1)
            sums += weight @ flags
        is_empty = sums[:, 1] == 0  # a resample of few samples may miss them all
        errors.append(np.where(is_empty, missed.mean(), sums[:, 0] / np.maximum(sums[:, 1], 1)))
    return 2 * (1 - 2 * float(wrong.mean())), 2 * (1 - 2 * np.mean(errors, axis=0))


def _compute_errors(a: Representations, b: Representations, seed: int) -> tuple[Indices, NDArray[np.bool_]]:
    """Find the samples that a linear SVM misclassifies in cross-validation; each is tested once.

    The larger side is cut at random. Returns the remaining rows and whether each is misclassified, both (2, size).
    """
    from sklearn import config_context
    from sklearn.model_selection import StratifiedKFold
    from sklearn.svm import LinearSVC

    size = min(len(a), len(b))
    rng = numpy_rng(seed, "pad", "balance")
    picks = [np.arange(size) if len(rows) == size else np.sort(rng.permutation(len(rows))[:size]) for rows in (a, b)]
    x = np.concatenate([a[picks[0]], b[picks[1]]]).astype(np.float64)
    sides = np.repeat([0, 1], size)
    state = seed_for(seed, "pad") % 2**31
    wrong = np.zeros(2 * size, dtype=np.bool_)
    for train, test in StratifiedKFold(min(FOLDS, size), shuffle=True, random_state=state).split(x, sides):
        mean, std = x[train].mean(axis=0), x[train].std(axis=0)
        std[std < 1e-12 * np.abs(mean).clip(1)] = 1  # a constant feature
        # The primal problem also converges for few samples with similar features, where the dual does not.
        svm = LinearSVC(random_state=state, dual=False, max_iter=5000, tol=1e-3)
        with config_context(assume_finite=True, skip_parameter_validation=True):  # a third faster for small fits
            svm.fit((x[train] - mean) / std, sides[train])
            wrong[test] = svm.predict((x[test] - mean) / std) != sides[test]
    return np.stack(picks), wrong.reshape(2, size)


def _check_representations(a: Representations, b: Representations) -> None:
    for rows in (a, b):
        if rows.ndim != 2 or len(rows) < LEAST:
            raise InputError(f"a distance needs at least {LEAST} samples (N, Z) on each side, got {list(rows.shape)}")
        if not np.isfinite(rows).all():
            raise InputError("representations must be finite")
    if a.shape[1] != b.shape[1]:
        raise InputError(f"representations must have the same width, got {a.shape[1]} and {b.shape[1]}")


def _clip_to_bounds(value: float, draws: Draws) -> Interval:
    return percentile_interval(float(np.clip(value, 0, 2)), np.clip(draws, 0, 2))


def _average_intervals(distances: Any, draws: Draws) -> Interval:
    return _clip_to_bounds(float(np.mean([interval.value for interval in distances])), draws)


def _split_halves(samples: int, name: str, seed: int) -> tuple[Indices, Indices]:
    if samples < 2 * LEAST:
        raise InputError(f"{name!r} has {samples} samples, but its distance to the mixture needs at least {2 * LEAST}")
    order = numpy_rng(seed, "pad", "halves", name).permutation(samples)
    return order[: samples // 2], order[samples // 2 :]


@dataclass(frozen=True)
class Alignment:
    """KL divergences between representations and class Gaussians, in nats, summed over z."""

    client_intervals: dict[str, Interval]
    """Mean KL of p(z|x) to q(z|y) over the samples of each client, which is L_align."""
    mean: Interval
    """Their mean over clients."""
    generator_interval: Interval | None
    """Mean KL of the true class Gaussians of all clients to the generator's, over classes with at least two samples.

    A true Gaussian has the moments of z given y: mean E[mu(x)], variance Var[mu(x)] + E[sigma(x)^2]. Only a simulation
    knows them.
    """
    dimensions: int
    """Dimensions of z."""

    @property
    def clients(self) -> dict[str, float]:
        return {name: interval.value for name, interval in self.client_intervals.items()}

    @property
    def generator(self) -> float:
        return float("nan") if self.generator_interval is None else self.generator_interval.value


def measure_alignment(predictions: Sequence[DomainPredictions], gaussians: Tensors, seed: int = 0) -> Alignment | None:
    """Measure the KL to the generator's Gaussians; None if the encoder gives no sigma."""
    kls = {}
    for domain in predictions:
        if domain.z is None or domain.sigma is None:
            return None
        y = torch.from_numpy(domain.labels)
        mean, std = gaussians["mean"][y], gaussians["std"][y]
        z, sigma = torch.from_numpy(domain.z), torch.from_numpy(domain.sigma)
        kls[domain.domain] = gaussian_kl(z, sigma, mean, std).numpy()
    clients = {name: bootstrap_mean({name: kl}, seed) for name, kl in kls.items()}
    generator = _measure_generator(predictions, gaussians, seed)
    return Alignment(clients, bootstrap_mean(kls, seed), generator, gaussians["mean"].shape[1])


def _measure_generator(predictions: Sequence[DomainPredictions], gaussians: Tensors, seed: int) -> Interval | None:
    mu, sigma, labels = (
        np.concatenate([getattr(domain, name) for domain in predictions]) for name in ("z", "sigma", "labels")
    )
    values: list[float] = []
    spreads: list[Draws] = []
    for label in np.unique(labels):
        class_mu, class_sigma = (torch.from_numpy(part[labels == label]).double() for part in (mu, sigma))  # (N, Z)
        if len(class_mu) < 2:
            continue
        target = gaussians["mean"][label].double(), gaussians["std"][label].double()
        whole = torch.full((1, len(class_mu)), 1.0, dtype=torch.float64)
        resamples = torch.from_numpy(draw_resamples(f"class {label}", len(class_mu), seed)).double()
        kl = gaussian_kl(*_compute_moments(class_mu, class_sigma, torch.cat([whole, resamples])), *target).numpy()
        values.append(float(kl[0]))
        spreads.append(kl[1:] - np.median(kl[1:]))
    if not values:
        return None
    # A resample has a smaller sigma than the sample, which raises every KL, so only the spread of resamples is used.
    spread = np.mean(spreads, axis=0).reshape(RESAMPLES)
    return percentile_interval(float(np.mean(values)), np.mean(values) + spread)


def _compute_moments(mu: torch.Tensor, sigma: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and standard deviations (R, Z) of z, from N samples' Gaussians (N, Z) weighted in R ways (R, N)."""
    centre = mu.mean(0)
    total = weight.sum(1, keepdim=True)
    mean = weight @ (mu - centre) / total
    variance_of_mu = (weight @ (mu - centre) ** 2 / total - mean**2).clamp_min(0)
    return mean + centre, (variance_of_mu + weight @ sigma**2 / total).sqrt()


@dataclass(frozen=True)
class Bound:
    """Terms of the bound on the risk. Their scales differ (a loss, and a distance up to 2), so they are not added."""

    global_risk_interval: Interval
    """Mean test loss of the global model over domains.

    It replaces the first term, sum_k p(k) err_k(h_k), because runs do not keep the local models h_k.
    """
    divergence_interval: Interval
    """Second term: mean distance of a domain's representations to those of the mixture."""

    @property
    def global_risk(self) -> float:
        return self.global_risk_interval.value

    @property
    def divergence(self) -> float:
        return self.divergence_interval.value


def compute_bound(predictions: Sequence[DomainPredictions], distances: Divergences, seed: int = 0) -> Bound:
    """Compute the terms of the bound, with equal weights for all clients."""
    risk = bootstrap_mean({domain.domain: domain.losses for domain in predictions}, seed)
    return Bound(risk, distances.mean_to_mixture)


def average_risk(records: Sequence[RoundRecord]) -> dict[int, float]:
    """Mean risk over clients by round, without domains that no client trains on."""
    return {record.round: record.risk_mean for record in records if record.risk_mean is not None}
