"""`fedcir export`: the model of a run as one file for other programs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcir.cli.options import TrustCode
from fedcir.cli.predict import OwnAlgorithm, RunArgument, SiteOption


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write, such as model.onnx.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="onnx, torch (a torch.export program, .pt2) or safetensors; by default as the file is called."
        ),
    ] = None,
    site: SiteOption = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the run's data, if it has moved.")] = None,
    algorithm: OwnAlgorithm = None,
    trust_code: TrustCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors.")] = False,
) -> None:
    """Write the model of a run to a file. Checks it against the run first, and writes a MODEL_CARD.md beside it."""
    from fedcir.use.export import export as write

    kind: Any = format
    made = write(run, out, format=kind, site=site, algorithm=algorithm, data_root=data_root, trust_code=trust_code)
    if quiet:
        return
    images = f"{made.images} test images of the run" if made.real else f"{made.images} random images"
    print(f"checked on {images}: probabilities differ by at most {made.difference:.1g}")
    if not made.real:
        print("note: the run's data could not be opened; name their folder with --data-root to check on real images")
    if made.note:
        print(f"note: {made.note}")
    print(f"wrote {made.path} and {made.card}" if made.new_card else f"wrote {made.path}")
    if not made.new_card:
        print(f"note: {made.card} was there already and is kept; delete it to get a new one")
