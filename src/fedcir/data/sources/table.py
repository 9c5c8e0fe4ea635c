"""`table`: any tree of images and a CSV file of their labels, with a row for each image.

Its columns are path, label and site; data.target may name others than label, such as several findings. A column group,
such as the patient, names images that stay on one side of every split. A column split says which images the site itself
trains and tests on.
"""

import csv
import io
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedcir.config import DataConfig
from fedcir.data.sources.folders import PARTS, assign_parts, open_folder
from fedcir.data.sources.source import DatasetSource, ImageFiles, ImageIndex, ImageRecord
from fedcir.errors import InputError
from fedcir.files import MAX_TABLE_BYTES, read_text
from fedcir.text import unescape_cell

LABELS = "labels.csv"  # default name of the table
COLUMNS = ("path", "label", "site", "group", "split")
DELIMITERS = (",", ";", "\t")


class TableRow(NamedTuple):
    line: int
    cells: Mapping[str, str]  # by meaning


def list_table(root: Path, data: DataConfig) -> ImageIndex:
    """List the images of a table, whose paths are relative to the root."""
    path = root / LABELS if data.table is None else Path(data.table)
    if not path.exists():
        raise InputError(f"there is no table {path}: it needs the columns path, label and site; or set data.table")
    rows = list(read_rows(path, ("path", *_list_label(data), "site"), data.columns))
    return _add_targets(_build_index(root, path, rows), path, rows, root, data)


def list_site_table(root: Path, domain: str, data: DataConfig) -> ImageIndex:
    """List the images of one site. A column site is optional; rows of other sites are left out."""
    path = root / LABELS
    rows = list(read_rows(path, ("path", *_list_label(data)), data.columns))
    own = [TableRow(line, {**cells, "site": domain}) for line, cells in rows if cells.get("site") in (None, domain)]
    if not own:
        sites = sorted({row.cells["site"] for row in rows})
        raise InputError(
            f"{path} has no row of the site {domain!r}, only of {', '.join(sites)}: name the site as in the table",
            public=f"its {LABELS} has no row of its domain",
        )
    return _add_targets(_build_index(root, path, own), path, own, root, data)


def _list_label(data: DataConfig) -> tuple[str, ...]:
    """Return the column of labels, which is not needed if data.target names others."""
    return ("label",) if data.target is None else ()


def _add_targets(index: ImageIndex, path: Path, rows: Sequence[TableRow], root: Path, data: DataConfig) -> ImageIndex:
    """Add the row of each image, for the columns that data.target names."""
    if data.target is None:
        return index
    from fedcir.data.sources.site_tables import read_table

    table = read_table(path)
    by_line = {row.line: row for row in table.rows}
    by_name = {_name_below(root, row.cells["path"], ""): by_line[row.line] for row in rows}
    return index._replace(targets=replace(table, rows=[by_name[item.name] for item in index.pictures.items]))


def _build_index(root: Path, path: Path, rows: Sequence[TableRow]) -> ImageIndex:
    lines: dict[str, int] = {}
    items = []
    for row in rows:
        name = _name_below(root, row.cells["path"], f"{path}, line {row.line}")
        if name in lines:
            raise InputError(f"{path}: lines {lines[name]} and {row.line} both name {name!r}: remove one of them")
        lines[name] = row.line
        split = row.cells.get("split", "")
        if split and split.casefold() not in PARTS:
            raise InputError(f"{path}, line {row.line}: split must be train, validation or test, got {split!r}")
        part = PARTS[split.casefold()] if split else None
        items.append(
            ImageRecord(name, row.cells["site"], row.cells.get("label", ""), part, row.cells.get("group") or None)
        )
    missing = [name for name in lines if not os.path.isfile(f"{os.fspath(root)}/{name}")]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise InputError(
            f"{path}, line {lines[missing[0]]} names {missing[0]!r}, but {root} holds no such file{more}: "
            "correct the path, or remove the line",
            public=f"its table names {len(missing)} images that do not exist",
        )
    items.sort(key=lambda item: (item.domain, item.name))
    _check_groups(path, items, lines)
    marked = {item.domain for item in items if item.part is not None}
    bare = next((item for item in items if item.part is None and item.domain in marked), None)
    if bare is not None:
        others = f"has no split, but other rows of {bare.domain!r} have one"
        raise InputError(f"{path}, line {lines[bare.name]} {others}: fill it in for all, or for none")
    items, split_notes = assign_parts(items, "rows marked", "row marked")
    notes = [*split_notes]
    notes += _find_similar_names("labels", "classes", {item.label for item in items}, path)
    notes += _find_similar_names("sites", "sites", {item.domain for item in items}, path)
    if unlisted := [name for name in open_folder(root).images() if name not in lines]:
        count, are = (f"{len(unlisted):,} images have", "are") if len(unlisted) > 1 else ("one image has", "is")
        notes.append(f"{count} no row in {path.name} and {are} left out, such as {unlisted[0]}")
    return ImageIndex(ImageFiles(root, items), tuple(notes))


