"""`fedcir predict` and `fedcir export`: the model of a run in use."""

import csv
import io
import itertools
import json as jsonlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedcir.cli import options as cli
from fedcir.cli.application import get_raw_stream
from fedcir.cli.options import argument, flag, option, output
from fedcir.errors import InputError
from fedcir.files import check_output_folder, write_file
from fedcir.text import escape_cell, escape_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedcir.inference.predictor import Answer

    Answers = Iterable[tuple[str, Any]]
    """Names with a prediction, or with the error as text."""

UNREADABLE = 2
"""The exit code if some files could not be read."""


def predict(
    run: Path = cli.RUN,
    paths: list[str] = argument(
        "Images, tables (.csv) or arrays (.npy), folders of them, or - for a list on standard input."
    ),
    json: bool = flag("--json", "Print as JSON."),
    csv: bool = flag("--csv", "Print as CSV."),
    top: int = option("How many classes to list for each image.", 3),
    masks: Path | None = option("Folder to write the masks of segmentation to, as .png."),
    site: str | None = cli.SITE,
    site_images: Path | None = option(
        "Folder of unlabelled images of a new site, to which the model is adapted first."
    ),
    force: bool = cli.FORCE_SITE,
    device: str = cli.DEVICE,
    algorithm: str | None = cli.OWN_ALGORITHM,
    trust_code: bool = cli.TRUST_CODE,
) -> None:
    """Predict with the model of a run. Names and skips images that cannot be read; exits with 2 then.

    Check images with a `novelty` of 0.9 or more by eye: they may show something that the model does not know. Rows of a
    table and examples of an array are named by file and number, as in new.csv:2.
    """
    from fedcir.inference.model import UNCALIBRATED
    from fedcir.inference.predictor import UNFAMILIAR, Prediction, Predictor, TaskPrediction, files_in

    if json and csv:
        raise InputError("--json and --csv exclude each other: choose one")
    predictor = Predictor(
        run,
        site=site,
        algorithm=algorithm,
        device=device,
        top=top,
        trust_code=trust_code,
        site_images=None if site_images is None else [site_images],
        force=force,
    )
    named = files_in((path for path in paths if path != "-"), predictor.endings)
    listed = (line for line in map(str.strip, sys.stdin) if line) if "-" in paths else ()
    files = itertools.chain(named, listed)
    trained = predictor.trained
    task = trained.task
    if masks is not None:
        if not task.uses_maps:
            raise InputError(f"masks={masks} is for segmentation, and the task of {run} is {task.name}: leave it out")
        check_output_folder(masks)
        masks.mkdir(parents=True, exist_ok=True)
    if not predictor.calibrated and task.has_classes:
        print(f"note: {UNCALIBRATED}", file=sys.stderr)
    if predictor.estimate is not None:
        images = f"{predictor.estimate.images:,} images of {site_images}"
        print(f"note: adapted to {images}; expect {predictor.estimate.text}", file=sys.stderr)
    unread = read = unfamiliar = 0

    def count_answers() -> "Iterator[tuple[str, Any]]":
        nonlocal unread, read, unfamiliar
        for path, answer in predictor.files(files):
            if isinstance(answer, str):
                unread += 1
                print(f"fedcir: cannot read {escape_line(path)}: {answer}", file=sys.stderr)
            else:
                read += 1
                unfamiliar += isinstance(answer, Prediction) and answer.novelty >= UNFAMILIAR
                if masks is not None and isinstance(answer, TaskPrediction) and answer.mask is not None:
                    _save_mask(answer.mask, masks / f"{Path(path).stem}.png")
            yield path, answer

    names = task.predicted_names
    if json:
        _print_json(count_answers())
    elif csv:
        _print_csv(count_answers(), _list_columns(min(top, len(names))) if task.has_classes else names)
    elif task.has_classes:
        _print_table(count_answers(), names, min(top, len(names)))
    else:
        _print_values(count_answers(), names)
    if unfamiliar and predictor.calibrated:
        count = f"{unfamiliar} of {read} {trained.noun} have a `novelty` of {UNFAMILIAR} or more"
        print(f"note: {count}; check them by eye (known {trained.noun}: about 1 in 10)", file=sys.stderr)
    if unread:
        raise typer.Exit(UNREADABLE)


def _save_mask(mask: "NDArray[np.uint8]", path: Path) -> None:
    """Write the class number of each pixel, as in the masks of the dataset masks."""
    from PIL import Image

    if path.exists():
        raise InputError(f"{path} exists: name an empty folder, and images of one folder at a time")
    buffer = io.BytesIO()
    Image.fromarray(mask).save(buffer, "PNG")
    write_file(path, buffer.getvalue())


