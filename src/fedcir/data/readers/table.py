"""`table`: any tree of images and a CSV file of their labels, with a row for each image.

Its columns are path, label and site. A column group, such as the patient, names images that stay on one side of every
split. A column split says which images the site itself trains and tests on.
"""

import csv
import io
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedcir.config import DataConfig
from fedcir.config.reading import TABLE, read_text
from fedcir.config.spreadsheet import plain_cell
from fedcir.data.pictures.items import Files, Found, Item
from fedcir.data.readers.levels import PARTS, top_level
from fedcir.data.readers.parts import agreed
from fedcir.types import InputError

LABELS = "labels.csv"
"""What the file is called where no other is named."""
COLUMNS = ("path", "label", "site", "group", "split")
DELIMITERS = (",", ";", "\t")


class Row(NamedTuple):
    """A line of the table, its cells by what they mean."""

    line: int
    cells: Mapping[str, str]


def table(root: Path, file: Path | None = None, columns: Sequence[str] = DataConfig.columns) -> Found:
    """The images that a table names; their paths are relative to the root."""
    path = file or root / LABELS
    return _found(root, path, list(_rows(path, columns, ("path", "label", "site"))))


def table_of_site(root: Path, domain: str, columns: Sequence[str] = DataConfig.columns) -> Found:
    """The images of one site. Its table needs no column site; if it has one, the rows of other sites are left out."""
    path = root / LABELS
    rows = list(_rows(path, columns, ("path", "label")))
    own = [Row(row.line, {**row.cells, "site": domain}) for row in rows if row.cells.get("site") in (None, domain)]
    if not own:
        sites = sorted({row.cells["site"] for row in rows})
        raise InputError(
            f"{path} has no row of the site {domain!r}, only of {', '.join(sites)}: name the site as in the table",
            public=f"its {LABELS} has no row of its domain",
        )
    return _found(root, path, own)


def _found(root: Path, path: Path, rows: Sequence[Row]) -> Found:
    lines: dict[str, int] = {}
    items = []
    for row in rows:
        name = _below(root, row.cells["path"], f"{path}, line {row.line}")
        if name in lines:
            raise InputError(f"{path}: lines {lines[name]} and {row.line} both name {name!r}: remove one of them")
        lines[name] = row.line
        split = row.cells.get("split", "")
        if split and split.casefold() not in PARTS:
            raise InputError(f"{path}, line {row.line}: split must be train, validation or test, got {split!r}")
        part = PARTS[split.casefold()] if split else None
        items.append(Item(name, row.cells["site"], row.cells["label"], part, row.cells.get("group") or None))
    _check_files(root, path, lines)
    items.sort(key=lambda item: (item.domain, item.name))
    _check_groups(path, items, lines)
    _check_split(path, items, lines)
    items, notes = agreed(items, "rows marked", "row marked")
    notes = (*notes, *_unlike("labels", "classes", {i.label for i in items}, path))
    notes = (*notes, *_unlike("sites", "sites", {i.domain for i in items}, path), *_without_row(root, path, lines))
    return Found(Files(root, items), notes)


def _rows(path: Path, names: Sequence[str], needed: Sequence[str]) -> Iterator[Row]:
    """The lines of a table that hold anything, each with what is needed."""
    try:
        text = read_text(path, TABLE)
    except FileNotFoundError:
        raise InputError(
            f"there is no table {path}: put a {LABELS} with the columns path, label and site there, "
            "or name another file with data.table"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the table {path} as UTF-8: {error}") from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, names), strict=True)
    empty = True
    try:
        header = [cell.strip() for cell in next(reader, [])]
        places = _places(path, header, names, needed)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"{path}, line {reader.line_num} has {len(cells)} cells, but there are {len(header)} columns: "
                    "fix it, or put quotes around a cell that holds a delimiter"
                )
            found = {meaning: plain_cell(cells[place].strip()) for meaning, place in places.items()}
            if lacking := next((meaning for meaning in needed if not found[meaning]), None):
                raise InputError(f"{path}, line {reader.line_num} has no {lacking}: fill it in, or remove the line")
            empty = False
            yield Row(reader.line_num, found)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num} is not part of a table: {error}") from error
    if empty:
        raise InputError(f"{path} has no rows")


def _delimiter(text: str, names: Sequence[str]) -> str:
    """The one that finds most of the columns in the first line."""
    first = text.partition("\n")[0]
    known = {*COLUMNS, *names}
    return max(DELIMITERS, key=lambda each: len(known & {cell.strip('" \r') for cell in first.split(each)}))


