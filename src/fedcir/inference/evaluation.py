"""Predictions of a model on labelled images, domain by domain, and their metrics."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.local_update import EVALUATION_BATCH
from fedcir.client.prediction import Output, predict
from fedcir.client.state import ClientStore
from fedcir.config import Config
from fedcir.data.federation import Federation
from fedcir.inference.adaptation import SiteEstimate
from fedcir.machine import use_threads
from fedcir.models.builder import NetworkBuilder
from fedcir.runs.evaluation_data import SEED, Overlap, sample_rows
from fedcir.runs.reader import RestoredModel, Run, restore_model
from fedcir.runs.statistics import LEVEL, Interval, bootstrap_mean
from fedcir.runtime.session import make_trainer

Labels = NDArray[np.int64]
LARGEST_LOSS = -math.log(1e-12)
"""Cap of one image's contribution to the log-loss, for classes that a method rules out (probability 0)."""
CALIBRATION_BINS, RELIABILITY_BINS = 15, 10


@dataclass(frozen=True)
class DomainPredictions:
    """Predictions on the labelled images of one domain. Undefined metrics are nan."""

    domain: str
    labels: Labels  # (N,)
    log_probabilities: NDArray[np.float64]  # (N, C)
    z: NDArray[np.float32] | None = None
    """Representations (N, Z); None where the network gives none or they were dropped."""
    sigma: NDArray[np.float32] | None = None
    """Their standard deviations (N, Z), where the encoder is Gaussian."""
    is_trained_on: bool = True
    predicted_before: Labels | None = None
    """Predictions before the model was adapted to the domain, if it was."""
    estimate: SiteEstimate | None = None
    """What unlabelled images of the domain let expect, if the model was adapted to them and is calibrated."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def predicted(self) -> Labels:
        return np.asarray(self.log_probabilities.argmax(axis=1))

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        return np.exp(self.log_probabilities)

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """Cross-entropy of each image (N,)."""
        return -self.log_probabilities[np.arange(len(self)), self.labels]

    @property
    def is_correct(self) -> NDArray[np.bool_]:
        return np.equal(self.predicted, self.labels)

    @property
    def accuracy(self) -> float:
        return float(self.is_correct.mean())

    @cached_property
    def accuracy_interval(self) -> Interval:
        return wilson_interval(int(self.is_correct.sum()), len(self))

    @property
    def accuracy_before(self) -> float | None:
        return None if self.predicted_before is None else float((self.predicted_before == self.labels).mean())

    @property
    def log_loss(self) -> float:
        return float(np.minimum(self.losses, LARGEST_LOSS).mean())

    @cached_property
    def confusion(self) -> Labels:
        """Counts (C, C): rows are true classes, columns are predictions."""
        from sklearn.metrics import confusion_matrix

        classes = np.arange(self.log_probabilities.shape[1])
        return confusion_matrix(self.labels, self.predicted, labels=classes)  # type: ignore[no-any-return]

    @cached_property
    def recall(self) -> list[Interval | None]:
        """Recall of each class with its Wilson interval; None for a class without images."""
        counts = [(int(row[label]), int(row.sum())) for label, row in enumerate(self.confusion)]
        return [wilson_interval(correct, images) if images else None for correct, images in counts]

    @cached_property
    def class_metrics(self) -> dict[str, float]:
        """Macro F1, or for two classes AUC, F1, sensitivity and specificity; the second class is positive."""
        from sklearn.metrics import f1_score, recall_score, roc_auc_score

        labels, predicted, classes = self.labels, self.predicted, self.log_probabilities.shape[1]
        if classes != 2:
            macro = f1_score(labels, predicted, labels=np.arange(classes), average="macro", zero_division=np.nan)
            return {"macro F1": float(macro)}
        log_odds = np.clip(self.log_probabilities[:, 1] - self.log_probabilities[:, 0], -1e9, 1e9)
        return {
            "AUC": float(roc_auc_score(labels, log_odds)) if len(np.unique(labels)) == 2 else math.nan,
            "F1": float(f1_score(labels, predicted, zero_division=np.nan)),
            "sensitivity": float(recall_score(labels, predicted, zero_division=np.nan)),
            "specificity": float(recall_score(labels, predicted, pos_label=0, zero_division=np.nan)),
        }

    @property
    def calibration_error(self) -> float:
        return expected_calibration_error(self.labels, self.probabilities)

    def reliability(self) -> list[tuple[float, float, int]]:
        """Mean confidence, accuracy and number of images in equal bins of confidence; empty bins are left out."""
        confidence, is_correct = self.probabilities.max(axis=1), self.is_correct
        bins = np.minimum((confidence * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
        members = [bins == number for number in np.unique(bins)]
        return [(float(confidence[m].mean()), float(is_correct[m].mean()), int(m.sum())) for m in members]

    def sample(self, limit: int | None, seed: int) -> "DomainPredictions":
        """Draw at most `limit` images at random."""
        rows = sample_rows(len(self), limit, seed, self.domain)
        z, sigma = (None if values is None else values[rows] for values in (self.z, self.sigma))
        return replace(self, labels=self.labels[rows], log_probabilities=self.log_probabilities[rows], z=z, sigma=sigma)

    def to_json(self, classes: Sequence[str]) -> dict[str, Any]:
        return {
            "images": len(self),
            "accuracy": asdict(self.accuracy_interval),
            "accuracy_before": self.accuracy_before,
            "expected": self.estimate and asdict(self.estimate),
            "log_loss": self.log_loss,
            "ece": self.calibration_error,
            **{name.lower().replace(" ", "_"): None if math.isnan(v) else v for name, v in self.class_metrics.items()},
            "recall": {name: r and asdict(r) for name, r in zip(classes, self.recall, strict=True)},
            "confusion": self.confusion.tolist(),
            "reliability": self.reliability(),
        }


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the model of a run on a dataset, and the files that were written."""

    name: str
    """Name of the run."""
    dataset: str
    split: str
    classes: tuple[str, ...]
    domains: tuple[DomainPredictions, ...]
    temperature: float | None
    """None if probabilities are not calibrated."""
    notes: tuple[str, ...]
    overlap: Overlap
    """Images that the run trained on or chose on."""
    page: Path | None = None
    numbers: Path | None = None
    noun: str = "images"
    """What examples are called."""

    def __iter__(self) -> Iterator[DomainPredictions]:
        return iter(self.domains)

    @property
    def evaluation(self) -> "Evaluation":
        """The object itself, for callers of earlier versions."""
        return self

    @cached_property
    def all(self) -> DomainPredictions:
        """All images together."""
        labels = np.concatenate([domain.labels for domain in self])
        scores = np.concatenate([domain.log_probabilities for domain in self])
        before = [domain.predicted_before for domain in self if domain.predicted_before is not None]
        whole = np.concatenate(before) if len(before) == len(self.domains) else None
        return DomainPredictions(f"all {self.noun}", labels, scores, predicted_before=whole)

    @cached_property
    def mean(self) -> Interval:
        """Mean accuracy over domains."""
        return bootstrap_mean({domain.domain: domain.is_correct for domain in self})

    @property
    def mean_before(self) -> float | None:
        before = [domain.accuracy_before for domain in self]
        measured = [accuracy for accuracy in before if accuracy is not None]
        return float(np.mean(measured)) if len(measured) == len(before) else None

    @property
    def worst(self) -> DomainPredictions:
        return min(self, key=lambda domain: domain.accuracy)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "dataset": self.dataset,
            "split": self.split,
            "classes": list(self.classes),
            "temperature": self.temperature,
            "accuracy_mean": asdict(self.mean),
            "accuracy_mean_before": self.mean_before,
            "all": self.all.to_json(self.classes),
            "domains": {d.domain: {"trained_on": d.is_trained_on, **d.to_json(self.classes)} for d in self},
            "overlap": self.overlap.to_json(),
            "notes": list(self.notes),
        }


