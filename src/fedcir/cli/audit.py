"""`fedcir audit`: what a run gives away."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from fedcir.cli.options import TrustCode
from fedcir.cli.predict import RunArgument
from fedcir.cli.tables import print_table


def audit(
    run: RunArgument,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the run's data, if it has moved.")] = None,
    samples: Annotated[int, typer.Option(help="Training images per domain to test for membership.")] = 1000,
    images: Annotated[int, typer.Option(help="Images of the batch to reconstruct.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of the reconstruction; 0 leaves it out.")] = 300,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for page, picture and numbers. [default: RUN/audit]")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors and what --json asks for.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Attack a run to see what it gives away. Tests for membership, reconstructs an image, lists what left clients."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.audit import LIMITS, audit_findings, inverted_rows, membership_rows, sent_rows
    from fedcir.insight.audit import audit as find

    with Watch(quiet) as watch:
        made = find(
            run,
            data_root=data_root,
            samples=samples,
            images=images,
            steps=steps,
            out=out or run / "audit",
            trust_code=trust_code,
            on_work=watch.work,
        )
    found = made.audit
    if json:
        print(jsonlib.dumps(found.to_json(), indent=1, ensure_ascii=False))
    elif not quiet:
        print_table(membership_rows(found), f"{found.name}: telling training images from test images by their loss")
        if found.inverted:
            print_table(inverted_rows(found), "images from the gradient of one step")
        if found.sent:
            print_table(sent_rows(found), "what left each client")
        for each in audit_findings(found):
            print(each)
        print("\nWhat this does not prove:")
        for each in LIMITS:
            print(f"- {each}")
        files = [str(file) for file in (made.page, made.picture, made.numbers) if file is not None]
        print(f"\nwrote {', '.join(files)}")
