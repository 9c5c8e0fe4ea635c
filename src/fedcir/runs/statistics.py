"""Intervals of a mean score and of a paired difference, and the comparison of methods over seeds.

Scores vary with the seed of training and with the test images that were drawn. The half width is
sqrt(a^2 + b^2) of the two errors:

- a, seeds: Student's t with n - 1 degrees of freedom times the standard error over seeds (ddof 1).
- b, test images: 1.96 standard errors of the mean over domains. With hits, one bit for each image and seed, this is
  the variance over images of their mean over seeds: for a difference, of the paired difference image by image. Without
  hits it is the binomial variance p (1 - p) / n of each domain, and a difference adds those of both methods as if they
  were independent, which is conservative because both meet the same hard images. Metrics
  other than accuracy, whose variance over examples does not follow from their sums, have no such part.

With hits this is the closed form of resampling seeds and images independently (Owen, 2007, The pigeonhole bootstrap),
which counts the interaction of seeds and images twice and so errs on the safe side. Seeds that share a test set
share its error, which does not shrink with more seeds. Where each seed draws another test set it does.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit  # scipy.stats takes two seconds to import

from fedcir.client.cost import Cost, cost_to_target
from fedcir.errors import InputError
from fedcir.rng import numpy_rng
from fedcir.runs.reader import Run
from fedcir.types import ACCURACY, Metric

RESAMPLES = 1000
CHUNK = 20
"""Resamples drawn in one call of numpy, whose overhead exceeds the time of a small draw."""
LEVEL = 0.95

Draws = NDArray[np.float64]  # (RESAMPLES,), an estimate in every resample
Weights = NDArray[np.float32]  # (RESAMPLES, N), how often each sample was drawn


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low > 0 or self.high < 0

    def scaled(self, by: float) -> "Interval":
        return Interval(by * self.value, by * self.low, by * self.high)

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def draw_resamples(name: str, samples: int, seed: int = 0) -> Weights:
    """Draw how often each sample of a client occurs in every resample. Equal arguments give equal draws."""
    weights = np.empty((RESAMPLES, samples), np.float32)
    for row, counts in zip(weights, _draw_resamples(name, samples, seed), strict=True):
        row[:] = counts
    return weights


def _draw_resamples(name: str, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    rng = numpy_rng(seed, "bootstrap", name)
    for _ in range(RESAMPLES // CHUNK):
        drawn = rng.integers(0, samples, (CHUNK, samples)) + samples * np.arange(CHUNK)[:, None]
        yield from np.bincount(drawn.ravel(), minlength=CHUNK * samples).reshape(CHUNK, samples)


def percentile_interval(value: float, draws: Draws) -> Interval:
    """Percentile interval of an estimate from its resamples, extended to contain the estimate."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), min(float(low), float(value)), max(float(high), float(value)))


def bootstrap_mean(clients: Mapping[str, NDArray[Any]], seed: int = 0) -> Interval:
    """Mean over clients of the mean of their samples (N,); each client is resampled separately."""
    means, draws = [], []
    for name, values in clients.items():
        samples = values.astype(np.float64)
        means.append(float(values.mean()))
        draws.append([counts @ samples / len(samples) for counts in _draw_resamples(name, len(samples), seed)])
    return percentile_interval(float(np.mean(means)), np.mean(draws, axis=0))


MIN_SEEDS = 3
"""Seeds that a claim beyond chance needs at least."""
COVERS = "95 %, seeds and test images"
"""What intervals of accuracies cover, for the header of a column."""


def describe_cover(metric: Metric) -> str:
    """Describe what intervals of a metric cover."""
    return COVERS if metric == ACCURACY else "95 %, seeds"


