"""`fedcir predict`: what the model of a run says of images."""

import csv
import json as jsonlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcir.cli.options import TrustCode
from fedcir.cli.terminal import unescaped
from fedcir.config.display import escape_line
from fedcir.config.spreadsheet import safe_cell

if TYPE_CHECKING:
    from fedcir.use.predictor import Prediction

    Answers = Iterable[tuple[str, Prediction | str]]

UNREADABLE = 2
"""The exit code if some files could not be read."""

RunArgument = Annotated[Path, typer.Argument(help="A finished run.")]
SiteOption = Annotated[
    str | None, typer.Option(help="Domain whose model to take, where each client has a part for itself.")
]
OwnAlgorithm = Annotated[
    str | None, typer.Option("--algorithm", help="The file of the algorithm, if it is your own (./mine.py).")
]


def predict(
    run: RunArgument,
    paths: Annotated[list[str], typer.Argument(help="Images, folders of images, or - for a list on standard input.")],
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print as CSV.")] = False,
    top: Annotated[int, typer.Option(help="How many classes to list for each image.")] = 3,
    site: SiteOption = None,
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda or mps.")] = "auto",
    algorithm: OwnAlgorithm = None,
    trust_code: TrustCode = False,
) -> None:
    """Classify images with the model of a run. Names and skips files that cannot be read; exits with 2 then.

    Check images with an `unlike` of 0.9 or more by eye: they may show something that the model does not know.
    """
    from fedcir.types import InputError
    from fedcir.use.pictures import files_in
    from fedcir.use.predictor import UNFAMILIAR, Predictor
    from fedcir.use.trained import UNCALIBRATED

    if json and csv:
        raise InputError("--json and --csv exclude each other: choose one")
    named = files_in(path for path in paths if path != "-")
    files = iter(named) if "-" not in paths else _with_listed(named)
    predictor = Predictor(run, site=site, algorithm=algorithm, device=device, top=top, trust_code=trust_code)
    if not predictor.calibrated:
        print(f"note: {UNCALIBRATED}", file=sys.stderr)
    write = _as_json if json else _as_csv if csv else _as_table
    unread = read = unfamiliar = 0

    def watched() -> "Iterator[tuple[str, Prediction | str]]":
        nonlocal unread, read, unfamiliar
        for path, answer in predictor.files(files):
            if isinstance(answer, str):
                unread += 1
                print(f"fedcir: cannot read {escape_line(path)}: {answer}", file=sys.stderr)
            else:
                read += 1
                unfamiliar += answer.unlike >= UNFAMILIAR
            yield path, answer

    write(watched(), predictor.classes, min(top, len(predictor.classes)))
    if unfamiliar and predictor.calibrated:
        found = f"{unfamiliar} of {read} images have an `unlike` of {UNFAMILIAR} or more"
        print(f"note: {found}; check them by eye (known images: about 1 in 10)", file=sys.stderr)
    if unread:
        raise typer.Exit(UNREADABLE)


def _with_listed(named: Iterable[str]) -> Iterator[str]:
    """And those that standard input lists, a line each, as they come."""
    yield from named
    yield from (line for line in map(str.strip, sys.stdin) if line)


def _as_json(answers: "Answers", classes: Sequence[str], top: int) -> None:
    """A list that grows as files are read. It is closed whatever happens, so that it can be parsed after Ctrl-C too."""
    before = "["
    try:
        for path, answer in answers:
            print(before, jsonlib.dumps(_told(path, answer), ensure_ascii=False), sep="\n", end="", flush=True)
            before = ","
    finally:
        print("[]" if before == "[" else "\n]", flush=True)


def _told(path: str, answer: "Prediction | str") -> dict[str, Any]:
    if isinstance(answer, str):
        return {"path": path, "error": answer}
    top = [list(pair) for pair in answer.top]
    return {
        "path": path,
        "class": answer.label,
        "probability": answer.probability,
        "unlike": answer.unlike,
        "top": top,
    }


def _as_csv(answers: "Answers", classes: Sequence[str], top: int) -> None:
    columns = [f"{what}_{place}" for place in range(2, top + 1) for what in ("class", "probability")]
    out = csv.writer(sys.stdout if sys.stdout.isatty() else unescaped(sys.stdout), lineterminator="\n")
    out.writerow(["path", "class", "probability", "unlike", *columns, "error"])
    for path, answer in answers:
        if isinstance(answer, str):
            out.writerow([safe_cell(path), "", "", "", *("" for _ in columns), safe_cell(answer)])
        else:
            others = [each for label, share in answer.top[1:] for each in (safe_cell(label), f"{share:.6g}")]
            sure, unlike = f"{answer.probability:.6g}", f"{answer.unlike:.6g}"
            out.writerow([safe_cell(path), safe_cell(answer.label), sure, unlike, *others, ""])
        sys.stdout.flush()


def _as_table(answers: "Answers", classes: Sequence[str], top: int) -> None:
    """One line an image, its name last, since nobody knows how long names will be."""
    longest = sorted(map(len, classes), reverse=True)
    others = sum(length + len(" 10.0%, ") for length in longest[: top - 1]) - len(", ")
    widths = [max(longest[0], len("class")), 6, 6, *([others] if top > 1 else [])]

    def show(*cells: str) -> None:
        print(
            *(escape_line(cell).ljust(width) for cell, width in zip(cells, [*widths, 0], strict=True)),
            sep="  ",
            flush=True,
        )

    show("class", "sure", "unlike", *(["then"] if top > 1 else []), "image")
    for path, answer in answers:
        if not isinstance(answer, str):
            then = [", ".join(f"{name} {share:.1%}" for name, share in answer.top[1:])] if top > 1 else []
            show(answer.label, f"{answer.probability:.1%}", f"{answer.unlike:.2f}", *then, path)
