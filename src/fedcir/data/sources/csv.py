"""`csv`: tables of numbers and categories, a CSV file for each site, or one file with a column that names the site."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcir.config import DataConfig
from fedcir.data.cache import PreparedImages
from fedcir.data.domains import Domains
from fedcir.data.encoding import LARGEST, Columns, ColumnSummary, Kind, Values, merge_columns
from fedcir.data.sources.source import DatasetSource, ImageRecord
from fedcir.data.sources.table import open_rows
from fedcir.data.splits import split_items
from fedcir.errors import InputError
from fedcir.text import join_names

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"})
"""Cells that count as missing."""
COMPARISON = re.compile(r"(.+?)\s*>\s*(-?\d+(?:\.\d+)?)", re.ASCII)
"""A target such as num>0, which makes two classes of a column of numbers."""
FEW_CATEGORIES, MAX_CATEGORIES = 20, 1_000
"""Categories up to which a column of text may be a name for each row, and the most of any column."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)


class CsvRow(NamedTuple):
    line: int
    cells: list[str]


@dataclass(frozen=True)
class SiteTable:
    """The rows of one site."""

    site: str
    path: Path
    header: tuple[str, ...]
    rows: Sequence[CsvRow]

    def at(self, row: CsvRow) -> str:
        return f"{self.path}, line {row.line}"


def read_tables(root: Path, data: DataConfig) -> list[SiteTable]:
    """Read DIR/<site>.csv, or a file with a column data.site, without splitting or converting anything."""
    if root.is_file():
        header, rows = _read_file(root, data)
        if data.site not in header:
            raise InputError(
                f"{root} has no column {data.site!r} that names the site of each row; it has {join_names(header, 20)}: "
                "set data.site, or give a folder of one file a site"
            )
        position = header.index(data.site)
        by_site: dict[str, list[CsvRow]] = {}
        for row in rows:
            if not row.cells[position]:
                raise InputError(f"{root}, line {row.line} names no {data.site}: fill it in, or remove the line")
            by_site.setdefault(row.cells[position], []).append(row)
        return [SiteTable(site, root, header, by_site[site]) for site in sorted(by_site)]
    paths = sorted(root.glob("*.csv"))
    if not paths:
        raise InputError(f"data.root: {root} holds no <site>.csv file")
    return [SiteTable(path.stem, path, *_read_file(path, data)) for path in paths]


def read_site_table(root: Path, site: str, data: DataConfig) -> SiteTable:
    """Read the rows of one site: a file of its own, or its rows of a file with a column data.site."""
    path = find_site_file(root, site)
    header, rows = _read_file(path, data)
    if root.is_file() and data.site in header:
        position = header.index(data.site)
        rows = [row for row in rows if row.cells[position] == site]
        if not rows:
            raise InputError(
                f"{path} has no row whose {data.site} is {site!r}: name the site as in the table",
                public="its table has no row of its domain",
            )
    return SiteTable(site, path, header, rows)


def find_site_file(root: Path, site: str) -> Path:
    """Return the CSV file of a site: the file itself, or that of its name in a folder."""
    path = root if root.is_file() else root / f"{site}.csv"
    if not path.is_file():
        raise InputError(f"there is no table {path}", public="its data-root holds no table of its name")
    return path


def _read_file(path: Path, data: DataConfig) -> tuple[tuple[str, ...], list[CsvRow]]:
    header, cells = open_rows(path)
    if twice := next((name for name, count in Counter(header).items() if count > 1), None):
        raise InputError(f"{path} has two columns {twice!r}: rename one", public="its table has a column twice")
    if "" in header:
        raise InputError(f"{path}: column {header.index('') + 1} has no name: name it in the first line")
    rows = [CsvRow(line, row) for line, row in cells]
    if not rows:
        raise InputError(f"{path} has no rows", public="its table has no rows")
    return tuple(header), rows


def find_targets(data: DataConfig, header: Sequence[str], path: Path) -> list[str]:
    """Return the names of the target columns."""
    if data.target is None:
        raise InputError(f"data.target names the column to predict; {path} has {join_names(header, 20)}: set it")
    names = [name.strip() for name in data.target.split(",")]
    targets = []
    for name in names:
        match = COMPARISON.fullmatch(name)
        column = match[1] if match and name not in header else name
        if column not in header:
            raise InputError(
                f"data.target: {path} has no column {column!r}; it has {join_names(header, 20)}",
                public=f"its table has no target column {column!r}",
            )
        targets.append(column)
    if len(targets) > 1:
        raise InputError(f"data.target names {len(targets)} columns, but a class is one: name one column")
    return targets


