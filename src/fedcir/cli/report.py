"""`fedcir report`: one page about finished runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedcir.cli.failure import with_options
from fedcir.cli.options import TrustCode


def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs, or folders of runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write the page to.")] = Path("report.html"),
    target: Annotated[
        float | None, typer.Option(help="Accuracy to reach, such as 0.9. [default: FedAvg's last]")
    ] = None,
    samples: Annotated[int, typer.Option(help="Test images per domain to measure distances on; 0 skips them.")] = 250,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the dataset, if it has moved.")] = None,
    trust_code: TrustCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors.")] = False,
) -> None:
    """Write one page about finished runs. Has accuracies, curves, distances, costs and settings; opens offline."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.report.write import report as write_report

    with Watch(quiet) as watch:
        page = write_report(
            runs,
            out=out,
            target=target,
            samples=samples,
            data_root=data_root,
            trust_code=trust_code,
            on_work=watch.work,
        )
    for note in page.notes:
        print(f"note: {with_options(note)}", file=sys.stderr)
    if not quiet:
        print(f"wrote {page.path}: open it in a browser")