def _print_json(answers: "Answers") -> None:
    """Print a JSON list that grows as files are read; after Ctrl-C it is closed too, so that it can be parsed."""
    from fedcir.inference.predictor import TaskPrediction

    before = "["
    try:
        for path, answer in answers:
            values: dict[str, Any] = {"path": path, "error": answer}
            if isinstance(answer, TaskPrediction):
                values = {"path": path, "prediction": dict(answer.values)}
            elif not isinstance(answer, str):
                novelty = {"novelty": answer.novelty, "unlike": answer.novelty}  # the former name, for one version
                values = {"path": path, "class": answer.label, "probability": answer.probability, **novelty}
                values["top"] = [list(pair) for pair in answer.top]
            print(before, jsonlib.dumps(values, ensure_ascii=False), sep="\n", end="", flush=True)
            before = ","
    finally:
        print("[]" if before == "[" else "\n]", flush=True)


def _list_columns(top: int) -> list[str]:
    """Names of the columns of a table of classes."""
    columns = [f"{column}_{rank}" for rank in range(2, top + 1) for column in ("class", "probability")]
    return ["class", "probability", "novelty", *columns]


def _print_csv(answers: "Answers", columns: Sequence[str]) -> None:
    out = csv.writer(sys.stdout if sys.stdout.isatty() else get_raw_stream(sys.stdout), lineterminator="\n")
    out.writerow(["path", *map(escape_cell, columns), "error"])
    for path, answer in answers:
        cells = [""] * len(columns) if isinstance(answer, str) else _list_cells(answer)
        out.writerow([escape_cell(path), *cells, escape_cell(answer) if isinstance(answer, str) else ""])
        sys.stdout.flush()


def _list_cells(answer: "Answer") -> list[str]:
    from fedcir.inference.predictor import TaskPrediction

    if isinstance(answer, TaskPrediction):
        return [f"{value:.6g}" for value in answer.values.values()]
    runners_up = [cell for label, share in answer.top[1:] for cell in (escape_cell(label), f"{share:.6g}")]
    return [escape_cell(answer.label), f"{answer.probability:.6g}", f"{answer.novelty:.6g}", *runners_up]


def _print_table(answers: "Answers", classes: Sequence[str], top: int) -> None:
    """Print a line for each image or row, its name last, because names have any length."""
    longest = sorted(map(len, classes), reverse=True)
    runners_up = sum(length + len(" 10.0%, ") for length in longest[: top - 1]) - len(", ")
    widths = [max(longest[0], len("class")), 6, 7, *([runners_up] if top > 1 else [])]
    _print_line(["class", "sure", "novelty", *(["then"] if top > 1 else []), "image"], widths)
    for path, answer in answers:
        if not isinstance(answer, str):
            then = [", ".join(f"{name} {share:.1%}" for name, share in answer.top[1:])] if top > 1 else []
            _print_line([answer.label, f"{answer.probability:.1%}", f"{answer.novelty:.2f}", *then, path], widths)


def _print_values(answers: "Answers", names: Sequence[str]) -> None:
    """Print a line for each example of another task than classification."""
    widths = [max(len(name), len("-1.234e-05")) for name in names]
    _print_line([*names, "input"], widths)
    for path, answer in answers:
        if not isinstance(answer, str):
            _print_line([*(f"{value:.4g}" for value in answer.values.values()), path], widths)


def _print_line(cells: Sequence[str], widths: Sequence[int]) -> None:
    print("  ".join(escape_line(c).ljust(w) for c, w in zip(cells, [*widths, 0], strict=True)), flush=True)


def export(
    run: Path = cli.RUN,
    out: Path = output("File to write, such as model.onnx.", ...),
    format: str | None = option(
        "onnx, torch (a torch.export program, .pt2) or safetensors; by default as the file is called."
    ),
    site: str | None = cli.SITE,
    data_root: Path | None = option("Folder that holds the run's data, if it has moved."),
    algorithm: str | None = cli.OWN_ALGORITHM,
    trust_code: bool = cli.TRUST_CODE,
    quiet: bool = cli.ONLY_ERRORS,
) -> None:
    """Write the model of a run to a file. Checks it against the run first, and writes a MODEL_CARD.md beside it."""
    from fedcir.inference.exporting import export as write

    kind: Any = format
    exported = write(run, out, format=kind, site=site, algorithm=algorithm, data_root=data_root, trust_code=trust_code)
    if quiet:
        return
    examples = f"{exported.images} {'test' if exported.real else 'random'} examples{' of the run' * exported.real}"
    print(f"checked on {examples}: predictions differ by at most {exported.difference:.1g}")
    if not exported.real:
        print("note: the run's data could not be opened; name their folder with --data-root to check on real ones")
    if exported.note:
        print(f"note: {exported.note}")
    print(f"wrote {exported.path} and {exported.card}" if exported.new_card else f"wrote {exported.path}")
    if not exported.new_card:
        print(f"note: {exported.card} was there already and is kept; delete it to get a new one")
