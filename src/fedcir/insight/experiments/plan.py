"""Before an experiment is run: where its data lie, which runs it takes, and about how long they will take."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config
from fedcir.data.federation import Federation
from fedcir.engine.client import EVALUATION_BATCH, fit
from fedcir.engine.machine import threads
from fedcir.engine.session import workbench
from fedcir.engine.settling import settled
from fedcir.insight.experiments.experiment import Case, Experiment, Point
from fedcir.runs.sweep import Job
from fedcir.types import Groups, InputError, LocalContext

START_SECONDS = 4.0
"""What a process takes to begin."""
TRIED = 2
"""Steps that are timed."""


def locate(names: Sequence[str], root: Path) -> dict[str, Path]:
    """Those of several datasets that lie below a folder, each in one of its name: office_caltech10 will do."""
    if not root.is_dir():
        raise InputError(f"data.root {root} is not a folder")
    inside = {_plain(path.name): path for path in sorted(root.iterdir()) if path.is_dir()}
    found = {name: inside[_plain(name)] for name in names if _plain(name) in inside}
    if not found:
        raise InputError(
            f"{root} holds none of the folders {', '.join(names)}: name one dataset, and give its own folder as "
            "data.root"
        )
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def cases(
    experiment: Experiment,
    scale: str,
    datasets: Sequence[str],
    algorithms: Sequence[str] | None,
    seeds: Sequence[int] | None,
    given: Mapping[str, Any],
) -> list[Case]:
    """Every run that it takes. A setting that is given and that it varies picks the points that have that value."""
    points = experiment.points(scale)
    varied = _varied(points)
    kept = [point for point in points if _agrees(point, given, varied)]
    if not kept:
        asked = ", ".join(
            f"{section}.{name}={given[section][name]}" for section, name in varied if name in given.get(section, {})
        )
        raise InputError(f"{asked} is not one of its points: {'; '.join(point.name for point in points)}")
    return [
        Case(dataset, point, algorithm, seed)
        for seed in (experiment.seeds(scale) if seeds is None else seeds)
        for dataset in datasets
        for point in kept
        for algorithm in experiment.methods(scale, algorithms)
    ]


def _varied(points: Sequence[Point]) -> list[tuple[str, str]]:
    """The settings that are not the same at every point."""
    every = {(section, name) for point in points for section, values in point.settings.items() for name in values}
    return sorted(key for key in every if len({point.settings[key[0]][key[1]] for point in points}) > 1)


def _agrees(point: Point, given: Mapping[str, Any], varied: Sequence[tuple[str, str]]) -> bool:
    return all(
        given.get(section, {}).get(name, point.settings[section][name]) == point.settings[section][name]
        for section, name in varied
    )


def estimates(jobs: Sequence[Job], federations: Mapping[str, Federation]) -> list[float]:
    """About how many seconds each job takes with one worker, from the time of a few steps of each kind."""
    speeds: dict[tuple[Any, ...], tuple[float, float]] = {}
    seconds = []
    for job in jobs:
        config, federation = job.config, federations[job.config.data.name]
        kind = (config.data.name, str(config.model), config.data.image_size, config.local.batch_size, config.run.device)
        if kind not in speeds:
            speeds[kind] = _speed(config, federation)
        step, image = speeds[kind]
        active = config.server.active or config.partition.clients or len(federation.trainers)
        tested = sum(len(federation.clients[number].test or ()) for number in federation.evaluators)
        a_round = active * config.local.steps * step + tested * image / config.server.eval_every
        seconds.append(START_SECONDS + config.server.rounds * a_round)
    return seconds


def _speed(config: Config, federation: Federation) -> tuple[float, float]:
    """Seconds of one local step of FedAvg, and of testing one image, with one worker."""
    algorithm = Algorithm()
    short = replace(config, local=replace(config.local, steps=TRIED), server=replace(config.server, active=None))
    config = settled(
        replace(short, algorithm=replace(short.algorithm, name="fedavg", fields={})), algorithm, federation
    )
    worker = workbench(config, algorithm, federation.task)
    client = next(client for client in federation.clients if client.train is not None)
    assert client.test is not None
    model: Groups = {"model": {name: t.clone() for name, t in worker.modules["model"].state_dict().items()}}
    with threads(config.run.threads):
        fit(worker, client, model, {}, 1)  # the first is slower
        started = time.perf_counter()
        fit(worker, client, model, {}, 1)
        step = (time.perf_counter() - started) / TRIED
        rows = np.arange(min(EVALUATION_BATCH, len(client.test)))
        started = time.perf_counter()
        with torch.inference_mode():
            x, _ = client.test.batch(rows, worker.device, worker.layout)
            ctx = LocalContext(1, 1, worker.num_classes, len(rows), model, torch.Generator())
            algorithm.predict(worker.modules, x, ctx)
        image = (time.perf_counter() - started) / len(rows)
    return step, image