def expected_calibration_error(labels: ArrayLike, probabilities: ArrayLike, bins: int = CALIBRATION_BINS) -> float:
    """Gap between confidence and accuracy over equal bins of confidence, weighted by their size.

    Guo et al., 2017. https://arxiv.org/abs/1706.04599
    """
    scores = np.asarray(probabilities, np.float64)  # (N, C)
    confidence, is_correct = scores.max(axis=1), scores.argmax(axis=1) == np.asarray(labels)
    members = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)  # (0, 1/bins], (1/bins, 2/bins]
    gaps = np.bincount(members, weights=is_correct - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def wilson_interval(successes: int, trials: int) -> Interval:
    """Proportion with its 95 % interval (Wilson, 1927), which also holds for few trials and near 0 or 1."""
    from scipy.stats import binomtest  # takes half a second to import

    ends = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return Interval(successes / trials, float(ends.low), float(ends.high))


def collect_predictions(
    domain: str, batches: Iterable[tuple[Output, Tensor]], temperature: float = 1.0
) -> DomainPredictions:
    """Join the outputs and labels of a domain's batches."""
    outputs, labels = zip(*batches, strict=True)
    scores = torch.cat([(output.logits.double() / temperature).log_softmax(-1).cpu() for output in outputs])
    z, sigma = (
        None
        if any(getattr(output, name) is None for output in outputs)
        else torch.cat([getattr(output, name).float().cpu() for output in outputs]).numpy()
        for name in ("z", "sigma")
    )
    return DomainPredictions(domain, torch.cat(labels).cpu().numpy(), scores.numpy(), z, sigma)


def predict_run(run: Run, config: Config, federation: Federation) -> list[DomainPredictions]:
    """Predict all test images of the federation that a run was trained on, exactly as the run tested them."""
    restored = restore_model(run, config, make_algorithm(config.algorithm), federation.builder)
    return predict_domains(restored, federation, None, SEED)


def predict_domains(
    restored: RestoredModel, federation: Federation, limit: int | None, seed: int
) -> list[DomainPredictions]:
    """Predict at most `limit` random test images of every domain with a restored model."""
    trainer, predictions = restored.trainer, []
    with use_threads(1), torch.inference_mode():
        for number, domain in federation.evaluators.items():
            client = federation.clients[number]
            assert client.test is not None
            ctx = restored.load(client)
            rows = sample_rows(len(client.test), limit, seed, domain)
            batches = []
            for start in range(0, len(rows), EVALUATION_BATCH):
                x, y = client.test.batch(rows[start : start + EVALUATION_BATCH], trainer.device, trainer.layout)
                batches.append((predict(trainer.algorithm, trainer.modules, x, ctx), y))
            predictions.append(collect_predictions(domain, batches))
    return predictions


def build_untrained_model(config: Config, builder: NetworkBuilder) -> RestoredModel:
    """Build FedAvg's networks with their initial weights, on the CPU."""
    model, run = replace(config.model, batchnorm="average"), replace(config.run, layout="contiguous", compile=False)
    trainer = make_trainer(replace(config, model=model, run=run), Algorithm(), builder, "cpu")
    return RestoredModel(trainer, {}, ClientStore(), 0)
