"""`fedcir run` and `fedcir compare`."""

import json as jsonlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from fedcir.cli.interrupt import Interrupted
from fedcir.cli.options import FromRound, Options, TrustCode, listed, numbers, option, with_options
from fedcir.cli.tables import print_table
from fedcir.config import DEFAULT_COMPARISON


@with_options
def run(
    options: Options,
    algorithm: Annotated[str | None, option("algorithm")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    from_round: FromRound = None,
    trust_code: TrustCode = False,
) -> None:
    """Train one algorithm. Without arguments, trains FedCiRPlus on an embedded dataset of digits."""
    if options.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler logs to the terminal; read as torch loads
    from fedcir.cli.progress import Display, Meter
    from fedcir.engine.machine import end_with
    from fedcir.engine.simulate import open_run
    from fedcir.engine.trust import names_code
    from fedcir.runs.nursery import PARENT
    from fedcir.runs.places import run_name
    from fedcir.runs.tracking import check_tracker, open_track

    if parent := os.environ.pop(PARENT, None):
        end_with(int(parent), signal.SIGINT)

    check_tracker(options.track)
    if options.profile:
        from fedcir.engine.profiling import Profile

    config, out = options.to_run(algorithm, seed, trust_code=trust_code)
    name = run_name(config)
    with (
        Meter("preparing images", options.quiet) as meter,
        open_run(config, out, options.resume, meter.show, from_round) as (session, rounds),
    ):
        meter.close()
        if not options.quiet:
            for note in session.notes:
                print(f"note: {note}", file=sys.stderr)
            if session.finished:
                print(f"{out} is already finished, after round {session.state.round}", file=sys.stderr)
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
                trust = " --trust-code" if names_code(config) else ""
                raise Interrupted(
                    f"round {session.state.round} is saved; "
                    f"continue with: fedcir run --resume{trust} --out {quote(str(out))}"
                ) from None
        summary = session.folder.summary() if session.folder is not None else {}
    print_run(summary, options, out, [] if watched is None else watched.rows())


def print_note(note: str) -> None:
    from fedcir.runs.events import tell

    if not tell("note", note):
        print(f"note: {note}", file=sys.stderr)


def print_run(summary: dict[str, Any], options: Options, out: Path, profile: Iterable[tuple[str, float]] = ()) -> None:
    """Print the result of a run."""
    if options.report:
        from fedcir.cli.progress import Watch
        from fedcir.insight.report.write import add_report

        with Watch(options.quiet) as watch:
            add_report([out], out / "report.html", on_work=watch.work, on_note=watch.note)
    if options.json:
        print(jsonlib.dumps(summary))
    elif not options.quiet:
        from fedcir.runs.run import describe_saved

        _print_summary(summary)
        if shares := list(profile):
            print("\nshare of the time by phase, then by operation in one round of this process")
            for what, share in shares:
                print(f"{share:7.1%}  {what}")
        print(f"\n{describe_saved(summary)}")
        print(f"saved in {out}{', with a report.html to open' if (out / 'report.html').exists() else ''}")


@with_options
def compare(
    options: Options,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help=f"Algorithms, separated by commas, or all. [default: {','.join(DEFAULT_COMPARISON)}; "
            "fedavg,NAME,centralized if a file names the algorithm NAME]"
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas. [default: 0]")] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy to reach, such as 0.9. [default: FedAvg's last]")
    ] = None,
) -> None:
    """Train several algorithms on the same data and compare them. Clients, splits and batches are the same too."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.comparison import compare as compare_methods
    from fedcir.types import RunError

    with Watch(options.quiet) as watch:
        comparison = compare_methods(
            algorithms=None if algorithms is None else listed(algorithms),
            seeds=None if seeds is None else numbers(seeds),
            target=target,
            **options.keywords(),
            **watch.callbacks(),
        )
    out = comparison.out
    if options.json:
        print((out / "comparison.json").read_text(encoding="utf-8"), end="")
    elif not options.quiet:
        count = len(comparison.seeds)
        print_table(comparison.table(), f"test accuracy after the last round (%), {count} seed{'s' * (count > 1)}")
        for sentence in comparison.advice():
            print(sentence)
        first = f"{comparison.page.name}, " if comparison.page else ""
        print(f"\n{out} holds {first}curves.png, comparison.md, .csv, .tex and .json, and the runs")
    if comparison.failed:
        raise RunError(comparison.failed)


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
        f"the best round is picked on {best['picked_on']} data",
    )