def list_labels(table: SiteTable, data: DataConfig) -> list[str]:
    """Return the class of each row: the target's text, whole numbers without a decimal point, or a comparison."""
    (target,) = find_targets(data, table.header, table.path)
    position = table.header.index(target)
    match = None if data.target in table.header else COMPARISON.fullmatch(data.target or "")
    labels = []
    for row in table.rows:
        cell = row.cells[position]
        if cell in MISSING:
            raise InputError(f"{table.at(row)} has no {target}: fill it in, or remove the line")
        if match is None:
            labels.append(_to_category(cell))
            continue
        number = parse_number(cell)
        if number is None:
            raise InputError(f"{table.at(row)}: {data.target} compares numbers, but {target} is {cell[:100]!r}")
        labels.append(f"{target}>{match[2]}" if number > float(match[2]) else f"{target}<={match[2]}")
    return labels


def list_columns(table: SiteTable, data: DataConfig) -> list[str]:
    """Return the names of the columns from which the target is predicted, sorted."""
    for setting, names in (("ignore", data.ignore), ("categorical", data.categorical)):
        if unknown := next((name for name in names if name not in table.header), None):
            raise InputError(
                f"data.{setting}: {table.path} has no column {unknown!r}; it has {join_names(table.header, 20)}",
                public=f"its table has no column {unknown!r} of data.{setting}",
            )
    others = {*find_targets(data, table.header, table.path), *data.ignore, data.site, data.group}
    return sorted(set(table.header) - others)


def drop_incomplete(table: SiteTable, data: DataConfig) -> SiteTable:
    """Leave out rows with missing cells where data.missing asks for it."""
    if data.missing == "mean":
        return table
    positions = [table.header.index(name) for name in list_columns(table, data)]
    rows = [row for row in table.rows if not any(row.cells[position] in MISSING for position in positions)]
    if not rows:
        raise InputError(
            f"{table.path}: every row has a missing cell, and data.missing=drop leaves it out: set data.missing=mean, "
            "or leave out columns with data.ignore"
        )
    return replace(table, rows=rows)


def summarise_table(table: SiteTable, data: DataConfig) -> tuple[ColumnSummary, ...]:
    """Find the kind of each column, its categories and whether cells are missing."""
    return tuple(_summarise_column(table, name, name in data.categorical) for name in list_columns(table, data))


def _summarise_column(table: SiteTable, name: str, is_categorical: bool) -> ColumnSummary:
    position = table.header.index(name)
    known = [row for row in table.rows if row.cells[position] not in MISSING]
    has_missing = len(known) < len(table.rows)
    texts = [(row, row.cells[position][:100]) for row in known if parse_number(row.cells[position]) is None]
    if not is_categorical and 0 < len(texts) < len(known):
        raise InputError(
            f"{table.at(texts[0][0])}: {name!r} is {texts[0][1]!r}, but a number in other rows: correct it, empty it "
            f"if it is missing, or set data.categorical={name}",
            public=f"its column {name!r} holds numbers and text",
        )
    kind: Kind = "empty" if not known else "category" if is_categorical or texts else "number"
    if kind != "category":
        return ColumnSummary(name, kind, has_missing=has_missing)
    categories = {_to_category(row.cells[position]) for row in known}
    count = len(categories)
    if count > MAX_CATEGORIES or (count > FEW_CATEGORIES and 2 * count > len(known)):
        raise InputError(
            f"column {name!r} of {table.path} has {count:,} different texts in {len(known):,} rows, such as a name or "
            f"a number of a patient: leave it out with data.ignore={name}",
            public=f"its column {name!r} has too many categories",
        )
    return ColumnSummary(name, kind, tuple(sorted(categories)), has_missing)


