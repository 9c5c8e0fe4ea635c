"""`fedcir reproduce`: the paper's tables and figures, on its data or any other."""

import json as jsonlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.jobs import (
    check_place,
    check_target,
    cores,
    parse_algorithms,
    parse_seeds,
    prepare,
    run_all,
    tell_failures,
)
from fedcir.cli.options import Options, latest, unused, with_options
from fedcir.cli.tables import print_table

if TYPE_CHECKING:
    from fedcir.config import Config
    from fedcir.data.federation import Federation
    from fedcir.insight.experiments.experiment import Case, Outcome
    from fedcir.runs.sweep import Job

IDS = (
    "table1, table2, table3, fig-clients, fig-convergence, fig-divergence, fig-heterogeneity, fig-local-steps "
    "or fig-risk."
)


@with_options
def reproduce(
    options: Options,
    id: Annotated[str, typer.Argument(help=IDS, metavar="ID")],
    scale: Annotated[
        str, typer.Option(help="smoke: a minute; small: hours on 2 cores; paper: the paper's own settings, days.")
    ] = "small",
    algorithms: Annotated[
        str | None, typer.Option(help="Methods, separated by commas, or all; else the paper's.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas; else 0,1,2, in sweeps 0.")] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy to reach, such as 0.9 (table3 only).")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say which runs it takes and how long, and stop.")] = False,
) -> None:
    """Make a table or figure of the paper. Plans its runs, does those that are left and writes what came out."""
    from fedcir.cli.progress import Meter
    from fedcir.config import nearest
    from fedcir.insight.experiments import experiment
    from fedcir.insight.experiments.experiment import SCALES, Results
    from fedcir.insight.experiments.plan import cases
    from fedcir.insight.report.report import reproduction
    from fedcir.runs.run import load_run
    from fedcir.runs.sweep import Job
    from fedcir.types import InputError

    made = experiment(id)
    if scale not in SCALES:
        raise InputError(f"no scale {scale!r}; {nearest(scale, SCALES)}")
    check_target(target)
    if target is not None and id != "table3":
        raise InputError(f"--target is for table3, not for {id}: leave it out")
    chosen = None if algorithms is None else parse_algorithms(algorithms)
    numbers = None if seeds is None else parse_seeds(seeds)
    given = options.asked().tables()
    roots = _datasets(given.get("data", {}), scale, made.datasets)
    planned = cases(made, scale, list(roots), chosen, numbers, given)
    usual = Path("runs", f"{id}-{scale}")
    out = options.out or (latest(usual) if options.resume or plan else unused(usual))
    check_place(out)
    jobs = {case.name: Job(_config(options, case, scale, roots), out / case.name) for case in planned}
    if len(jobs) < len(planned):
        raise InputError("two of its runs would have one name: leave one of the methods out")
    opened = prepare(list(jobs.values()), replace(options, resume=options.resume or plan))
    if not options.quiet or plan:
        _tell_plan(list(jobs.values()), opened, cores(options), out)
    if plan:
        return
    failures = run_all(list(jobs.values()), options)
    runs = {name: load_run(job.out) for name, job in jobs.items() if name not in failures}
    if not runs:
        raise InputError(f"all runs of {id} failed, the first with: {next(iter(failures.values()))}")
    results = Results(planned, runs, target)
    outcome = made.outcome(results)
    _write(id, made.title, outcome, out)
    if options.report:
        with Meter("measuring distances, runs", options.quiet) as meter:
            notes = reproduction(id, made.title, outcome, results, out / "report.html", meter.show)
        for note in () if options.quiet else notes:
            print(f"note: report.html: {note}", file=sys.stderr)
    if options.json:
        print(jsonlib.dumps({"id": id, "title": made.title, "rows": outcome.numbers, "notes": outcome.notes}))
    elif not options.quiet:
        print_table(outcome.rows, f"{id}: {made.title}")
        for note in outcome.notes:
            print(note)
        first = "report.html, " if options.report else ""
        print(f"\n{out} holds {first}{id}.md, .csv, .tex, .png, .pdf and .svg, and the runs")
    tell_failures(failures, len(jobs))


def _datasets(given: "Mapping[str, Any]", scale: str, papers: tuple[str, ...]) -> "Mapping[str, str | None]":
    """The datasets by name and where each lies: those asked for, at smoke scale the embedded one, or the paper's."""
    from fedcir.insight.experiments.plan import locate
    from fedcir.types import InputError

    asked = [name.strip() for name in given.get("name", "").split(",") if name.strip()]
    root = given.get("root")
    if not asked and scale == "smoke" and root is None:
        return {"minidigits": None}
    if len(asked) == 1:
        return {asked[0]: root}
    if root is None:
        names = ", ".join(asked or papers)
        raise InputError(f"--data-root DIR is missing: a folder that holds {names}; or name one dataset with --dataset")
    found = locate(asked or papers, Path(root))
    if missing := [name for name in asked or papers if name not in found]:
        if asked:
            raise InputError(f"{root} holds no folder for {missing[0]}")
        print(f"note: left out, as not in {root}: {', '.join(missing)}", file=sys.stderr)
    return {name: str(path) for name, path in found.items()}


def _config(options: Options, case: "Case", scale: str, roots: "Mapping[str, str | None]") -> "Config":
    from fedcir.config import merged
    from fedcir.config.presets import names
    from fedcir.data.sources import SOURCES
    from fedcir.insight.experiments.experiment import SCALES

    preset = options.preset or (case.dataset if case.dataset in names() else None)
    root = roots[case.dataset]
    own = {"dataset": case.dataset, "data_root": root, "algorithm": case.algorithm, "seed": case.seed}
    base = {section: dict(values) for section, values in SCALES[scale].items()}
    if case.dataset in SOURCES and SOURCES[case.dataset].arrays is not None:  # they have a size of their own
        base.get("data", {}).pop("image_size", None)
    return replace(options, preset=preset).asked(**own).config(merged(base, case.point.settings))


def _tell_plan(jobs: "list[Job]", opened: "Mapping[str, Federation]", workers: int, out: Path) -> None:
    from fedcir.insight.experiments.plan import estimate

    left = [job for job in jobs if not job.done]
    print(f"{len(jobs)} runs in {out}, {len(jobs) - len(left)} of them done", file=sys.stderr)
    if left:
        minutes = estimate(left, opened, workers) / 60
        about = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{max(1, round(minutes))} min"
        print(f"about {about} for the rest, {workers} at a time; it may be stopped and resumed", file=sys.stderr)


def _write(id: str, title: str, outcome: "Outcome", out: Path) -> None:
    from fedcir.engine.files import write
    from fedcir.insight.report import tables
    from fedcir.insight.report.plots import draw

    notes = "".join(f"\n{note}\n" for note in outcome.notes)
    write(out / f"{id}.md", f"{title[0].upper()}{title[1:]}.\n\n{tables.markdown(outcome.rows)}{notes}")
    write(out / f"{id}.tex", tables.latex(outcome.rows))
    write(out / f"{id}.csv", tables.comma_separated(outcome.numbers))
    draw(outcome.panels, [out / f"{id}.{end}" for end in ("png", "pdf", "svg")])
