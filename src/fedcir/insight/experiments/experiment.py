"""What an experiment is: which runs it takes, at which scale, and what it makes of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcir.insight.charts import Chart
from fedcir.insight.report.advice import chance_sentence
from fedcir.insight.report.tables import Rows
from fedcir.runs.compare import Estimate
from fedcir.runs.intervals import RunAccuracy, chance_level, is_at_chance, mean_interval
from fedcir.runs.run import Run
from fedcir.types import InputError

Tables = Mapping[str, Mapping[str, Any]]

SCALES: dict[str, Tables] = {
    "paper": {"model": {"name": "resnet18"}, "server": {"rounds": 300}},
    "small": {
        "data": {"image_size": 32, "train_per_domain": 2000},
        "model": {"name": "cnn"},
        "server": {"rounds": 100},
    },
    "smoke": {
        "model": {"name": "cnn", "width": 4},
        "local": {"steps": 2, "batch_size": 8},
        "server": {"rounds": 2},
    },
}
"""What each scale sets over the dataset's preset: the paper's settings, hours on two cores, a minute."""


@dataclass(frozen=True)
class Point:
    """A place on an experiment's axis: what it is called, and the settings that make it."""

    name: str = ""
    settings: Tables = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The name as part of a folder's."""
        return re.sub(r"[^\w.]+", "-", self.name).strip("-")


@dataclass(frozen=True)
class Case:
    """One run of an experiment."""

    dataset: str
    point: Point
    algorithm: str
    """Its name, or the file ./mine.py that holds it."""
    seed: int

    @property
    def method(self) -> str:
        """What the algorithm is called."""
        return Path(self.algorithm).stem if self.algorithm.endswith(".py") else self.algorithm

    @property
    def name(self) -> str:
        """Of its folder. The same run is part of several tables and figures, so it says nothing of them."""
        parts = [self.dataset, self.method, self.point.slug, str(self.seed)]
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Outcome:
    """What came out: a table as text and as numbers, and the panels of a figure."""

    rows: Rows
    numbers: Rows
    panels: list[Chart]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """The runs of an experiment that have ended well."""

    cases: Sequence[Case]
    by_name: Mapping[str, Run]
    """The case's."""
    target: float | None = None
    """The accuracy to reach, as a fraction (table3)."""

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(case.dataset for case in self.cases))

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(case.method for case in self.cases))

    @property
    def points(self) -> list[str]:
        return list(dict.fromkeys(case.point.name for case in self.cases))

    def runs(self, dataset: str, algorithm: str, point: str = "") -> dict[int, Run]:
        """By seed."""
        return {
            case.seed: self.by_name[case.name]
            for case in self.cases
            if (case.dataset, case.method, case.point.name) == (dataset, algorithm, point) and case.name in self.by_name
        }

    def accuracy(self, dataset: str, algorithm: str, point: str = "") -> Estimate | None:
        """Of the last round in per cent, over seeds: the plain mean over the domains that somebody trains on.

        None where no run has ended.
        """
        runs = self.runs(dataset, algorithm, point).values()
        final = [100 * run.final["accuracy_mean"] for run in runs]
        return Estimate.of(final) if final else None

    def chance_notes(self) -> list[str]:
        """Sentences on methods whose accuracy cannot be told from chance level, by dataset and point."""
        notes = []
        for dataset in self.datasets:
            for point in self.points:
                at_chance: dict[str, float | None] = {}
                for algorithm in self.algorithms:
                    if runs := list(self.runs(dataset, algorithm, point).values()):
                        level = chance_level(runs[0])
                        if is_at_chance(mean_interval([RunAccuracy.from_run(run) for run in runs]), level):
                            at_chance[algorithm] = level
                place = ", ".join(filter(None, (dataset if len(self.datasets) > 1 else "", point)))
                notes += [f"{place}: {note}" if place else note for note in chance_sentence(at_chance)]
        return notes


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    title: str
    datasets: tuple[str, ...]
    """Those of the paper."""
    algorithms: tuple[str, ...]
    outcome: Callable[[Results], Outcome]
    points: Callable[[str], list[Point]] = lambda scale: [Point()]
    smoke: tuple[str, ...] = ("fedavg", "fedcir")
    """The methods at smoke scale."""
    fixed: bool = False
    """Whether it is of its methods only."""

    def seeds(self, scale: str) -> list[int]:
        """Three; one where a sweep would take days, and to see whether it works."""
        return [0] if scale == "smoke" or (scale == "small" and len(self.points(scale)) > 1) else [0, 1, 2]

    def methods(self, scale: str, asked: Sequence[str] | None) -> list[str]:
        if asked is None:
            return list(self.smoke if scale == "smoke" else self.algorithms)
        if self.fixed and (other := next((name for name in asked if name not in self.algorithms), None)):
            raise InputError(f"this experiment takes only {', '.join(self.algorithms)}, not {other!r}: leave it out")
        return list(asked)


def cell(estimate: Estimate | None) -> str:
    """Per cent as the paper prints them; a run that failed leaves its cell empty but for a dash."""
    if estimate is None:
        return "–"
    return f"{estimate.mean:.2f}" + ("" if estimate.std is None else f" ± {estimate.std:.2f}")


def plain(estimate: Estimate | None) -> tuple[float | None, float | None]:
    """Mean and standard deviation, where there are any."""
    return (None, None) if estimate is None else (estimate.mean, estimate.std)


def number(value: float | None) -> str:
    """For a program to read."""
    return "" if value is None else f"{value:.6g}"
