"""`fedcir run`, `fedcir compare` and `fedcir reproduce`."""

import json as jsonlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.application import Interrupted
from fedcir.cli.options import FromRound, Options, TrustCode, option, split_names, split_seeds, with_options
from fedcir.cli.output import print_note, print_table
from fedcir.config import DEFAULT_COMPARISON, Config

if TYPE_CHECKING:
    from fedcir.types import RoundRecord

IDS = (
    "table1, table2, table3, fig-clients, fig-convergence, fig-divergence, fig-heterogeneity, fig-local-steps "
    "or fig-risk."
)


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
    from fedcir.cli.progress import Meter
    from fedcir.runs.tracking import check_tracker
    from fedcir.runtime.simulation import open_run

    check_tracker(options.track)
    if options.profile:
        from fedcir.client.cost import Profiler

    config, out = options.to_run(algorithm, seed, trust_code=trust_code)
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
        profiler = Profiler() if options.profile else None
        remaining = session.config.server.rounds - session.state.round
        watched = rounds if profiler is None else profiler.watch(rounds, remaining)
        try:
            follow_rounds(watched, session.config, options, out)
        except KeyboardInterrupt:
            rounds.close()
            continuation = describe_continuation("run", config, out)
            raise Interrupted(f"round {session.state.round} is saved; {continuation}") from None
        summary = session.folder.summary() if session.folder is not None else {}
    print_run(summary, options, out, [] if profiler is None else profiler.rows())


def follow_rounds(
    rounds: Iterable["RoundRecord"], config: Config, options: Options, out: Path, deployed: bool = False
) -> None:
    """Show each round as it ends, and send it to the tracker; of a deployment also rounds without evaluation."""
    from fedcir.cli.progress import Display
    from fedcir.experiments.batch import run_name
    from fedcir.runs.tracking import open_tracker

    name = run_name(config)
    with Display(options.quiet, deployed) as display, open_tracker(options.track, out, print_note) as track:
        display.begin(name, config.server.rounds)
        if not deployed:  # its server creates the run folder later
            track.begin()
        if track.location is not None and not options.quiet:
            print_note(f"tracked in {track.location}")
        for record in rounds:
            track.round(record)
            display.show(name, record)


def describe_continuation(command: str, config: Config, out: Path) -> str:
    from fedcir.runtime.resume import has_custom_code

    trust = " --trust-code" if has_custom_code(config) else ""
    return f"continue with: fedcir {command} --resume{trust} --out {quote(str(out))}"


def print_run(summary: dict[str, Any], options: Options, out: Path, profile: Iterable[tuple[str, float]] = ()) -> None:
    """Print the result of a run."""
    if options.report:
        from fedcir.cli.progress import Watch
        from fedcir.reporting.run_report import try_report

        with Watch(options.quiet) as watch:
            try_report([out], out / "report.html", on_work=watch.work, on_note=watch.note)
    if options.json:
        print(jsonlib.dumps(summary))
    elif not options.quiet:
        from fedcir.runs.reader import describe_saved_model

        _print_summary(summary)
        if shares := list(profile):
            print("\nshare of the time by phase, then by operation in one round of this process")
            for label, share in shares:
                print(f"{share:7.1%}  {label}")
        print(f"\n{describe_saved_model(summary)}")
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
    from fedcir.errors import RunError
    from fedcir.experiments.comparison import compare as compare_methods

    with Watch(options.quiet) as watch:
        comparison = compare_methods(
            algorithms=None if algorithms is None else split_names(algorithms),
            seeds=None if seeds is None else split_seeds(seeds),
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


@with_options
def reproduce(
    options: Options,
    id: Annotated[str, typer.Argument(help=IDS, metavar="ID")],
    scale: Annotated[
        str | None,
        typer.Option(
            help="smoke: a minute; small: hours on 2 cores; paper: the paper's own settings, days. [default: small]"
        ),
    ] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Algorithms, separated by commas, or all. [default: the paper's]")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas. [default: 0,1,2; 0 in sweeps]")] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy to reach, such as 0.9 (table3 only).")] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Show which runs are needed and how long they take, then stop; --json lists them."),
    ] = False,
) -> None:
    """Reproduce a table or figure of the paper. Plans the runs, does those that are missing and writes the result."""
    from fedcir.cli.progress import Watch
    from fedcir.errors import RunError
    from fedcir.experiments.reproduction import plan_reproduction

    keywords = {**options.keywords(), "preview": plan}
    report = keywords.pop("report")
    keywords |= {"algorithms": None if algorithms is None else split_names(algorithms)}
    keywords |= {"seeds": None if seeds is None else split_seeds(seeds)}
    with Watch(options.quiet) as watch:
        planned = plan_reproduction(id, scale=scale, target=target, on_work=watch.work, on_note=watch.note, **keywords)
        if not options.quiet or plan:
            watch.close()
            remaining = len(planned.unfinished)
            done_runs = len(planned.jobs) - remaining
            print(f"{len(planned.jobs)} runs in {planned.out}, {done_runs} of them done", file=sys.stderr)
            if remaining:
                minutes = planned.seconds / 60
                time = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{max(1, round(minutes))} min"
                rest = f"{planned.workers} at a time; you may stop it and resume it"
                print(f"about {time} for the rest, {rest}", file=sys.stderr)
        if plan:
            if options.json:
                print(jsonlib.dumps(planned.write_commands(), indent=1))
            return
        done = planned.run(report, **watch.callbacks())
    if options.json:
        print(jsonlib.dumps({"id": id, "title": done.title, "rows": done.outcome.numbers, "notes": done.outcome.notes}))
    elif not options.quiet:
        print_table(done.outcome.rows, f"{id}: {done.title}")
        for note in done.outcome.notes:
            print(note)
        first = f"{done.page.name}, " if done.page else ""
        print(f"\n{done.out} holds {first}{id}.md, .csv, .tex, .png, .pdf and .svg, and the runs")
    if done.failed:
        raise RunError(done.failed)


def _print_summary(summary: dict[str, Any]) -> None:
    from fedcir.reporting.page import UNSEEN

    final, best = summary["final"], summary["best"]
    if final is None:
        print(f"{summary['algorithm']} on {summary['dataset']}: no round was evaluated")
        return
    unseen = final.get("unseen", [])
    domains = list(final["accuracy"])
    means = {"accuracy_mean": "seen mean" if unseen else "mean", "accuracy_weighted": "weighted"}
    means |= {"accuracy_worst": "worst"} | ({"accuracy_unseen": "unseen mean"} if unseen else {})
    rows = [["", *(f"{name} ({UNSEEN})" if name in unseen else name for name in domains), *means.values()]]
    for title, scores in ((f"last round, {final['round']}", final), (f"best round, {best['round']}", best)):
        values = [*(scores["accuracy"].get(name) for name in domains), *(scores.get(name) for name in means)]
        rows.append([title, *("-" if value is None else f"{100 * value:.1f}" for value in values)])
    print_table(
        rows,
        f"{summary['algorithm']} on {summary['dataset']}, test accuracy (%); "
        f"the best round is picked on {best['picked_on']} data",
    )
