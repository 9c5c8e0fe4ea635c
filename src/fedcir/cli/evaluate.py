"""`fedcir evaluate`: what the model of a run is worth, on its own test images or on any others."""

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcir.cli.options import Assignments, TrustCode
from fedcir.cli.predict import OwnAlgorithm, RunArgument, SiteOption
from fedcir.cli.tables import print_table


def evaluate(
    run: RunArgument,
    dataset: Annotated[str | None, typer.Option(help="Dataset to test on. [default: the run's own]")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds it.")] = None,
    split: Annotated[
        str, typer.Option(help="test, val, train, or all images; test and all leave out what the run has seen.")
    ] = "test",
    adapt: Annotated[
        bool, typer.Option("--adapt", help="First take BatchNorm statistics from the images, without labels.")
    ] = False,
    site: SiteOption = None,
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or mps.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the page and the numbers. [default: RUN/evaluation]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors and what --json asks for.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    algorithm: OwnAlgorithm = None,
    trust_code: TrustCode = False,
    set: Assignments = None,
) -> None:
    """Test the model of a run on any labelled images. Shows accuracy, calibration and mistakes; writes a page."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.evaluation import evaluate as find
    from fedcir.insight.evaluation import findings, rows_by_domain

    which: Any = split
    with Watch(quiet) as watch:
        made = find(
            run,
            dataset=dataset,
            data_root=data_root,
            split=which,
            adapt=adapt,
            site=site,
            algorithm=algorithm,
            device=device,
            out=out or run / "evaluation",
            set=set or (),
            trust_code=trust_code,
            on_work=watch.work,
        )
    found = made.evaluation
    if not quiet:
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)
    if json:
        print(jsonlib.dumps(found.to_json(), indent=1, ensure_ascii=False))
    elif not quiet:
        print_table(rows_by_domain(found), f"{found.name} on {found.dataset} ({found.split}), accuracy in per cent")
        for each in findings(found):
            print(each)
        print(f"\nwrote {made.page} and {made.numbers}")