@dataclass(frozen=True)
class RunScores:
    """Scores of one run by domain. For accuracy, also the number and results of its test images."""

    scores: Mapping[str, float]
    """Values of the primary metric, for the domains with a training client."""
    images: Mapping[str, int] = field(default_factory=dict)
    """Test images by domain; empty if unknown."""
    test_set: str = ""
    """Equal for runs that were tested on the same images."""
    hits: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Whether each test image was classified correctly, by domain; empty if not saved."""
    metric: Metric = ACCURACY

    @classmethod
    def from_run(cls, run: Run) -> "RunScores":
        final = run.scores
        scores = {name: value for name, value in final["scores"].items() if name not in final.get("unseen", ())}
        if run.metric != ACCURACY:
            return cls(scores, metric=run.metric)
        hits = {} if run.hits is None else {name: hits.correct for name, hits in run.hits.domains.items()}
        images = run.test_images | {name: len(correct) for name, correct in hits.items()}
        return cls(scores, images, hash_test_set(run.manifest.get("test") or {}), hits)

    @property
    def mean(self) -> float:
        """Plain mean over domains."""
        return statistics.fmean(self.scores.values())

    @property
    def worst(self) -> float:
        worst = self.metric.find_worst(self.scores.values())
        assert worst is not None
        return worst


@dataclass(frozen=True)
class MeanInterval:
    """A mean over seeds with its 95 % interval. `mean` may be a difference of two methods."""

    mean: float
    seeds: int
    seed_half_width: float | None
    """Part from the seeds; None with one seed."""
    image_half_width: float | None
    """Part from the test images; None if their number is unknown."""

    @property
    def half_width(self) -> float | None:
        """Both parts combined, or the known one; None if neither is known."""
        parts = [part for part in (self.seed_half_width, self.image_half_width) if part is not None]
        return math.hypot(*parts) if parts else None

    @property
    def is_beyond_chance(self) -> bool:
        """Whether 0 is outside, with at least MIN_SEEDS seeds."""
        return self.seeds >= MIN_SEEDS and self.half_width is not None and abs(self.mean) > self.half_width


def mean_interval(runs: Sequence[RunScores], baseline: Sequence[RunScores] | None = None) -> MeanInterval:
    """Interval of the mean score of runs, one per seed, or of its difference to a baseline, paired by position."""
    means = [run.mean for run in runs]
    if baseline is not None:
        means = [mean - other.mean for mean, other in zip(means, baseline, strict=True)]
    variance = _estimate_image_variance(runs, baseline)
    images = None if variance is None else float(ndtri((1 + LEVEL) / 2)) * math.sqrt(variance)
    return MeanInterval(statistics.fmean(means), len(means), half_width(means) if len(means) > 1 else None, images)


def hash_test_set(names: Mapping[str, Sequence[str]]) -> str:
    """Hash of the names of the test images, by domain."""
    text = json.dumps({domain: list(ids) for domain, ids in names.items()}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def half_width(values: Sequence[float], confidence: float = LEVEL) -> float:
    """Half width of the confidence interval of a mean over seeds alone, by Student's t."""
    spread = statistics.stdev(values) / len(values) ** 0.5
    return float(stdtrit(len(values) - 1, (1 + confidence) / 2) * spread)


