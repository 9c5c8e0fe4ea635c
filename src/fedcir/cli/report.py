"""`fedcir report`: one page of what runs came to."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs, or folders of runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the page.")] = Path("report.html"),
    target: Annotated[float | None, typer.Option(help="Accuracy to reach, such as 0.9; else FedAvg's last.")] = None,
    samples: Annotated[int, typer.Option(help="Test images of each domain to measure distances on; 0 for none.")] = 250,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the dataset now, if it was moved.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Write one page on what runs came to. Accuracies, curves, distances, costs and settings; it opens offline."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.report.write import report as write_report

    with Watch(quiet) as watch:
        page = write_report(runs, out=out, target=target, samples=samples, data_root=data_root, on_work=watch.work)
    for note in page.notes:
        print(f"note: {note}", file=sys.stderr)
    if not quiet:
        print(f"{page.path} is written; open it in a browser")
