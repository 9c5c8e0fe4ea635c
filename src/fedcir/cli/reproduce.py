"""`fedcir reproduce`: the paper's tables and figures, on its data or any other."""

import json as jsonlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fedcir.cli.options import Options, listed, numbers, with_options
from fedcir.cli.tables import print_table

if TYPE_CHECKING:
    from fedcir.insight.reproduction import Plan

IDS = (
    "table1, table2, table3, fig-clients, fig-convergence, fig-divergence, fig-heterogeneity, fig-local-steps "
    "or fig-risk."
)


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
    from fedcir.insight.reproduction import plan as planned
    from fedcir.types import RunError

    asked = {**options.keywords(), "preview": plan}
    report = asked.pop("report")
    asked |= {"algorithms": None if algorithms is None else listed(algorithms)}
    asked |= {"seeds": None if seeds is None else numbers(seeds)}
    with Watch(options.quiet) as watch:
        made = planned(id, scale=scale, target=target, on_work=watch.work, on_note=watch.note, **asked)
        if not options.quiet or plan:
            watch.close()
            _tell(made)
        if plan:
            if options.json:
                print(jsonlib.dumps(made.hand_out(), indent=1))
            return
        done = made.carry_out(report, **watch.callbacks())
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


def _tell(plan: "Plan") -> None:
    left = len(plan.left)
    print(f"{len(plan.jobs)} runs in {plan.out}, {len(plan.jobs) - left} of them done", file=sys.stderr)
    if left:
        minutes = plan.seconds / 60
        about = f"{minutes / 60:.1f} hours" if minutes > 90 else f"{max(1, round(minutes))} min"
        print(f"about {about} for the rest, {plan.workers} at a time; you may stop it and resume it", file=sys.stderr)
