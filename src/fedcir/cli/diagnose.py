"""`fedcir diagnose`: do clients differ, where, and did training close the gap?"""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcir.cli.tables import print_table
from fedcir.options import Options

if TYPE_CHECKING:
    from fedcir.analysis.diagnosis import Diagnosis


def diagnose(
    runs: Annotated[list[Path] | None, typer.Argument(help="One finished run, or two to compare.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Data before any training, by the dataset's name.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the data.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels of a side; 128 by default for image files.")] = None,
    samples: Annotated[int, typer.Option(help="At most so many test images of each domain.")] = 1000,
    projection: Annotated[str, typer.Option(help="Of representations in the picture: pca, tsne or umap.")] = "pca",
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture.")] = Path("diagnosis.png"),
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting; may be repeated.")
    ] = None,
) -> None:
    """Say how far clients are apart: in data before any training, in one run, or in two."""
    from fedcir.analysis.diagnosis import as_json, diagnose_data, diagnose_run, same_data, verdict
    from fedcir.analysis.views import run_folders
    from fedcir.report.plots import PROJECTIONS, diagnosis
    from fedcir.types import InputError

    if runs and (dataset or image_size or set):
        raise InputError("runs know their data and settings: leave --dataset, --image-size and --set out")
    if projection not in PROJECTIONS:
        raise InputError(f"--projection takes {', '.join(PROJECTIONS)}, got {projection!r}")
    if samples < 8:
        raise InputError(f"--samples must be at least 8, got {samples}")
    if runs:
        folders = run_folders(runs)
        if len(folders) > 2:
            raise InputError(f"diagnose takes one run or two, got {len(folders)}: name them")
        same_data(folders)
        found = [diagnose_run(folder, None if data_root is None else str(data_root), samples) for folder in folders]
    else:
        config = Options(dataset=dataset, data_root=data_root, image_size=image_size, set=set).to_config()
        found = [diagnose_data(config, samples)]
    diagnosis(found, out, projection)
    if json:
        print(jsonlib.dumps([as_json(each) for each in found], indent=1))
        return
    for each in found:
        _print(each)
    for sentence in verdict(found[0], *found[1:]):
        print(sentence)
    print(f"\n{out} shows it")


def _print(found: "Diagnosis") -> None:
    names = [view.domain for view in found.views]
    header = ["", *names, "mixture", "label skew"]
    header += ["accuracy", "risk"] if found.bound is not None else ["brightness", "contrast"]
    rows = [header]
    for view in found.views:
        row = [view.domain]
        for name in names:
            pair = found.apart.pairs.get((view.domain, name)) or found.apart.pairs.get((name, view.domain))
            row.append("" if pair is None else f"{pair.value:.2f}")
        row += [f"{found.apart.to_mixture[view.domain].value:.2f}", f"{found.skew[view.domain]:.2f}"]
        if found.pixels is None:
            row += [f"{100 * view.accuracy:.1f}", f"{view.risk:.3f}"]
        else:
            row += [f"{found.pixels[view.domain].brightness:.2f}", f"{found.pixels[view.domain].contrast:.2f}"]
        rows.append(row)
    print_table(rows, f"{found.name}: proxy A-distance of clients, 0 to 2")
    if found.aligned is not None:
        kls = ", ".join(f"{name} {value:.0f}" for name, value in found.aligned.clients.items())
        print(f"KL to q(z|y): {kls}; of the true class Gaussians to the generator's: {found.aligned.generator:.0f}")
    mistaken = found.mistaken()
    if found.bound is not None and mistaken:
        print(f"most mistaken: {', '.join(mistaken)}")
    print()