def _estimate_image_variance(runs: Sequence[RunScores], baseline: Sequence[RunScores] | None) -> float | None:
    """Variance of the mean over seeds due to test images; each test set is weighted by its share of seeds."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        groups.setdefault(run.test_set, []).append(position)
    total = 0.0
    for positions in groups.values():
        group = [runs[position] for position in positions]
        paired = None if baseline is None else [baseline[position] for position in positions]
        variance = _estimate_hits_variance(group, paired)
        if variance is None:
            parts = [_estimate_binomial_variance(part) for part in (group, paired) if part is not None]
            if None in parts:
                return None
            variance = sum(part for part in parts if part is not None)
        total += (len(positions) / len(runs)) ** 2 * variance
    return total


def _estimate_hits_variance(runs: Sequence[RunScores], baseline: Sequence[RunScores] | None) -> float | None:
    """Variance of runs on one test set, image by image; None if a run has no hits or the baseline another test set."""
    all_runs = [*runs, *(baseline or ())]
    domains = list(runs[0].scores)
    sizes = {tuple(len(run.hits.get(name, ())) for name in domains) for run in all_runs}
    if len(sizes) > 1 or 0 in next(iter(sizes)) or any(run.test_set != runs[0].test_set for run in all_runs):
        return None
    total = 0.0
    for name in domains:
        values = np.mean([run.hits[name] for run in runs], axis=0)  # (N,), each image's mean over seeds
        if baseline is not None:
            values = values - np.mean([run.hits[name] for run in baseline], axis=0)
        total += float(values.var()) / len(values)
    return total / len(domains) ** 2


def _estimate_binomial_variance(runs: Sequence[RunScores]) -> float | None:
    """Binomial variance of runs on one test set; None if the number of images is unknown."""
    domains = list(runs[0].scores)
    if not all(run.images.get(name) for run in runs for name in domains):
        return None
    shares = {name: statistics.fmean(run.scores.get(name, 0.0) for run in runs) for name in domains}
    return sum(p * (1 - p) / runs[0].images[name] for name, p in shares.items()) / len(domains) ** 2


def chance_level(run: Run) -> float | None:
    """Accuracy of a constant prediction: the largest mean class share of the test images, at least 1 / C.

    The mean is over the domains with a training client. Without label counts it is 1 / C. None if C is unknown, and
    for metrics other than accuracy.
    """
    if run.metric != ACCURACY:
        return None
    if run.hits is not None:
        seen = [name for name in run.hits.domains if name not in run.final.get("unseen", ())]
        labels = np.array([run.hits.domains[name].labels for name in seen], float)  # (domains, C)
        shares = (labels / labels.sum(1, keepdims=True)).mean(0)  # (C,)
        return max(1 / len(shares), float(shares.max()))
    with suppress(InputError):
        classes: list[str] = run.card["classes"]
        return 1 / len(classes)
    return None


def is_at_chance(interval: MeanInterval, chance: float | None) -> bool:
    """Check whether a mean accuracy is not significantly above chance level.

    Below MIN_SEEDS only the test images count, because Student's t with two seeds is too wide for any conclusion.
    """
    half = interval.half_width if interval.seeds >= MIN_SEEDS else interval.image_half_width
    return chance is not None and interval.mean - (half or 0.0) <= chance


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds and standard deviation (ddof 1), which is None with one seed."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class CostToTarget:
    """Cost until a target accuracy: medians over seeds; None if the median seed never reached it."""

    rounds: float | None
    bytes: float | None
    """Bytes down and up, over all clients."""
    reached: int
    """Number of seeds that reached the target."""
    flops: float | None = None
    """FLOPs of all clients."""

    @classmethod
    def of(cls, costs: Sequence[Cost | None]) -> "CostToTarget":
        """Take the median of each cost over seeds; None counts as later than all others."""
        values = [(c.rounds, c.bytes_down + c.bytes_up, c.flops) if c else (math.inf,) * 3 for c in costs]
        medians = [statistics.median(column) for column in zip(*values, strict=True)]
        rounds, moved, flops = (median if math.isfinite(median) else None for median in medians)
        return cls(rounds, moved, sum(cost is not None for cost in costs), flops)


@dataclass(frozen=True)
class MethodResult:
    """Final round of one method over all seeds: values of the primary metric."""

    algorithm: str
    domains: dict[str, Estimate]
    mean: Estimate
    """Unweighted mean over the domains with a training client; `worst` is over these too."""
    worst: Estimate
    to_target: CostToTarget
    difference: Estimate | None
    """Difference to the baseline, paired by seed; None for the baseline."""
    half_width: float | None
    """Half width of the 95 % interval of the difference; None with one seed."""
    unseen: tuple[str, ...] = ()
    """Domains without a training client."""
    unseen_mean: Estimate | None = None
    pools: bool = False
    """Whether the method pools all data, as an upper bound for federated methods."""
    paired_seeds: int = 0
    image_half_width: float = 0.0
    """Part of half_width from the test images."""
    mean_half_width: float | None = None
    """Half width of the 95 % interval of the mean; with one seed from test images only."""
    chance: float | None = None
    """Accuracy of a constant prediction, if known."""
    at_chance: bool = False
    """Whether the accuracy is not significantly above `chance`."""
    metric: Metric = ACCURACY

    @property
    def gain(self) -> float | None:
        """How much better it is than the baseline, on average; None for the baseline."""
        return None if self.difference is None else self.metric.gain(self.difference.mean, 0.0)

    @property
    def better(self) -> bool:
        """Whether it is significantly better than the baseline."""
        return self.is_beyond_chance and (self.gain or 0.0) > 0

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it differs significantly from the baseline, over at least three seeds."""
        if self.difference is None or self.half_width is None or self.paired_seeds < MIN_SEEDS:
            return False
        return abs(self.difference.mean) > self.half_width

    @property
    def interval(self) -> str:
        """Interval of the difference as text, in percentage points if the metric is a share."""
        if self.difference is None or self.half_width is None:
            return ""
        ends = (self.difference.mean - self.half_width, self.difference.mean + self.half_width)
        return f"95 % interval {' to '.join(map(self.metric.format_change, ends))}"


