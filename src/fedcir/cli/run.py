"""`fedcir run`, `fedcir compare` and `fedcir reproduce`."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fedcir.cli import options as cli
from fedcir.cli.application import Interrupted, print_note, print_table
from fedcir.cli.options import Options, argument, flag, option, split_names, split_seeds, take_options
from fedcir.config import DEFAULT_COMPARISON, Config
from fedcir.errors import RunError

if TYPE_CHECKING:
    from fedcir.experiments.comparison import Comparison
    from fedcir.experiments.reproduction import Reproduction
    from fedcir.types import RoundRecord

IDS = (
    "table1, table2, table3, fig-clients, fig-convergence, fig-divergence, fig-heterogeneity, fig-local-steps "
    "or fig-risk."
)
METHODS = (
    f"Algorithms, separated by commas, or all. [default: {','.join(DEFAULT_COMPARISON)}; "
    "fedavg,NAME,centralized if a file names the algorithm NAME]"
)
SCALES = "smoke: a minute; small: hours on 2 cores; paper: the paper's own settings, days. [default: small]"


@take_options()
def run(
    algorithm: str | None = cli.ALGORITHM,
    seed: int | None = cli.SEED,
    from_round: int | None = cli.FROM_ROUND,
    trust_code: bool = cli.TRUST_CODE,
    *,
    options: Options,
) -> None:
    """Train one algorithm. Without arguments, trains FedCiRPlus on an embedded dataset of digits."""
    if options.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler logs to the terminal; read as torch loads
    from fedcir.cli.progress import Meter
    from fedcir.client.cost import Profiler
    from fedcir.runtime.simulation import open_run

    config, out = options.to_run(algorithm, seed, trust_code=trust_code)
    profiler = Profiler() if options.profile else None
    with (
        Meter("preparing images", options.quiet) as meter,
        open_run(config, out, options.resume, meter.show, from_round) as (session, rounds),
    ):
        meter.close()
        if not options.quiet:
            for note in session.notes:
                print_note(note)
            if session.finished:
                print(f"{out} is already finished, after round {session.state.round}", file=sys.stderr)
        remaining = session.config.server.rounds - session.state.round
        watched = rounds if profiler is None else profiler.watch(rounds, remaining)
        try:
            follow_rounds(watched, session.config, options, out)
        except KeyboardInterrupt:
            rounds.close()
            continuation = describe_continuation("run", config, out)
            raise Interrupted(f"round {session.state.round} is saved; {continuation}") from None
        summary = session.folder.summary() if session.folder is not None else {}
        if session.finished and session.state.round < session.config.server.rounds and not options.quiet:
            tests = f"{session.config.server.patience} tests"
            metric = session.roster.builder.task.primary.title
            print_note(f"ended after round {session.state.round}: no better validation {metric} in {tests}")
    print_run(summary, options, out, [] if profiler is None else profiler.rows())


def follow_rounds(
    rounds: Iterable["RoundRecord"], config: Config, options: Options, out: Path, deployed: bool = False
) -> None:
    """Show each round as it ends, and send it to the tracker. A deployment also shows rounds without evaluation."""
    from fedcir.cli.progress import Display
    from fedcir.experiments.batch import run_name
    from fedcir.runs.tracking import open_tracker

    name = run_name(config)
    with Display(options.quiet, deployed) as display, open_tracker(options.track, out, print_note) as track:
        display.begin(name, config.server.rounds)
        if not deployed:  # its server creates the run folder later
            track.update()
        if track.location is not None and not options.quiet:
            print_note(f"tracked in {track.location}")
        for record in rounds:
            track.update()
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
        print(json.dumps(summary))
    elif not options.quiet:
        from fedcir.runs.reader import describe_saved_model

        _print_summary(summary)
        if shares := list(profile):
            print("\nshare of the time by phase, then by operation in one round of this process")
            for label, share in shares:
                print(f"{share:7.1%}  {label}")
        print(f"\n{describe_saved_model(summary)}")
        print(f"saved in {out}{', with a report.html to open' if (out / 'report.html').exists() else ''}")


@take_options()
def compare(
    algorithms: str | None = option(METHODS),
    seeds: str | None = option("Seeds, separated by commas. [default: 0]"),
    target: float | None = cli.TARGET,
    *,
    options: Options,
) -> None:
    """Train several algorithms on the same data and compare them. Clients, splits and batches are the same too."""
    from fedcir.cli.progress import Watch
    from fedcir.experiments.comparison import compare as compare_methods

    with Watch(options.quiet) as watch:
        keywords = {**options.keywords("report", "track"), **watch.callbacks()}
        comparison = compare_methods(
            algorithms=split_names(algorithms), seeds=split_seeds(seeds), target=target, **keywords
        )
    count = len(comparison.seeds)
    metric = comparison.methods[0].metric
    title = (
        f"test {metric.title} after the last round{' (%)' if metric.is_share else ''}, {count} seed{'s' * (count > 1)}"
    )
    if options.json:
        print((comparison.out / "comparison.json").read_text(encoding="utf-8"), end="")
    files = "curves.png, comparison.md, .csv, .tex and .json"
    _print_batch(comparison, options, title, comparison.table(), comparison.advice(), files)


@take_options()
def reproduce(
    id: str = argument(IDS, metavar="ID"),
    scale: str | None = option(SCALES),
    algorithms: str | None = option("Algorithms, separated by commas, or all. [default: the paper's]"),
    seeds: str | None = option("Seeds, separated by commas. [default: 0,1,2; 0 in sweeps]"),
    target: float | None = option("Accuracy to reach, such as 0.9 (table3 only)."),
    plan: bool = flag("--plan", "Show which runs are needed and how long they take, then stop; --json lists them."),
    *,
    options: Options,
) -> None:
    """Reproduce a table or figure of the paper. Plans the runs, does those that are missing and writes the result."""
    from fedcir.cli.progress import Watch
    from fedcir.experiments.reproduction import plan_reproduction

    methods, seed_numbers = split_names(algorithms), split_seeds(seeds)
    keywords: dict[str, Any] = {**options.keywords("track"), "scale": scale, "target": target, "preview": plan}
    with Watch(options.quiet) as watch:
        keywords |= {"on_work": watch.work, "on_note": watch.note}
        planned = plan_reproduction(id, algorithms=methods, seeds=seed_numbers, **keywords)
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
                print(json.dumps(planned.write_commands(), indent=1))
            return
        done = planned.run(options.report, **watch.callbacks())
    outcome = done.outcome
    if options.json:
        print(json.dumps({"id": id, "title": done.title, "rows": outcome.numbers, "notes": outcome.notes}))
    files = f"{id}.md, .csv, .tex, .png, .pdf and .svg"
    _print_batch(done, options, f"{id}: {done.title}", outcome.rows, outcome.notes, files)


def _print_batch(
    batch: "Comparison | Reproduction",
    options: Options,
    title: str,
    rows: list[list[str]],
    notes: Iterable[str],
    files: str,
) -> None:
    """Print the table of several runs, and fail if some of them did."""
    if not options.json and not options.quiet:
        print_table(rows, title)
        for note in notes:
            print(note)
        page = f"{batch.page.name}, " if batch.page else ""
        print(f"\n{batch.out} holds {page}{files}, and the runs")
    if batch.failed:
        raise RunError(batch.failed)


def _print_summary(summary: dict[str, Any]) -> None:
    from fedcir.reporting.methods import mark_unseen
    from fedcir.runtime.file_formats import read_metric

    metric = read_metric(summary)
    final, best = summary["final"], summary["best"]
    about = f"{summary['algorithm']} on {summary['dataset']}"
    if final is None:
        print(f"{about}: no round was evaluated")
        return
    unseen = final.get("unseen", [])
    final, best = metric.to_fields(final), metric.to_fields(best)
    means = {"score_mean": "seen mean" if unseen else "mean", "score_weighted": "weighted"}
    means |= {"score_worst": "worst"} | ({"score_unseen": "unseen mean"} if unseen else {})
    rows = [["", *(mark_unseen(name, name in unseen) for name in final["scores"]), *means.values()]]
    for title, scores in ((f"last round, {final['round']}", final), (f"best round, {best['round']}", best)):
        values = [*(scores["scores"].get(name) for name in final["scores"]), *(scores.get(name) for name in means)]
        rows.append([title, *(metric.format(value) or "-" for value in values)])
    print_table(rows, f"{about}, test {metric.label}; the best round is picked on {best['picked_on']} data")
