"""`fedcir predict` and `fedcir export`: the model of a run in use."""

import csv
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
from fedcir.text import escape_cell, escape_line

if TYPE_CHECKING:
    from fedcir.inference.predictor import Prediction

    Answers = Iterable[tuple[str, Prediction | str]]

UNREADABLE = 2
"""The exit code if some files could not be read."""


def predict(
    run: Path = cli.RUN,
    paths: list[str] = argument("Images, folders of images, or - for a list on standard input."),
    json: bool = flag("--json", "Print as JSON."),
    csv: bool = flag("--csv", "Print as CSV."),
    top: int = option("How many classes to list for each image.", 3),
    site: str | None = cli.SITE,
    site_images: Path | None = option(
        "Folder of unlabelled images of a new site, to which the model is adapted first."
    ),
    force: bool = cli.FORCE_SITE,
    device: str = cli.DEVICE,
    algorithm: str | None = cli.OWN_ALGORITHM,
    trust_code: bool = cli.TRUST_CODE,
) -> None:
    """Classify images with the model of a run. Names and skips files that cannot be read; exits with 2 then.

    Check images with a `novelty` of 0.9 or more by eye: they may show something that the model does not know.
    """
    from fedcir.inference.model import UNCALIBRATED
    from fedcir.inference.predictor import UNFAMILIAR, Predictor, files_in

    if json and csv:
        raise InputError("--json and --csv exclude each other: choose one")
    named = files_in(path for path in paths if path != "-")
    listed = (line for line in map(str.strip, sys.stdin) if line) if "-" in paths else ()
    files = itertools.chain(named, listed)
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
    if not predictor.calibrated:
        print(f"note: {UNCALIBRATED}", file=sys.stderr)
    if predictor.estimate is not None:
        images = f"{predictor.estimate.images:,} images of {site_images}"
        print(f"note: adapted to {images}; expect {predictor.estimate.text}", file=sys.stderr)
    write = _print_json if json else _print_csv if csv else _print_table
    unread = read = unfamiliar = 0

    def count_answers() -> "Iterator[tuple[str, Prediction | str]]":
        nonlocal unread, read, unfamiliar
        for path, answer in predictor.files(files):
            if isinstance(answer, str):
                unread += 1
                print(f"fedcir: cannot read {escape_line(path)}: {answer}", file=sys.stderr)
            else:
                read += 1
                unfamiliar += answer.novelty >= UNFAMILIAR
            yield path, answer

    write(count_answers(), predictor.classes, min(top, len(predictor.classes)))
    if unfamiliar and predictor.calibrated:
        count = f"{unfamiliar} of {read} images have a `novelty` of {UNFAMILIAR} or more"
        print(f"note: {count}; check them by eye (known images: about 1 in 10)", file=sys.stderr)
    if unread:
        raise typer.Exit(UNREADABLE)


def _print_json(answers: "Answers", classes: Sequence[str], top: int) -> None:
    """Print a JSON list that grows as files are read; after Ctrl-C it is closed too, so that it can be parsed."""
    before = "["
    try:
        for path, answer in answers:
            values: dict[str, Any] = {"path": path, "error": answer}
            if not isinstance(answer, str):
                novelty = {"novelty": answer.novelty, "unlike": answer.novelty}  # the former name, for one version
                values = {"path": path, "class": answer.label, "probability": answer.probability, **novelty}
                values["top"] = [list(pair) for pair in answer.top]
            print(before, jsonlib.dumps(values, ensure_ascii=False), sep="\n", end="", flush=True)
            before = ","
    finally:
        print("[]" if before == "[" else "\n]", flush=True)


def _print_csv(answers: "Answers", classes: Sequence[str], top: int) -> None:
    columns = [f"{column}_{rank}" for rank in range(2, top + 1) for column in ("class", "probability")]
    out = csv.writer(sys.stdout if sys.stdout.isatty() else get_raw_stream(sys.stdout), lineterminator="\n")
    out.writerow(["path", "class", "probability", "novelty", *columns, "error"])
    for path, answer in answers:
        if isinstance(answer, str):
            out.writerow([escape_cell(path), "", "", "", *("" for _ in columns), escape_cell(answer)])
        else:
            runners_up = [cell for label, share in answer.top[1:] for cell in (escape_cell(label), f"{share:.6g}")]
            sure, novelty = f"{answer.probability:.6g}", f"{answer.novelty:.6g}"
            out.writerow([escape_cell(path), escape_cell(answer.label), sure, novelty, *runners_up, ""])
        sys.stdout.flush()


def _print_table(answers: "Answers", classes: Sequence[str], top: int) -> None:
    """Print a line for each image, its name last, because names have any length."""
    longest = sorted(map(len, classes), reverse=True)
    runners_up = sum(length + len(" 10.0%, ") for length in longest[: top - 1]) - len(", ")
    widths = [max(longest[0], len("class")), 6, 7, *([runners_up] if top > 1 else [])]

    def show(*cells: str) -> None:
        print("  ".join(escape_line(c).ljust(w) for c, w in zip(cells, [*widths, 0], strict=True)), flush=True)

    show("class", "sure", "novelty", *(["then"] if top > 1 else []), "image")
    for path, answer in answers:
        if not isinstance(answer, str):
            then = [", ".join(f"{name} {share:.1%}" for name, share in answer.top[1:])] if top > 1 else []
            show(answer.label, f"{answer.probability:.1%}", f"{answer.novelty:.2f}", *then, path)


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
    images = f"{exported.images} test images of the run" if exported.real else f"{exported.images} random images"
    print(f"checked on {images}: probabilities differ by at most {exported.difference:.1g}")
    if not exported.real:
        print("note: the run's data could not be opened; name their folder with --data-root to check on real images")
    if exported.note:
        print(f"note: {exported.note}")
    print(f"wrote {exported.path} and {exported.card}" if exported.new_card else f"wrote {exported.path}")
    if not exported.new_card:
        print(f"note: {exported.card} was there already and is kept; delete it to get a new one")