def choose_baseline(runs: Mapping[str, Mapping[int, Run]]) -> str:
    """Choose FedAvg, or else the first federated method, or else the first method."""
    return min(runs, key=lambda name: (name.split(" ")[0] != "fedavg", _list_pools(runs[name])))


def compare_methods(
    runs: Mapping[str, Mapping[int, Run]], baseline: str, target: float | None = None
) -> list[MethodResult]:
    """Compare finished runs, by method and seed, with a baseline.

    Differences are over the seeds that the baseline has too. Without a target, the target of each seed is the final
    score of the baseline, or its mean where the baseline lacks the seed.
    """
    metric = next(iter(runs[baseline].values())).metric
    check_target(target, metric)
    reference = {seed: run.scores["score_mean"] for seed, run in runs[baseline].items()}
    scores = {name: {seed: RunScores.from_run(run) for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    usual = statistics.fmean(reference.values())
    methods = []
    for name, by_seed in runs.items():
        final = [run.scores for run in by_seed.values()]
        common = [seed for seed in by_seed if seed in reference and name != baseline]
        paired = [by_seed[seed].scores["score_mean"] - reference[seed] for seed in common]
        pairs = ([scores[method][seed] for seed in common] for method in (name, baseline))
        change = mean_interval(*pairs) if len(common) > 1 else None
        domains = dict.fromkeys(domain for last in final for domain in last["scores"])
        unseen = [last["score_unseen"] for last in final if "score_unseen" in last]
        mean = mean_interval(list(scores[name].values()))
        chance = chance_level(next(iter(by_seed.values())))
        costs = [
            cost_to_target(run.records, reference.get(seed, usual) if target is None else target)
            for seed, run in by_seed.items()
        ]
        methods.append(
            MethodResult(
                algorithm=name,
                domains={
                    domain: Estimate.of([last["scores"][domain] for last in final if domain in last["scores"]])
                    for domain in domains
                },
                mean=Estimate.of([last["score_mean"] for last in final]),
                worst=Estimate.of([last["score_worst"] for last in final]),
                to_target=CostToTarget.of(costs),
                difference=Estimate.of(paired) if paired else None,
                half_width=None if change is None else change.half_width,
                unseen=tuple(dict.fromkeys(domain for last in final for domain in last.get("unseen", ()))),
                unseen_mean=Estimate.of(unseen) if unseen else None,
                pools=_list_pools(by_seed),
                paired_seeds=len(paired),
                image_half_width=(change.image_half_width or 0.0) if change is not None else 0.0,
                mean_half_width=mean.half_width,
                chance=chance,
                at_chance=is_at_chance(mean, chance),
                metric=metric,
            )
        )
    return methods


def _list_pools(by_seed: Mapping[int, Run]) -> bool:
    try:
        return next(iter(by_seed.values())).method().pools is not None
    except InputError:  # custom code that is missing or not trusted
        return False


def check_target(target: float | None, metric: Metric | None = None) -> None:
    """Refuse a target that no run can reach; before the metric is known, only one that no metric can have."""
    if target is None:
        return
    if not math.isfinite(target) or (metric is not None and metric.is_share and not 0 < target < 1):
        must = "a finite number" if metric is None else f"between 0 and 1 for {metric.title}"
        raise InputError(f"target must be {must}, got {target}")
