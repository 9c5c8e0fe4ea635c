"""`fedcir run` and `fedcir compare`."""

import json as jsonlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.interrupt import Interrupted
from fedcir.cli.tables import print_table
from fedcir.options import Options, with_options

if TYPE_CHECKING:
    from fedcir.config import AlgorithmConfig
    from fedcir.records import RunFolder


@with_options
def run(
    options: Options,
    algorithm: Annotated[
        str | None, typer.Option(help="Method by name, or a file ./mine.py. [default: fedcir]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. [default: 0]")] = None,
) -> None:
    """Train one method. Without arguments: FedCiR on the embedded dataset."""
    from fedcir.progress import Display, Meter
    from fedcir.simulate import open_run
    from fedcir.tracking import check_tracker, open_track

    check_tracker(options.track)
    if options.profile:
        from fedcir.profiling import Profile

    config = options.to_config(algorithm, seed)
    name = f"{config.data.name}-{Path(config.algorithm.name).stem}-{config.run.seed}"
    out = options.out or Path("runs", name)
    with (
        Meter("decoding images", options.quiet) as meter,
        open_run(config, out, options.resume, meter.show) as (session, rounds),
    ):
        meter.close()
        if not options.quiet:
            for note in session.notes:
                print(f"note: {note}", file=sys.stderr)
            if session.finished:
                print(f"{out} is finished already, after round {session.state.round}", file=sys.stderr)
        with Display(options.quiet) as display, open_track(options.track, out, print_note) as track:
            display.begin(name, session.config.server.rounds)
            track.begin()
            if track.place is not None and not options.quiet:
                print_note(f"tracked in {track.place}")
            watched = Profile() if options.profile else None
            left = session.config.server.rounds - session.state.round
            try:
                for record in rounds if watched is None else watched.watch(rounds, left):
                    track.round(record)
                    display.show(name, record)
            except KeyboardInterrupt:
                rounds.close()
                raise Interrupted(f"round {session.state.round} is saved; continue with --resume --out {out}") from None
        summary = session.folder.summary() if session.folder is not None else {}
    print_run(summary, options, out, [] if watched is None else watched.rows())


def print_note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def print_run(summary: dict[str, Any], options: Options, out: Path, profile: Iterable[tuple[str, float]] = ()) -> None:
    """What a run came to."""
    if options.json:
        print(jsonlib.dumps(summary))
    elif not options.quiet:
        _print_summary(summary)
        if shares := list(profile):
            print("\nshares of the time, by phase, then of one round's operations in this process")
            for what, share in shares:
                print(f"{share:7.1%}  {what}")
        print(f"\nkept in {out}")


@with_options
def compare(
    options: Options,
    algorithms: Annotated[
        str, typer.Option(help="Methods, comma-separated, or all.")
    ] = "fedavg,fedreg,fedalign,fedcir",
    seeds: Annotated[str, typer.Option(help="Seeds, comma-separated.")] = "0",
    target: Annotated[float | None, typer.Option(help="Accuracy to reach; by default the baseline's last.")] = None,
) -> None:
    """Train several methods on the same clients, splits and batches, and put them side by side."""
    from dataclasses import asdict

    from fedcir.compare import compare as compare_runs
    from fedcir.records import RunFolder, write
    from fedcir.report import tables
    from fedcir.report.plots import convergence
    from fedcir.tracking import check_tracker
    from fedcir.types import InputError

    check_tracker(options.track)
    if target is not None and not 0 < target < 1:
        raise InputError(f"--target is an accuracy between 0 and 1, got {target}")
    names, numbers = _algorithms(algorithms), _seeds(seeds)
    out = options.out or Path("runs", "compare")
    jobs = {(name, seed): out / f"{Path(name).stem}-{seed}" for seed in numbers for name in names}
    _run_all(options, jobs)
    runs = {Path(name).stem: {seed: RunFolder(jobs[name, seed]) for seed in numbers} for name in names}
    baseline = "fedavg" if "fedavg" in runs else next(iter(runs))
    methods = compare_runs(runs, baseline, target)
    rows = tables.comparison_rows(methods, baseline, len(numbers), target)
    convergence(runs, out / "curves.png")
    write(out / "comparison.md", tables.markdown(rows))
    write(out / "comparison.tex", tables.latex(rows))
    write(out / "comparison.csv", tables.comma_separated(tables.comparison_numbers(methods)))
    write(out / "comparison.json", jsonlib.dumps([asdict(method) for method in methods], indent=1) + "\n")
    if options.json:
        print((out / "comparison.json").read_text(encoding="utf-8"), end="")
    elif not options.quiet:
        print_table(rows, f"test accuracy after the last round (%), {len(numbers)} seed{'s' * (len(numbers) > 1)}")
        print(f"\n{out} holds curves.png, comparison.md, .csv, .tex and .json, and the runs")


