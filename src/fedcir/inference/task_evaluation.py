"""Evaluation of other tasks than classification: scores of each domain from the sums of the task, with intervals."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcir.data.domains import Indices
from fedcir.rng import numpy_rng
from fedcir.runs.evaluation_data import Overlap
from fedcir.runs.statistics import Interval, percentile_interval
from fedcir.tasks.task import Sums, Task, add_sums, average_known

RESAMPLES = 200
"""Resamples of a domain's examples for an interval."""
MAX_RESAMPLED = 5_000
"""Examples from which on there is no interval for tasks that compare pairs of examples, which takes too long."""


@dataclass(frozen=True)
class DomainScores:
    """Scores of one domain. Scores that its examples do not define are NaN."""

    domain: str
    count: int
    sums: Mapping[str, float]
    scores: Mapping[str, float]
    """Metrics of the task by name."""
    interval: Interval | None
    """The primary metric with its 95 % interval over examples; None without one."""
    by_name: Mapping[str, Mapping[str, float]]
    """Metrics of each label, class or target column."""
    is_trained_on: bool = True

    def __len__(self) -> int:
        return self.count

    def to_json(self) -> dict[str, Any]:
        return {
            "examples": self.count,
            **to_known(self.scores),
            "interval": self.interval and asdict(self.interval),
            "by_name": {name: to_known(scores) for name, scores in self.by_name.items()},
        }


@dataclass(frozen=True)
class TaskEvaluation:
    """Evaluation of the model of a run of another task than classification, and the files that were written."""

    name: str
    """Name of the run."""
    dataset: str
    split: str
    task: Task
    domains: tuple[DomainScores, ...]
    notes: tuple[str, ...]
    overlap: Overlap
    """Examples that the run trained on or chose on."""
    page: Path | None = None
    numbers: Path | None = None
    noun: str = "images"
    """What examples are called."""

    def __iter__(self) -> Iterator[DomainScores]:
        return iter(self.domains)

    @cached_property
    def mean(self) -> dict[str, float]:
        """Mean of each metric over the domains that define it."""
        names = [metric.name for metric in self.task.metrics_reported]
        return {name: average_known(domain.scores[name] for domain in self) for name in names}

    @property
    def worst(self) -> DomainScores | None:
        """Domain with the worst primary metric; None if no domain defines it."""
        metric = self.task.primary
        known = {d.domain: d.scores[metric.name] for d in self if not math.isnan(d.scores[metric.name])}
        value = metric.find_worst(known.values())
        return next((domain for domain in self if known.get(domain.domain) == value), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "dataset": self.dataset,
            "split": self.split,
            "task": self.task.to_card(),
            "metric": self.task.primary.name,
            "mean": to_known(self.mean),
            "domains": {domain.domain: {"trained_on": domain.is_trained_on, **domain.to_json()} for domain in self},
            "overlap": self.overlap.to_json(),
            "notes": list(self.notes),
        }


def to_known(scores: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in scores.items()}


def score_domain(domain: str, task: Task, batches: Iterable[tuple[Tensor, Tensor]]) -> DomainScores:
    """Score the outputs and targets of a domain's batches."""
    if task.adds_over_batches:
        parts = [
            task.metrics(*row) for y, t in batches for row in zip(torch.split(y, 1), torch.split(t, 1), strict=True)
        ]
        table = np.array([list(part.values()) for part in parts])  # (N, sums)
        sums, count = add_sums(parts), len(parts)

        def draw(rows: Indices) -> Sums:
            return dict(zip(sums, table[rows].sum(0).tolist(), strict=True))
    else:
        outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        sums, count = task.metrics(outputs, targets), len(targets)

        def draw(rows: Indices) -> Sums:
            return task.metrics(outputs[rows], targets[rows])

    scores, interval = task.scores(sums), None
    value = scores[task.primary.name]
    if not math.isnan(value) and (task.adds_over_batches or count <= MAX_RESAMPLED):
        rng = numpy_rng(0, "resample", domain)
        draws = [task.scores(draw(rng.integers(0, count, count)))[task.primary.name] for _ in range(RESAMPLES)]
        interval = percentile_interval(value, np.array([draw for draw in draws if not math.isnan(draw)] or [value]))
    return DomainScores(domain, count, sums, scores, interval, task.scores_by_name(sums))
