"""`fedcir run` and `fedcir compare`."""

import json as jsonlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.interrupt import Interrupted
from fedcir.cli.jobs import check_place, check_target, parse_algorithms, parse_seeds, prepare, run_all, tell_failures
from fedcir.cli.options import Options, latest, option, run_name, unused, with_options
from fedcir.cli.report import try_report
from fedcir.cli.tables import print_table

if TYPE_CHECKING:
    from fedcir.config import Config


@with_options
def run(
    options: Options,
    algorithm: Annotated[str | None, option("algorithm")] = None,
    seed: Annotated[int | None, option("seed")] = None,
) -> None:
    """Train one method. Without arguments: FedCiR on an embedded dataset of digits."""
    from fedcir.cli.progress import Display, Meter
    from fedcir.engine.machine import end_with
    from fedcir.engine.simulate import open_run
    from fedcir.runs.sweep import PARENT
    from fedcir.runs.tracking import check_tracker, open_track

    if parent := os.environ.pop(PARENT, None):
        end_with(int(parent), signal.SIGINT)

    check_tracker(options.track)
    if options.profile:
        from fedcir.engine.profiling import Profile

    config, out = options.to_run(algorithm, seed)
    name = run_name(config)
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
                raise Interrupted(
                    f"round {session.state.round} is saved; continue with: fedcir run --resume --out {quote(str(out))}"
                ) from None
        summary = session.folder.summary() if session.folder is not None else {}
    print_run(summary, options, out, [] if watched is None else watched.rows())


def print_note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def print_run(summary: dict[str, Any], options: Options, out: Path, profile: Iterable[tuple[str, float]] = ()) -> None:
    """What a run came to."""
    if options.report:
        try_report([out], out / "report.html", options.quiet)
    if options.json:
        print(jsonlib.dumps(summary))
    elif not options.quiet:
        _print_summary(summary)
        if shares := list(profile):
            print("\nshares of the time, by phase, then of one round's operations in this process")
            for what, share in shares:
                print(f"{share:7.1%}  {what}")
        print(f"\nkept in {out}{', with a report.html to open' if (out / 'report.html').exists() else ''}")


@with_options
def compare(
    options: Options,
    algorithms: Annotated[
        str, typer.Option(help="Methods, separated by commas, or all.")
    ] = "fedavg,fedreg,fedalign,fedcir",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    target: Annotated[float | None, typer.Option(help="Accuracy to reach, such as 0.9; else FedAvg's last.")] = None,
) -> None:
    """Train several methods on the same data and compare them. Clients, splits and batches are the same too."""
    from dataclasses import asdict

    from fedcir.engine.files import write
    from fedcir.insight.report import tables
    from fedcir.insight.report.advice import advice
    from fedcir.insight.report.plots import convergence, draw
    from fedcir.runs.compare import baseline_of
    from fedcir.runs.compare import compare as compare_runs
    from fedcir.runs.run import Run, load_run
    from fedcir.runs.sweep import Job

    check_target(target)
    names, numbers = parse_algorithms(algorithms), parse_seeds(seeds)
    usual = Path("runs", "compare")
    out = options.out or (latest(usual) if options.resume else unused(usual))
    jobs = {(name, seed): out / f"{Path(name).stem}-{seed}" for seed in numbers for name in names}
    planned = [Job(options.asked(algorithm=name, seed=seed).config(), path) for (name, seed), path in jobs.items()]
    check_place(out)
    _check_comparison(out, planned[0].config)
    prepare(planned, options)
    failures = run_all(planned, options)
    runs: dict[str, dict[int, Run]] = {}
    for (name, seed), path in jobs.items():
        if path.name not in failures:
            runs.setdefault(Path(name).stem, {})[seed] = load_run(path)
    if not runs:
        tell_failures(failures, len(jobs))
    baseline = baseline_of(runs)
    methods = compare_runs(runs, baseline, target)
    rows = tables.comparison_rows(methods, baseline, len(numbers), target)
    draw([convergence(runs)], [out / "curves.png"])
    write(out / "comparison.md", tables.markdown(rows))
    write(out / "comparison.tex", tables.latex(rows))
    write(out / "comparison.csv", tables.comma_separated(tables.comparison_numbers(methods)))
    write(out / "comparison.json", jsonlib.dumps([asdict(method) for method in methods], indent=1) + "\n")
    page = ""
    if options.report:
        page = try_report(
            [run for by_seed in runs.values() for run in by_seed.values()],
            out / "report.html",
            options.quiet,
            target=target,
        )
    if options.json:
        print((out / "comparison.json").read_text(encoding="utf-8"), end="")
    elif not options.quiet:
        print_table(rows, f"test accuracy after the last round (%), {len(numbers)} seed{'s' * (len(numbers) > 1)}")
        for sentence in advice(runs, methods, baseline, lambda run: str(run.path)):
            print(sentence)
        first = f"{page}, " if page else ""
        print(f"\n{out} holds {first}curves.png, comparison.md, .csv, .tex and .json, and the runs")
    tell_failures(failures, len(jobs))


def _check_comparison(out: Path, config: "Config") -> None:
    """Refuse to add to runs on other data, whose tables would be written over."""
    from fedcir.config import differing
    from fedcir.engine.folder import RunFolder
    from fedcir.engine.resume import MAY_DIFFER
    from fedcir.types import InputError

    for path in sorted(out.glob("*/config.toml")):
        for key, (old, new) in differing(RunFolder(path.parent).config(), config).items():
            if key.startswith(("data.", "partition.")) and key not in MAY_DIFFER:
                raise InputError(f"{path.parent} was begun with {key}={old}, not {new}: give another --out")


def _print_summary(summary: dict[str, Any]) -> None:
    from fedcir.insight.report.tables import UNSEEN

    final, best = summary["final"], summary["best"]
    if final is None:
        print(f"{summary['algorithm']} on {summary['dataset']}: no round was evaluated")
        return
    unseen = final.get("unseen", [])
    domains = list(final["accuracy"])
    means = {"accuracy_mean": "seen mean" if unseen else "mean", "accuracy_weighted": "weighted"}
    means |= {"accuracy_worst": "worst"} | ({"accuracy_unseen": "unseen mean"} if unseen else {})
    rows = [["", *(f"{name} ({UNSEEN})" if name in unseen else name for name in domains), *means.values()]]
    for title, each in ((f"last round, {final['round']}", final), (f"best round, {best['round']}", best)):
        values = [*(each["accuracy"].get(name) for name in domains), *(each.get(name) for name in means)]
        rows.append([title, *("-" if value is None else f"{100 * value:.1f}" for value in values)])
    print_table(
        rows,
        f"{summary['algorithm']} on {summary['dataset']}, test accuracy (%); "
        f"best is picked on {best['picked_on']} data",
    )
