"""`fedcir recommend`: which algorithm, normalisation and settings to use on some data."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcir.cli.options import Assignments, numbers, option
from fedcir.cli.tables import print_table

if TYPE_CHECKING:
    from fedcir.insight.recommend import Trial
    from fedcir.runs.compare import Estimate


def recommend(
    config: Annotated[Path | None, typer.Argument(help="A TOML file of settings.")] = None,
    dataset: Annotated[str | None, option("dataset")] = None,
    data_root: Annotated[Path | None, option("data_root")] = None,
    image_size: Annotated[int | None, option("image_size")] = None,
    model: Annotated[str | None, option("model")] = None,
    clients: Annotated[int | None, option("clients")] = None,
    active: Annotated[int | None, option("active")] = None,
    beta: Annotated[float | None, option("beta")] = None,
    workers: Annotated[int | None, option("workers")] = None,
    pilot_rounds: Annotated[int, typer.Option(help="Rounds to try each candidate for.")] = 20,
    seeds: Annotated[str, typer.Option(help="Seeds to try each candidate with, at least two.")] = "0,1,2",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the settings, such as fedcir.toml.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    set: Assignments = None,
) -> None:
    """Find out what to run on your data. Tries each candidate for a few rounds and never looks at a test image."""
    from fedcir.cli.progress import Watch
    from fedcir.insight.recommend import recommend as find
    from fedcir.runs.intervals import COVERS
    from fedcir.types import InputError

    if out is not None and out.exists():
        raise InputError(f"{out} exists: name a new file")
    with Watch(quiet) as watch:
        found = find(
            pilot_rounds=pilot_rounds,
            seeds=numbers(seeds),
            config=config,
            set=set or (),
            on_work=watch.work,
            on_note=watch.note,
            dataset=dataset,
            data_root=data_root,
            image_size=image_size,
            model=model,
            clients=clients,
            active=active,
            beta=beta,
            workers=workers,
        )
    if out is not None:
        found.save(out)
    if json:
        rows = {"candidates": found.to_rows(), "findings": list(found.findings), "reason": found.reason}
        print(jsonlib.dumps({**rows, "settings": found.tables}, indent=1, ensure_ascii=False))
        return
    for sentence in found.findings:
        print(sentence)
    print()
    first = found.trials[0].candidate.name
    header = ["candidate", "what it is", "mean", "worst", f"difference to {first} ({COVERS})"]
    title = f"accuracy on validation images (%), rounds: {pilot_rounds}, seeds: {len(found.seeds)}"
    print_table([header, *(_row(trial) for trial in found.trials)], title)
    print(found.reason)
    if out is None:
        print("Write these settings to a file with `--out fedcir.toml`.")
    else:
        print(f"{out} holds these settings. Next: `fedcir run {out}`.")


def _row(trial: "Trial") -> list[str]:
    difference = ""
    if trial.difference is not None and trial.half_width is not None:
        difference = f"{100 * trial.difference.mean:+.1f} ± {100 * trial.half_width:.1f}"
    candidate = trial.candidate
    return [candidate.name, candidate.about, _percent(trial.mean), _percent(trial.worst), difference]


def _percent(estimate: "Estimate") -> str:
    return f"{100 * estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {100 * estimate.std:.1f}")