def convert_cells(table: SiteTable, columns: Columns) -> Values:
    """Convert the cells of these columns to numbers, or to positions in the column's categories."""
    values = np.full((len(table.rows), len(columns)), math.nan)
    for number, column in enumerate(columns):
        if column.name not in table.header:
            raise InputError(f"{table.path} has no column {column.name!r}: add it, if need be with empty cells")
        position = table.header.index(column.name)
        codes = {category: code for code, category in enumerate(column.categories)}
        for index, row in enumerate(table.rows):
            cell = row.cells[position]
            if cell in MISSING:
                continue
            value = codes.get(_to_category(cell)) if column.kind == "category" else parse_number(cell)
            if value is None:
                known = f"it knows {join_names(column.categories, 10)}"
                fault = f"which the model has never seen; {known}" if column.kind == "category" else "no number"
                raise InputError(
                    f"{table.at(row)}: {column.name!r} is {cell[:100]!r}, {fault}: correct the cell, or empty it",
                    public=f"its column {column.name!r} has a value that the run does not know",
                )
            values[index, number] = value
    return values


def parse_number(cell: str) -> float | None:
    """Parse a number of decimal digits; None for any other text, and for larger ones than LARGEST."""
    number = float(cell) if len(cell) <= 400 and NUMBER.fullmatch(cell) else math.inf
    return number if abs(number) <= LARGEST else None


def _to_category(cell: str) -> str:
    """Write whole numbers in one way, so that 1 and 1.0 are one category."""
    number = parse_number(cell)
    is_whole = number is not None and number.is_integer() and abs(number) < 1e15
    return str(int(number)) if is_whole and number is not None else cell


def build_domains(
    name: str,
    tables: Sequence[SiteTable],
    data: DataConfig,
    seed: int,
    classes: Sequence[str] = (),
    columns: Columns | None = None,
) -> Domains:
    """Split the tables of all sites into train and test, with unscaled values; rows of other `classes` are left out.

    `columns` are those that a run has agreed on; by default they are those of the tables.
    """
    counts = sum(len(table.rows) for table in tables)
    tables = [drop_incomplete(table, data) for table in tables]
    incomplete = counts - sum(len(table.rows) for table in tables)
    if columns is None:
        columns = merge_columns({table.site: summarise_table(table, data) for table in tables})
    items, values, digests = [], [], []
    for table in tables:
        labels = list_labels(table, data)
        chosen = [row for row, label in enumerate(labels) if not classes or label in classes]
        kept = replace(table, rows=[table.rows[row] for row in chosen])
        values.append(convert_cells(kept, columns))
        groups = _list_groups(kept, data)
        copies = Counter[bytes]()
        for row, label, group, cells in zip(
            kept.rows, (labels[row] for row in chosen), groups, values[-1], strict=True
        ):
            items.append(ImageRecord(f"{table.site}/{row.line:06d}", table.site, label, group=group))
            content = cells.tobytes() + label.encode()
            copies[content] += 1  # equal rows are different persons, and count as different
            key = json.dumps([table.site, copies[content]]).encode() + content
            digests.append(hashlib.blake2b(key, digest_size=16).digest())
    if not items:
        raise InputError(f"no row of {name} has one of the classes {join_names([*classes], 10)}")
    prepared = PreparedImages(
        np.concatenate(values), np.frombuffer(b"".join(digests), dtype="V16"), _hash_content(data, columns, digests)
    )
    domains = split_items(name, items, prepared, data.test_fraction, seed, classes)
    notes = list(domains.notes)
    if incomplete:
        notes.append(f"{incomplete:,} of {counts:,} rows have missing cells and are left out (data.missing=drop)")
    if empty := [column.name for column in columns if column.kind == "empty"]:
        notes.append(f"columns without any value are left out: {join_names(empty, 10)}")
    return replace(domains, columns=tuple(columns), notes=tuple(notes))


def _list_groups(table: SiteTable, data: DataConfig) -> list[str | None]:
    if data.group is None:
        return [None] * len(table.rows)
    if data.group not in table.header:
        raise InputError(
            f"data.group: {table.path} has no column {data.group!r}; it has {join_names(table.header, 20)}",
            public=f"its table has no column {data.group!r} of data.group",
        )
    position = table.header.index(data.group)
    return [row.cells[position] or None for row in table.rows]


def _hash_content(data: DataConfig, columns: Columns, digests: Sequence[bytes]) -> str:
    """Hash all that a run's data depend on: another reading of the same files is another dataset."""
    about = [data.target, data.scale, data.missing, [(column.name, column.kind) for column in columns]]
    return hashlib.blake2b(json.dumps(about).encode() + b"".join(digests), digest_size=16).hexdigest()


class Csv(DatasetSource):
    about = "Your own tables of numbers and categories."
    where = "DIR/<site>.csv, or a file with a column that names the site"
    root = "path"
    is_table = True