def _places(path: Path, header: Sequence[str], names: Sequence[str], needed: Sequence[str]) -> dict[str, int]:
    """Where each column is. Its name is ours, or what data.columns calls it; the hub's names are known too."""
    if len(names) > len(COLUMNS):
        raise InputError(f"data.columns names {len(names)} columns, but a table uses {len(COLUMNS)}: path, label, site")
    called = dict(zip(COLUMNS, (*names, *COLUMNS[len(names) :]), strict=True))
    if tuple(names) == DataConfig.columns and not set(names) <= set(header):  # nobody named any
        called = {name: name for name in COLUMNS}
    optional = [meaning for meaning in COLUMNS if meaning not in needed and called[meaning] == meaning]
    lacking = [name for meaning, name in called.items() if name not in header and meaning not in optional]
    if lacking:
        raise InputError(
            f"{path} has no column {lacking[0]!r}; it has {', '.join(header) or 'none'}: it needs {', '.join(needed)} "
            f"(group and split are optional), or name yours with data.columns={','.join(COLUMNS).upper()}"
        )
    if twice := next((name for name in called.values() if header.count(name) > 1), None):
        raise InputError(f"{path} has two columns {twice!r}: rename one")
    return {meaning: header.index(name) for meaning, name in called.items() if name in header}


def _below(root: Path, given: str, where: str) -> str:
    """A path as a name below the root, with / between its parts."""
    name = given if "\\" not in given or (root / given).exists() else given.replace("\\", "/")
    if os.path.isabs(name):
        name = os.path.relpath(name, root.absolute())
    name = posixpath.normpath(name)
    if name.split("/")[0] == "..":
        raise InputError(
            f"{where} names {given!r}, which is not below {root}: move the image there, or give the folder above both",
            public="its table names an image outside its data-root",
        )
    return name


def _check_files(root: Path, path: Path, lines: Mapping[str, int]) -> None:
    top = os.fspath(root)
    missing = [name for name in lines if not os.path.isfile(f"{top}/{name}")]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise InputError(
            f"{path}, line {lines[missing[0]]} names {missing[0]!r}, but {root} holds no such file{others}: "
            "correct the path, or remove the line",
            public=f"its table names {len(missing)} images that do not exist",
        )


def _check_groups(path: Path, items: Iterable[Item], lines: Mapping[str, int]) -> None:
    """A group is at one site, and in one part of the site's own split."""
    first: dict[str, Item] = {}
    for item in items:
        if item.group is None:
            continue
        other = first.setdefault(item.group, item)
        seen = f"(lines {lines[other.name]} and {lines[item.name]})"
        if other.domain != item.domain:
            raise InputError(
                f"{path}: group {item.group!r} is at {other.domain!r} and at {item.domain!r} {seen}: give it to one "
                "site, or name two groups differently",
                public="a group of its table is at two sites",
            )
        if other.part != item.part:
            raise InputError(
                f"{path}: group {item.group!r} is in {other.part or 'no part'} and in {item.part or 'no part'} of the "
                f"split {seen}: put it into one",
                public="a group of its table is in two parts of its split",
            )


def _check_split(path: Path, items: Iterable[Item], lines: Mapping[str, int]) -> None:
    """A site marks all its images, or none."""
    marked = {item.domain for item in items if item.part is not None}
    bare = next((item for item in items if item.part is None and item.domain in marked), None)
    if bare is not None:
        raise InputError(
            f"{path}, line {lines[bare.name]} has no split, but other rows of {bare.domain!r} have one: "
            "fill it in for all of its rows, or for none"
        )


def _unlike(what: str, kind: str, names: Iterable[str], path: Path) -> Iterator[str]:
    """Names that differ only in case or in the spaces within, which a table easily holds."""
    same: dict[str, list[str]] = {}
    for name in sorted(names):
        same.setdefault(" ".join(name.casefold().split()), []).append(name)
    for several in same.values():
        if len(several) > 1:
            told = " and ".join(map(repr, several))
            yield f"the {what} {told} count as {len(several)} {kind}: if they are one, spell them alike in {path.name}"


def _without_row(root: Path, path: Path, lines: Mapping[str, int]) -> Iterator[str]:
    left = [name for name in top_level(root).images() if name not in lines]
    if left:
        some = f"{len(left):,} images have" if len(left) > 1 else "one image has"
        yield f"{some} no row in {path.name} and {'are' if len(left) > 1 else 'is'} left out, such as {left[0]}"
