"""`fedcir report`: one page of what runs came to."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.jobs import check_target

if TYPE_CHECKING:
    from fedcir.runs.run import Source


def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs, or folders of runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the page.")] = Path("report.html"),
    target: Annotated[float | None, typer.Option(help="Accuracy to reach, such as 0.9; else FedAvg's last.")] = None,
    samples: Annotated[int, typer.Option(help="Test images of each domain to measure distances on; 0 for none.")] = 250,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the dataset now, if it was moved.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Write one page on what runs came to. Accuracies, curves, distances, costs and settings; it opens offline."""
    from fedcir.runs.run import run_folders
    from fedcir.types import InputError

    check_target(target)
    if samples and samples < 8:
        raise InputError(f"--samples must be at least 8, or 0 for none, got {samples}")
    if out.is_dir():
        raise InputError(f"{out} is a folder: name a file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise InputError(f"--out: no folder {out.parent}")
    root = None if data_root is None else str(data_root)
    folders = list({path.resolve(): path for path in run_folders(runs)}.values())
    for note in write_report(folders, out, quiet, target=target, samples=samples, data_root=root):
        print(f"note: {note}", file=sys.stderr)
    if not quiet:
        print(f"{out} is written; open it in a browser")


def write_report(runs: "Sequence[Source]", path: Path, quiet: bool, **options: Any) -> tuple[str, ...]:
    """The page, showing how far it is. Gives what could not be read or measured."""
    from fedcir.cli.progress import Meter
    from fedcir.insight.report.report import report as make

    with Meter("measuring distances, runs", quiet) as meter:
        return make(runs, path, on_run=meter.show, **options)


def try_report(runs: "Sequence[Source]", path: Path, quiet: bool, **options: Any) -> str:
    """The same where runs are what was asked for and the page comes on top: what is wrong with it is a note.

    Gives the words that name it.
    """
    from fedcir.types import InputError

    try:
        for note in write_report(runs, path, quiet, **options):
            if not quiet:
                print(f"note: {path.name}: {note}", file=sys.stderr)
    except InputError as error:
        if not quiet:
            print(f"note: no {path.name}: {error}", file=sys.stderr)
        return ""
    return path.name
