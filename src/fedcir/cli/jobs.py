"""Several runs at a time, as `compare` and `reproduce` start them."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedcir.cli.failure import debugging
from fedcir.cli.interrupt import Interrupted
from fedcir.cli.options import Options

if TYPE_CHECKING:
    from fedcir.algorithms.algorithm import Algorithm
    from fedcir.config import AlgorithmConfig
    from fedcir.data.federation import Federation
    from fedcir.runs.sweep import Job


def parse_algorithms(text: str) -> list[str]:
    """Methods by name or file, comma-separated, or all."""
    from fedcir.algorithms import algorithm_class, names
    from fedcir.types import InputError

    asked = [name.strip() for name in text.split(",") if name.strip()]
    chosen = [each for name in asked for each in (names() if name == "all" else [name])]
    for name in chosen:
        algorithm_class(name)
    if not chosen:
        raise InputError("--algorithms names none; give some, comma-separated, or all")
    stems = [Path(name).stem for name in chosen]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise InputError(f"--algorithms names {twice!r} twice")
    return chosen


def parse_seeds(text: str) -> list[int]:
    from fedcir.types import InputError

    try:
        seeds = sorted(int(seed) for seed in text.split(","))
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None
    if twice := next((str(seed) for seed in seeds if seeds.count(seed) > 1), ""):
        raise InputError(f"--seeds names {twice} twice")
    return seeds


def check_target(target: float | None) -> None:
    from fedcir.types import InputError

    if target is not None and not 0 < target < 1:
        raise InputError(f"--target is an accuracy between 0 and 1, got {target}")


def cores(options: Options) -> int:
    """Runs at a time, or workers of one."""
    workers: int | None = options.settings.get("workers")
    return (os.cpu_count() or 1) if workers is None else workers


def check_place(out: Path) -> None:
    """Refuse a folder that holds something else than runs."""
    from fedcir.runs.sweep import SETTINGS
    from fedcir.types import InputError

    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / SETTINGS).is_dir() and not any(out.glob("*/config.toml")):
        raise InputError(f"{out} holds other files and no runs: give another --out")


def tell_failures(failures: dict[str, str], runs: int) -> None:
    """End with what went wrong, where something did."""
    from fedcir.types import InputError

    if failures:
        some = "; ".join(f"{name}: {why}" for name, why in failures.items())
        raise InputError(f"{len(failures)} of {runs} runs failed, try them again with --resume: {some}")


def prepare(jobs: "list[Job]", options: Options) -> "dict[str, Federation]":
    """Find what is wrong before anything starts; open each dataset once, so that no run waits for another to do it.

    Gives the datasets of runs that are not done yet.
    """
    from fedcir.cli.progress import Meter
    from fedcir.data.federation import open_federation
    from fedcir.engine.folder import RunFolder
    from fedcir.engine.resume import check_data, check_settings
    from fedcir.runs.tracking import check_tracker
    from fedcir.types import InputError

    check_tracker(options.track)
    begun = []
    for job in jobs:
        algorithm, folder = _algorithm(job.config.algorithm), RunFolder(job.out)
        if folder.exists and not options.resume:
            raise InputError(f"{job.out} holds a run already: continue it with --resume, or give another --out")
        if folder.exists and not job.done:
            check_settings(folder, job.config, algorithm)
            begun.append(job)
    opened: dict[str, Federation] = {}
    for job in jobs:
        if job.config.data.name not in opened and not (options.resume and job.done):
            with Meter("decoding images", options.quiet) as meter:
                opened[job.config.data.name] = federation = open_federation(job.config, meter.show)
            for note in () if options.quiet else federation.notes:
                print(f"note: {note}", file=sys.stderr)
    dealt: dict[str, Federation] = {}
    for job in begun:  # the data may have changed since
        key = repr((job.config.data, job.config.partition, job.config.model, job.config.run.seed))
        if key not in dealt:
            dealt[key] = open_federation(job.config)
        check_data(RunFolder(job.out), job.config, dealt[key])
    return opened


def run_all(jobs: "list[Job]", options: Options) -> dict[str, str]:
    """Do the runs that are not done yet, showing how they go. Gives why each failed that did, by its folder's name."""
    from fedcir.cli.progress import Display
    from fedcir.runs.sweep import sweep

    failures = {}
    with Display(options.quiet, runs=len(jobs)) as display:
        try:
            for step in sweep(jobs, cores(options), options.resume, options.track):
                name = step.job.out.name
                if step.event == "begun":
                    display.begin(name, step.job.config.server.rounds)
                elif step.record is not None:
                    display.show(name, step.record)
                else:
                    display.end(name, step.said)
                    if step.event == "failed":
                        failures[name] = step.said
                        if debugging() and step.trace:
                            print(step.trace, file=sys.stderr)
                for note in step.notes:
                    print(f"note: {name}: {note}", file=sys.stderr)
        except KeyboardInterrupt:
            raise Interrupted("rounds are saved; continue with the same command and --resume") from None
    return failures


def _algorithm(config: "AlgorithmConfig") -> "Algorithm":
    """A field that one of several methods lacks is found before any of them starts."""
    from fedcir.algorithms import make_algorithm
    from fedcir.types import InputError

    try:
        return make_algorithm(config)
    except InputError as error:
        raise InputError(f"{config.name}: {error}; set one method's by --set algorithms.NAME.FIELD=VALUE") from None
