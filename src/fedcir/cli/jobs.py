"""Several runs at a time, as `compare` and `reproduce` start them."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedcir.cli.failure import debugging
from fedcir.cli.interrupt import Interrupted
from fedcir.options import Options

if TYPE_CHECKING:
    from fedcir.config import AlgorithmConfig
    from fedcir.federation import Federation
    from fedcir.sweep import Job


def parse_algorithms(text: str) -> list[str]:
    """Methods by name or file, comma-separated, or all."""
    from fedcir.algorithms import algorithm_class, names
    from fedcir.types import InputError

    chosen = names() if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
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
        return sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


def check_target(target: float | None) -> None:
    from fedcir.types import InputError

    if target is not None and not 0 < target < 1:
        raise InputError(f"--target is an accuracy between 0 and 1, got {target}")


def cores(options: Options) -> int:
    """Runs at a time, or workers of one."""
    return (os.cpu_count() or 1) if options.workers is None else options.workers


def prepare(jobs: "list[Job]", options: Options) -> "dict[str, Federation]":
    """Find what is wrong before anything starts; open each dataset once, so that no run waits for another to do it.

    Gives the datasets of runs that are not done yet.
    """
    from fedcir.federation import open_federation
    from fedcir.progress import Meter
    from fedcir.records import RunFolder
    from fedcir.tracking import check_tracker
    from fedcir.types import InputError

    check_tracker(options.track)
    for job in jobs:
        _check_fields(job.config.algorithm)
        if RunFolder(job.out).exists and not options.resume:
            raise InputError(f"{job.out} holds a run already: continue it with --resume, or give another --out")
    opened: dict[str, Federation] = {}
    for job in jobs:
        if job.config.data.name not in opened and not (options.resume and job.done):
            with Meter("decoding images", options.quiet) as meter:
                opened[job.config.data.name] = federation = open_federation(job.config, meter.show)
            for note in () if options.quiet else federation.notes:
                print(f"note: {note}", file=sys.stderr)
    return opened


def run_all(jobs: "list[Job]", options: Options) -> dict[str, str]:
    """Do the runs that are not done yet, showing how they go. Gives why each failed that did, by its folder's name."""
    from fedcir.progress import Display
    from fedcir.sweep import sweep

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


def _check_fields(algorithm: "AlgorithmConfig") -> None:
    """A field that one of several methods lacks is found before any of them starts."""
    from fedcir.algorithms import make_algorithm
    from fedcir.types import InputError

    try:
        make_algorithm(algorithm)
    except InputError as error:
        raise InputError(f"{algorithm.name}: {error}; set one method's by --set algorithms.NAME.FIELD=VALUE") from None