def read_rows(path: Path, needed: Sequence[str], names: Sequence[str] | None = None) -> Iterator[TableRow]:
    """Yield the rows of a CSV file that are not empty, and check that they have the needed cells.

    Cells are found by the names of their columns, or by those of COLUMNS that `names` (data.columns) replace.
    """
    header, rows = open_rows(path, {*needed, *COLUMNS, *(names or ())})
    columns = _locate_columns(path, header, needed, names)
    empty = True
    for line, cells in rows:
        values = {meaning: unescape_cell(cells[column]) for meaning, column in columns.items()}
        if lacking := next((meaning for meaning in needed if not values[meaning]), None):
            raise InputError(f"{path}, line {line} has no {lacking}: fill it in, or remove the line")
        empty = False
        yield TableRow(line, values)
    if empty:
        raise InputError(f"{path} has no rows")


def open_rows(path: Path, expected: Set[str] = frozenset()) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Read the first line of a CSV file, and iterate over the line and the cells of each row that is not empty.

    The delimiter is the one that finds most of the `expected` columns in the first line, or else most columns.
    """
    try:
        text = read_text(path, MAX_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} as UTF-8: {error}", public="its table cannot be read") from error
    first = text.partition("\n")[0]

    def count_columns(delimiter: str) -> int:
        cells = first.split(delimiter)
        return len(expected & {cell.strip('" \r') for cell in cells}) if expected else len(cells)

    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(DELIMITERS, key=count_columns), strict=True)

    def report(error: csv.Error) -> InputError:
        return InputError(
            f"{path}, line {reader.line_num} is not part of a table: {error}", public="its table cannot be read"
        )

    try:
        header = [cell.strip() for cell in next(reader, [])]
    except csv.Error as error:
        raise report(error) from error

    def iterate() -> Iterator[tuple[int, list[str]]]:
        try:
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    sizes = f"{len(cells)} cells, but there are {len(header)} columns"
                    fix = "fix it, or put quotes around a cell that holds a delimiter"
                    raise InputError(
                        f"{path}, line {reader.line_num} has {sizes}: {fix}", public="its table has a ragged row"
                    )
                yield reader.line_num, [cell.strip() for cell in cells]
        except csv.Error as error:
            raise report(error) from error

    return header, iterate()


def _locate_columns(
    path: Path, header: Sequence[str], needed: Sequence[str], names: Sequence[str] | None
) -> dict[str, int]:
    """Return the position of each column by meaning; data.columns may rename columns."""
    called = {name: name for name in (header if names is None else COLUMNS)}
    if names is not None and (tuple(names) != DataConfig.columns or set(names) <= set(header)):
        if len(names) > len(COLUMNS):
            raise InputError(f"data.columns names {len(names)} columns, but a table uses {len(COLUMNS)}")
        called |= dict(zip(COLUMNS, names, strict=False))
    required = [*(called.get(name, name) for name in needed), *(called[c] for c in called if called[c] != c)]
    if lacking := next((name for name in required if name not in header), None):
        hint = f" (group and split are optional), or name yours with data.columns={','.join(COLUMNS).upper()}"
        raise InputError(
            f"{path} has no column {lacking!r}; it has {', '.join(header) or 'none'}: it needs {', '.join(needed)}"
            + ("" if names is None else hint)
        )
    if twice := next((name for name in required if header.count(name) > 1), None):
        raise InputError(f"{path} has two columns {twice!r}: rename one")
    return {meaning: header.index(name) for meaning, name in called.items() if name in header}


def _name_below(root: Path, cell: str, where: str) -> str:
    """Convert a path to a name below the root, with / as separator."""
    name = cell if "\\" not in cell or (root / cell).exists() else cell.replace("\\", "/")
    if os.path.isabs(name):
        name = os.path.relpath(name, root.absolute())
    name = posixpath.normpath(name)
    if name.split("/")[0] == "..":
        raise InputError(
            f"{where} names {cell!r}, which is not below {root}: move the image there, or give the folder above both",
            public="its table names an image outside its data-root",
        )
    return name


def _check_groups(path: Path, items: Iterable[ImageRecord], lines: Mapping[str, int]) -> None:
    """Check that a group is at one site and in one part of the split."""
    first: dict[str, ImageRecord] = {}
    for item in items:
        if item.group is None:
            continue
        earlier = first.setdefault(item.group, item)
        group, seen = f"{path}: group {item.group!r} is", f"(lines {lines[earlier.name]} and {lines[item.name]})"
        if earlier.domain != item.domain:
            raise InputError(
                f"{group} at {earlier.domain!r} and at {item.domain!r} {seen}: give it to one site, or name two "
                "groups differently",
                public="a group of its table is at two sites",
            )
        if earlier.part != item.part:
            parts = f"in {earlier.part or 'no part'} and in {item.part or 'no part'} of the split"
            raise InputError(
                f"{group} {parts} {seen}: put it into one", public="a group of its table is in two parts of its split"
            )


def _find_similar_names(noun: str, kind: str, names: Iterable[str], path: Path) -> Iterator[str]:
    """Yield notes on names that differ only in case or spaces."""
    same: dict[str, list[str]] = {}
    for name in sorted(names):
        same.setdefault(" ".join(name.casefold().split()), []).append(name)
    for several in same.values():
        if len(several) > 1:
            names = " and ".join(map(repr, several))
            yield f"the {noun} {names} count as {len(several)} {kind}: if they are one, spell them alike in {path.name}"


class Table(DatasetSource):
    about = "Your own images, with their labels in a CSV file."
    where = "DIR/labels.csv with the columns path, label and site"

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        return list_table(root, data)
