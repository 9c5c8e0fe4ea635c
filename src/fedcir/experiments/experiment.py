"""Experiments of the paper: which runs a table or figure needs at which scale, and the results of these runs."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcir.algorithms.algorithm import Algorithm
from fedcir.client.local_update import EVALUATION_BATCH, train_client
from fedcir.config import Config
from fedcir.data.federation import Federation
from fedcir.errors import InputError
from fedcir.experiments.sweep import Job
from fedcir.machine import use_threads
from fedcir.reporting.charts import Chart
from fedcir.reporting.methods import describe_chance
from fedcir.reporting.page import Rows
from fedcir.runs.reader import Run
from fedcir.runs.statistics import Estimate, RunScores, chance_level, is_at_chance, mean_interval
from fedcir.runtime.resolution import resolve_config
from fedcir.runtime.session import make_trainer
from fedcir.types import Groups, LocalContext

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
"""Settings of each scale on top of the dataset's preset: days, hours on two cores, a minute."""


@dataclass(frozen=True)
class Point:
    """A value on the axis of an experiment: its name and the settings that define it."""

    name: str = ""
    settings: Tables = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The name as part of a folder name."""
        return re.sub(r"[^\w.]+", "-", self.name).strip("-")


@dataclass(frozen=True)
class Case:
    """One run of an experiment."""

    dataset: str
    point: Point
    algorithm: str
    """Name of the algorithm, or its file such as ./mine.py."""
    seed: int

    @property
    def method(self) -> str:
        """Name of the algorithm without folder and suffix."""
        return Path(self.algorithm).stem if self.algorithm.endswith(".py") else self.algorithm

    @property
    def name(self) -> str:
        """Name of the run folder. It does not name the experiment, because experiments share runs."""
        parts = [self.dataset, self.method, self.point.slug, str(self.seed)]
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Outcome:
    """Result of an experiment: a table as text and as numbers, and the panels of a figure."""

    rows: Rows
    numbers: Rows
    panels: list[Chart]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """The finished runs of an experiment."""

    cases: Sequence[Case]
    by_name: Mapping[str, Run]
    """Runs by the name of their case."""
    target: float | None = None
    """Accuracy to reach, as a fraction (table3)."""

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
        """The finished runs of a method at a point, by seed."""
        return {
            case.seed: self.by_name[case.name]
            for case in self.cases
            if (case.dataset, case.method, case.point.name) == (dataset, algorithm, point) and case.name in self.by_name
        }

    def accuracy(self, dataset: str, algorithm: str, point: str = "") -> Estimate | None:
        """Accuracy of the last round in per cent, over seeds: the plain mean over the domains with training clients.

        None where no run has finished.
        """
        runs = self.runs(dataset, algorithm, point).values()
        final = [100 * run.final["accuracy_mean"] for run in runs]
        return Estimate.of(final) if final else None

    def chance_notes(self) -> list[str]:
        """Sentences about methods whose accuracy does not differ from chance level, by dataset and point."""
        notes = []
        for dataset in self.datasets:
            for point in self.points:
                at_chance: dict[str, float | None] = {}
                for algorithm in self.algorithms:
                    if runs := list(self.runs(dataset, algorithm, point).values()):
                        level = chance_level(runs[0])
                        if is_at_chance(mean_interval([RunScores.from_run(run) for run in runs]), level):
                            at_chance[algorithm] = level
                prefix = ", ".join(filter(None, (dataset if len(self.datasets) > 1 else "", point)))
                notes += [f"{prefix}: {note}" if prefix else note for note in describe_chance(at_chance)]
        return notes


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    title: str
    datasets: tuple[str, ...]
    """The paper's datasets."""
    algorithms: tuple[str, ...]
    outcome: Callable[[Results], Outcome]
    points: Callable[[str], list[Point]] = lambda scale: [Point()]
    smoke: tuple[str, ...] = ("fedavg", "fedcir")
    """Methods at smoke scale."""
    fixed: bool = False
    """Whether other methods than `algorithms` are refused."""

    def seeds(self, scale: str) -> list[int]:
        """Three seeds; one at smoke scale, and at small scale where several points would take days."""
        return [0] if scale == "smoke" or (scale == "small" and len(self.points(scale)) > 1) else [0, 1, 2]

    def methods(self, scale: str, requested: Sequence[str] | None) -> list[str]:
        if requested is None:
            return list(self.smoke if scale == "smoke" else self.algorithms)
        if self.fixed and (other := next((name for name in requested if name not in self.algorithms), None)):
            raise InputError(f"this experiment takes only {', '.join(self.algorithms)}, not {other!r}: leave it out")
        return list(requested)

    def cases(
        self,
        scale: str,
        datasets: Sequence[str],
        algorithms: Sequence[str] | None,
        seeds: Sequence[int] | None,
        settings: Mapping[str, Any],
    ) -> list[Case]:
        """List the runs of the experiment. A setting that it varies selects the points with that value."""
        points = self.points(scale)
        keys = {(section, name) for point in points for section, values in point.settings.items() for name in values}
        given = {
            (section, name): settings[section][name]
            for section, name in sorted(keys)
            if name in settings.get(section, {}) and len({point.settings[section][name] for point in points}) > 1
        }
        selected = [p for p in points if all(p.settings[key[0]][key[1]] == value for key, value in given.items())]
        if not selected:
            values = ", ".join(f"{section}.{name}={value}" for (section, name), value in given.items())
            raise InputError(f"{values} is not one of its points: {'; '.join(point.name for point in points)}")
        return [
            Case(dataset, point, algorithm, seed)
            for seed in (self.seeds(scale) if seeds is None else seeds)
            for dataset in datasets
            for point in selected
            for algorithm in self.methods(scale, algorithms)
        ]


