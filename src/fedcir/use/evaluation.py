"""What the model of a run is worth on labelled images: of its own data, or of any others."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis import metrics
from fedcir.analysis.bootstrap import Interval, mean_of
from fedcir.analysis.overlap import Overlap

Numbers = NDArray[np.float64]
Labels = NDArray[np.int64]

RELIABILITY_BINS = 10


@dataclass(frozen=True)
class Judged:
    """The images of one domain and what the model said of them."""

    domain: str
    labels: Labels  # (N,), numbers of the model's classes
    probabilities: Numbers  # (N, C)
    trained_on: bool = True
    before: Labels | None = None
    """What was predicted before its BatchNorm statistics were taken from this domain, if they were."""

    @property
    def predicted(self) -> Labels:
        likeliest: Labels = self.probabilities.argmax(axis=1)
        return likeliest

    @property
    def losses(self) -> Numbers:
        true = self.probabilities[np.arange(len(self.labels)), self.labels]
        return -np.log(np.maximum(true, 1e-12))

    def __add__(self, other: "Judged") -> "Judged":
        labels = np.concatenate([self.labels, other.labels])
        before = None if self.before is None or other.before is None else np.concatenate([self.before, other.before])
        return Judged("all images", labels, np.concatenate([self.probabilities, other.probabilities]), before=before)


@dataclass(frozen=True)
class Bin:
    """Images about which the model was about as sure."""

    images: int
    sure: float
    """The mean probability of the predicted class."""
    right: float
    """The share that it was right about."""


@dataclass(frozen=True)
class Figures:
    """The figures of some images. What has no value, such as the recall of a class without images, is nan."""

    tested: Judged
    classes: tuple[str, ...]

    @property
    def images(self) -> int:
        return len(self.tested.labels)

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        return metrics.confusion(self.tested.labels, self.tested.predicted, len(self.classes))

    @cached_property
    def accuracy(self) -> Interval:
        return metrics.wilson_interval(int(np.trace(self.confusion)), self.images)

    @property
    def accuracy_before(self) -> float | None:
        before = self.tested.before
        return None if before is None else float((before == self.tested.labels).mean())

    @cached_property
    def recall(self) -> dict[str, Interval | None]:
        """By class, the share of its images that were recognised; None for a class without images."""
        rows = zip(self.classes, self.confusion, strict=True)
        return {
            name: metrics.wilson_interval(int(row[n]), int(row.sum())) if row.sum() else None
            for n, (name, row) in enumerate(rows)
        }

    @property
    def log_loss(self) -> float:
        return float(self.tested.losses.mean())

    @property
    def calibration_error(self) -> float:
        return metrics.expected_calibration_error(self.tested.labels, self.tested.probabilities)

    @cached_property
    def further(self) -> dict[str, float]:
        """For two classes AUC, F1, sensitivity and specificity, of which the second is the positive; else macro F1."""
        counts = self.confusion
        if len(self.classes) != 2:
            return {"macro F1": metrics.macro_f1(counts)}
        return {
            "AUC": metrics.auc(self.tested.labels == metrics.POSITIVE, self.tested.probabilities[:, metrics.POSITIVE]),
            "F1": metrics.f1(counts),
            "sensitivity": metrics.sensitivity(counts),
            "specificity": metrics.specificity(counts),
        }

    def reliability(self) -> list[Bin]:
        """How sure it was and how often right, in equal bins of how sure it was; empty ones are left out."""
        sure = self.tested.probabilities.max(axis=1)
        right = self.tested.predicted == self.tested.labels
        which = np.minimum((sure * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
        rows = [which == number for number in range(RELIABILITY_BINS)]
        return [Bin(int(r.sum()), float(sure[r].mean()), float(right[r].mean())) for r in rows if r.any()]

    def to_json(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "accuracy": _interval(self.accuracy),
            "accuracy_before": self.accuracy_before,
            "log_loss": self.log_loss,
            "ece": self.calibration_error,
            **{name.lower().replace(" ", "_"): _number(value) for name, value in self.further.items()},
            "recall": {name: _interval(each) for name, each in self.recall.items()},
            "confusion": self.confusion.tolist(),
            "reliability": [[each.sure, each.right, each.images] for each in self.reliability()],
        }


@dataclass(frozen=True)
class Evaluation:
    """A model on some data, domain by domain."""

    name: str
    """Of the run."""
    dataset: str
    split: str
    classes: tuple[str, ...]
    tested: tuple[Judged, ...]
    temperature: float | None
    """None where probabilities are not calibrated."""
    notes: tuple[str, ...]
    overlap: Overlap
    """Images that the run trained on or chose on."""

    def __iter__(self) -> Iterator[Figures]:
        return (Figures(each, self.classes) for each in self.tested)

    @cached_property
    def all(self) -> Figures:
        """Of all images together."""
        whole = self.tested[0]
        for other in self.tested[1:]:
            whole = whole + other
        return Figures(whole, self.classes)

    @cached_property
    def mean(self) -> Interval:
        """The mean accuracy over domains."""
        return mean_of({each.domain: each.predicted == each.labels for each in self.tested})

    @property
    def mean_before(self) -> float | None:
        before = [figures.accuracy_before for figures in self]
        known = [each for each in before if each is not None]
        return float(np.mean(known)) if len(known) == len(before) else None

    @property
    def worst(self) -> Figures:
        return min(self, key=lambda figures: figures.accuracy.value)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "dataset": self.dataset,
            "split": self.split,
            "classes": list(self.classes),
            "temperature": self.temperature,
            "accuracy_mean": _interval(self.mean),
            "accuracy_mean_before": self.mean_before,
            "all": self.all.to_json(),
            "domains": {
                figures.tested.domain: {"trained_on": figures.tested.trained_on, **figures.to_json()}
                for figures in self
            },
            "overlap": self.overlap.to_json(),
            "notes": list(self.notes),
        }


def _interval(each: Interval | None) -> dict[str, float] | None:
    return None if each is None else {"value": each.value, "low": each.low, "high": each.high}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
