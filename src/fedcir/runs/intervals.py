"""Intervals of a mean accuracy and of a paired difference that cover seeds and test images.

Accuracies vary with the seed of training and with the test images that were drawn. The half width is
sqrt(a^2 + b^2) of the two errors:

- a, seeds: Student's t with n - 1 degrees of freedom times the standard error over seeds (ddof 1).
- b, test images: 1.96 standard errors of the mean over domains. With hits, one bit for each image and seed, this is
  the variance over images of their mean over seeds: for a difference, of the paired difference image by image. Without
  hits it is the binomial variance p (1 - p) / n of each domain, and a difference adds those of both methods as if they
  were independent, which is conservative because both meet the same hard images.

With hits this is the closed form of resampling seeds and images independently (Owen, 2007, The pigeonhole bootstrap),
which counts the interaction of seeds and images twice and so errs on the safe side. Seeds that share a test set have
one image error in common, which does not shrink with more seeds. Where each seed draws another test set it does.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit  # scipy.stats takes two seconds to import

from fedcir.runs.run import Run
from fedcir.types import InputError

LEVEL = 0.95
MIN_SEEDS = 3
"""Seeds below which nothing is said to be better than chance."""
COVERS = "95 %, seeds and test images"
"""What intervals cover, for the header of a column."""


@dataclass(frozen=True)
class RunAccuracy:
    """Accuracy of one run by domain, and what is known of the test images that it rests on."""

    accuracy: Mapping[str, float]
    """Fractions, of the domains that somebody trains on."""
    images: Mapping[str, int] = field(default_factory=dict)
    """Test images by domain; empty where nothing tells how many there were."""
    test_set: str = ""
    """Equal for runs that were tested on the same images."""
    hits: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Which test images were classified correctly, by domain; empty where this was not kept."""

    @classmethod
    def from_run(cls, run: Run) -> "RunAccuracy":
        final = run.final
        accuracy = {name: value for name, value in final["accuracy"].items() if name not in final.get("unseen", ())}
        hits = {} if run.hits is None else {name: found.correct for name, found in run.hits.domains.items()}
        names = run.manifest.get("test")
        images = {name: len(ids) for name, ids in names.items()} if names is not None else _site_images(run)
        images |= {name: len(found) for name, found in hits.items()}
        return cls(accuracy, images, hash_test_set(names or {}), hits)

    @property
    def mean(self) -> float:
        """Plain mean over domains."""
        return statistics.fmean(self.accuracy.values())


@dataclass(frozen=True)
class MeanInterval:
    """A mean over seeds with its 95 % interval. `mean` may be a difference of two methods."""

    mean: float
    seeds: int
    seed_half_width: float | None
    """The part of the seeds; None with one seed."""
    image_half_width: float | None
    """The part of the test images; None where nothing tells how many there were."""

    @property
    def half_width(self) -> float | None:
        """Both parts together, or the one that is known; None if neither is."""
        parts = [part for part in (self.seed_half_width, self.image_half_width) if part is not None]
        return math.hypot(*parts) if parts else None

    @property
    def is_beyond_chance(self) -> bool:
        """Whether 0 is outside, over enough seeds to say so."""
        return self.seeds >= MIN_SEEDS and self.half_width is not None and abs(self.mean) > self.half_width


def mean_interval(runs: Sequence[RunAccuracy], baseline: Sequence[RunAccuracy] | None = None) -> MeanInterval:
    """Interval of the mean accuracy of runs, one a seed, or of its difference to a baseline, paired by position."""
    means = [run.mean for run in runs]
    if baseline is not None:
        means = [mean - other.mean for mean, other in zip(means, baseline, strict=True)]
    variance = _image_variance(runs, baseline)
    images = None if variance is None else float(ndtri((1 + LEVEL) / 2)) * math.sqrt(variance)
    return MeanInterval(statistics.fmean(means), len(means), half_width(means) if len(means) > 1 else None, images)


def hash_test_set(names: Mapping[str, Sequence[str]]) -> str:
    """Hash of the names of the test images, by domain."""
    text = json.dumps({domain: list(ids) for domain, ids in names.items()}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def half_width(values: Sequence[float], confidence: float = LEVEL) -> float:
    """Half of the confidence interval of a mean over seeds alone, by Student's t."""
    spread = statistics.stdev(values) / len(values) ** 0.5
    return float(stdtrit(len(values) - 1, (1 + confidence) / 2) * spread)


def _image_variance(runs: Sequence[RunAccuracy], baseline: Sequence[RunAccuracy] | None) -> float | None:
    """Variance of the mean over seeds that comes from the test images: each test set counts by its share of seeds."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        groups.setdefault(run.test_set, []).append(place)
    total = 0.0
    for places in groups.values():
        own = [runs[place] for place in places]
        other = None if baseline is None else [baseline[place] for place in places]
        variance = _hits_variance(own, other)
        if variance is None:
            parts = [_binomial_variance(group) for group in (own, other) if group is not None]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            variance = sum(known)
        total += (len(places) / len(runs)) ** 2 * variance
    return total


def _hits_variance(runs: Sequence[RunAccuracy], baseline: Sequence[RunAccuracy] | None) -> float | None:
    """Of runs on one test set, image by image; None where a run has no hits or the baseline another test set."""
    every = [*runs, *(baseline or ())]
    domains = list(runs[0].accuracy)
    sizes = {tuple(len(run.hits.get(name, ())) for name in domains) for run in every}
    if len(sizes) > 1 or 0 in next(iter(sizes)) or any(run.test_set != runs[0].test_set for run in every):
        return None
    total = 0.0
    for name in domains:
        values = np.mean([run.hits[name] for run in runs], axis=0)  # (N,), each image's mean over seeds
        if baseline is not None:
            values = values - np.mean([run.hits[name] for run in baseline], axis=0)
        total += float(values.var()) / len(values)
    return total / len(domains) ** 2


def _binomial_variance(runs: Sequence[RunAccuracy]) -> float | None:
    """Of runs on one test set, from their accuracies and the number of images; None where that is not known."""
    domains = list(runs[0].accuracy)
    if not all(run.images.get(name) for run in runs for name in domains):
        return None
    shares = {name: statistics.fmean(run.accuracy.get(name, 0.0) for run in runs) for name in domains}
    return sum(p * (1 - p) / runs[0].images[name] for name, p in shares.items()) / len(domains) ** 2


def chance_level(run: Run) -> float | None:
    """Accuracy of the same answer to every image: the largest class share of the test images, and at least 1 / C.

    It is the mean over the domains that somebody trains on. Without label counts it is 1 / C; None if even the number
    of classes is not known.
    """
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
    """Whether a mean accuracy cannot be told from chance level.

    Below three seeds only the test images count: with two, Student's t would call nearly everything chance.
    """
    half = interval.half_width if interval.seeds >= MIN_SEEDS else interval.image_half_width
    return chance is not None and interval.mean - (half or 0.0) <= chance


def _site_images(run: Run) -> dict[str, int]:
    """Test images by domain of a run across sites, whose manifest holds numbers."""
    clients = [client for client in run.manifest.get("clients", ()) if isinstance(client.get("test"), int)]
    return {client["domain"]: client["test"] for client in reversed(clients)}