def format_estimate(estimate: Estimate | None) -> str:
    """Format an accuracy in per cent as the paper prints it; a dash for a run that failed."""
    if estimate is None:
        return "–"
    return f"{estimate.mean:.2f}" + ("" if estimate.std is None else f" ± {estimate.std:.2f}")


def format_numbers(*values: float | None) -> list[str]:
    """Format numbers as cells of a CSV file, None as an empty cell."""
    return ["" if value is None else f"{value:.6g}" for value in values]


START_SECONDS = 4.0
"""Time that a process takes to start."""
TIMED_STEPS = 2


def estimate_seconds(jobs: Sequence[Job], federations: Mapping[str, Federation]) -> list[float]:
    """Estimate the seconds of each job with one worker from the time of a few training steps of each kind."""
    speeds: dict[tuple[Any, ...], tuple[float, float]] = {}
    seconds = []
    for job in jobs:
        config, federation = job.config, federations[job.config.data.name]
        kind = (config.data.name, str(config.model), config.data.image_size, config.local.batch_size, config.run.device)
        if kind not in speeds:
            speeds[kind] = _measure_speed(config, federation)
        step, image = speeds[kind]
        active = config.server.active or config.partition.clients or len(federation.trainers)
        tested = sum(len(federation.clients[number].test or ()) for number in federation.evaluators)
        images = [len(client.train) for client in federation.clients if client.train is not None]
        steps = sum(map(config.local.count_steps, images)) / len(images)
        round_seconds = active * steps * step + tested * image / config.server.eval_every
        seconds.append(START_SECONDS + config.server.rounds * round_seconds)
    return seconds


def _measure_speed(config: Config, federation: Federation) -> tuple[float, float]:
    """Measure the seconds of one local step of FedAvg, and of the evaluation of one image, with one worker."""
    algorithm = Algorithm()
    short = replace(config, local=replace(config.local, steps=TIMED_STEPS), server=replace(config.server, active=None))
    config = resolve_config(
        replace(short, algorithm=replace(short.algorithm, name="fedavg", fields={})), algorithm, federation
    )
    worker = make_trainer(config, algorithm, federation.builder)
    client = next(client for client in federation.clients if client.train is not None)
    assert client.test is not None
    model: Groups = {"model": {name: t.clone() for name, t in worker.modules["model"].state_dict().items()}}
    with use_threads(config.run.threads):
        train_client(worker, client, model, {}, 1)  # the first call is slower
        started = time.perf_counter()
        train_client(worker, client, model, {}, 1)
        step = (time.perf_counter() - started) / TIMED_STEPS
        rows = np.arange(min(EVALUATION_BATCH, len(client.test)))
        started = time.perf_counter()
        with torch.inference_mode():
            x, _ = client.test.batch(rows, worker.device, worker.layout)
            ctx = LocalContext(1, 1, worker.task.outputs, len(rows), model, torch.Generator())
            algorithm.predict(worker.modules, x, ctx)
        image = (time.perf_counter() - started) / len(rows)
    return step, image