def _algorithms(text: str) -> list[str]:
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


def _seeds(text: str) -> list[int]:
    from fedcir.types import InputError

    try:
        return sorted({int(seed) for seed in text.split(",")})
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


def _run_all(options: Options, jobs: "dict[tuple[str, int], Path]") -> None:
    """Do the runs that are not finished yet, several at a time, showing how they go."""
    from dataclasses import replace

    from fedcir.federation import open_federation
    from fedcir.progress import Display, Meter
    from fedcir.records import RunFolder
    from fedcir.sweep import Job, sweep

    workers = (os.cpu_count() or 1) if options.workers is None else options.workers
    options = replace(options, workers=max(1, workers // max(1, len(jobs))))  # of each run
    planned = [Job(options.to_config(name, seed), path) for (name, seed), path in jobs.items()]
    for job in planned:
        _check_fields(job.config.algorithm)
    if not options.resume:
        _refuse_runs([RunFolder(job.out) for job in planned])
    if any(not RunFolder(job.out).finished for job in planned):  # its runs would wait for one of them to prepare it
        with Meter("decoding images", options.quiet) as meter:
            notes = open_federation(planned[0].config, meter.show).notes
        for note in () if options.quiet else notes:
            print(f"note: {note}", file=sys.stderr)
    with Display(options.quiet) as display:
        try:
            for step in sweep(planned, workers, options.resume, options.track):
                if step.event == "begun":
                    display.begin(step.job.out.name, step.job.config.server.rounds)
                elif step.record is not None:
                    display.show(step.job.out.name, step.record)
                for note in step.notes:
                    print_note(f"{step.job.out.name}: {note}")
        except KeyboardInterrupt:
            raise Interrupted("rounds are saved; continue with the same command and --resume") from None


def _check_fields(algorithm: "AlgorithmConfig") -> None:
    """A field that one of several methods lacks is found before any of them starts."""
    from fedcir.algorithms import make_algorithm
    from fedcir.types import InputError

    try:
        make_algorithm(algorithm)
    except InputError as error:
        raise InputError(f"{algorithm.name}: {error}; set one method's by --set algorithms.NAME.FIELD=VALUE") from None


def _refuse_runs(folders: "list[RunFolder]") -> None:
    from fedcir.types import InputError

    for folder in folders:
        if folder.exists:
            raise InputError(f"{folder.path} holds a run already: continue it with --resume, or give another --out")


def _print_summary(summary: dict[str, Any]) -> None:
    final, best = summary["final"], summary["best"]
    domains = list(final["accuracy"])
    rows = [["", *domains, "mean", "weighted", "worst"]]
    for title, each in ((f"last round, {final['round']}", final), (f"best round, {best['round']}", best)):
        values = [*each["accuracy"].values(), each["accuracy_mean"], each["accuracy_weighted"], each["accuracy_worst"]]
        rows.append([title, *(f"{100 * value:.1f}" for value in values)])
    print_table(
        rows,
        f"{summary['algorithm']} on {summary['dataset']}, test accuracy (%); "
        f"best is picked on {best['picked_on']} data",
    )
