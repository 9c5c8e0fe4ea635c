"""`csv`: tables of numbers and categories, a CSV file for each site, or one file with a column that names the site."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedcir.config import DataConfig
from fedcir.data.cache import PreparedImages
from fedcir.data.domains import Domains
from fedcir.data.encoding import (
    MAX_CATEGORIES,
    Columns,
    ColumnSummary,
    Kind,
    TableEncoding,
    Values,
    merge_columns,
    sum_columns,
)
from fedcir.data.sources.folders import PARTS
from fedcir.data.sources.site_tables import MISSING, SiteTable, parse_number, to_category
from fedcir.data.sources.source import DatasetSource, ImageRecord, Part
from fedcir.data.sources.target_columns import find_targets, list_labels, read_targets, summarise_targets
from fedcir.data.splits import split_items
from fedcir.data.targets import WantedTask, choose_task, merge_target_columns
from fedcir.errors import InputError
from fedcir.tasks.task import Task
from fedcir.text import join_names

FEW_CATEGORIES = 20
"""Categories up to which a column of text may be a name for each row."""


def list_columns(table: SiteTable, data: DataConfig) -> list[str]:
    """Return the names of the columns from which the target is predicted, sorted."""
    for name in data.categorical:
        _find_column(table, name, "categorical")
    targets = {target.column for target in find_targets(data, table.header, table.path)}
    others = {*targets, *data.ignore, data.site, data.group, data.split}
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
    categories = {to_category(row.cells[position]) for row in known}
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
            value = codes.get(to_category(cell)) if column.kind == "category" else parse_number(cell)
            if value is None:
                known = f"it knows {join_names(column.categories, 10)}"
                fault = f"which the model has never seen; {known}" if column.kind == "category" else "no number"
                raise InputError(
                    f"{table.at(row)}: {column.name!r} is {cell[:100]!r}, {fault}: correct the cell, or empty it",
                    public=f"its column {column.name!r} has a value that the run does not know",
                )
            values[index, number] = value
    return values


def encode_rows(table: SiteTable, encoding: TableEncoding) -> NDArray[np.float32]:
    """Encode rows as the features of a trained model; with scale=client by the mean and spread of these rows."""
    columns = [ColumnSummary(c.name, "category" if c.categories else "number", c.categories) for c in encoding.columns]
    values = convert_cells(table, columns)
    if encoding.scale == "client":
        encoding = encoding.with_statistics(sum_columns(columns, values))
    return encoding.encode(columns, values, str(table.path))


def build_domains(
    name: str,
    tables: Sequence[SiteTable],
    data: DataConfig,
    seed: int,
    classes: Sequence[str] = (),
    wanted: WantedTask = None,
) -> Domains:
    """Split the tables of all sites into train and test, with unscaled values; rows of other `classes` are left out."""
    for ignored in data.ignore:  # one site may lack it
        if len(tables) > 1 and not any(ignored in table.header for table in tables):
            _find_column(tables[0], ignored, "ignore")
    counts = sum(len(table.rows) for table in tables)
    tables = [drop_incomplete(table, data) for table in tables]
    incomplete = counts - sum(len(table.rows) for table in tables)
    columns = merge_columns({table.site: summarise_table(table, data) for table in tables})
    if isinstance(wanted, Task):
        task = wanted
    else:
        task = choose_task(wanted, merge_target_columns([summarise_targets(table, data) for table in tables]))
    items, values, targets, digests = [], [], [], []
    for table in tables:
        labels = list_labels(table, data) if task.has_classes else [""] * len(table.rows)
        chosen = [row for row, label in enumerate(labels) if not task.has_classes or not classes or label in classes]
        selected = replace(table, rows=[table.rows[row] for row in chosen])
        values.append(convert_cells(selected, columns))
        if not task.has_classes:
            targets.append(read_targets(selected, data, task))
        contents = [labels[row].encode() for row in chosen] if task.has_classes else map(bytes, targets[-1])
        groups, parts = _list_groups(selected, data), _list_parts(selected, data)
        _check_groups(selected, groups, parts)
        copies = Counter[bytes]()
        for position, (row, cells, target) in enumerate(zip(selected.rows, values[-1], contents, strict=True)):
            label = labels[chosen[position]]
            items.append(
                ImageRecord(f"{table.site}/{row.line:06d}", table.site, label, parts[position], groups[position])
            )
            content = cells.tobytes() + target
            copies[content] += 1  # equal rows are different persons, and count as different
            key = json.dumps([table.site, copies[content]]).encode() + content
            digests.append(hashlib.blake2b(key, digest_size=16).digest())
    if not items:
        raise InputError(f"no row of {name} has one of the classes {join_names([*classes], 10)}")
    prepared = PreparedImages(
        np.concatenate(values), np.frombuffer(b"".join(digests), dtype="V16"), _hash_content(data, columns, digests)
    )
    joined = np.concatenate(targets) if targets else None
    domains = split_items(name, items, prepared, data.test_fraction, seed, classes, task, joined)
    notes = list(domains.notes)
    if incomplete:
        notes.append(f"{incomplete:,} of {counts:,} rows have missing cells and are left out (data.missing=drop)")
    if empty := [column.name for column in columns if column.kind == "empty"]:
        notes.append(f"columns without any value are left out: {join_names(empty, 10)}")
    return replace(domains, columns=columns, notes=tuple(notes))


def _list_groups(table: SiteTable, data: DataConfig) -> list[str | None]:
    if data.group is None:
        return [None] * len(table.rows)
    position = _find_column(table, data.group, "group")
    return [None if row.cells[position] in MISSING else row.cells[position] for row in table.rows]


def _list_parts(table: SiteTable, data: DataConfig) -> list[Part | None]:
    """Return the part of the split that each row is in; None where test rows are drawn."""
    if data.split is None:
        return [None] * len(table.rows)
    position = _find_column(table, data.split, "split")
    if wrong := next((row for row in table.rows if row.cells[position].casefold() not in PARTS), None):
        cell = wrong.cells[position][:100]
        raise InputError(
            f"{table.at(wrong)}: {data.split} must be train, validation or test, got {cell!r}",
            public=f"its column {data.split!r} holds other words than train, validation and test",
        )
    return [PARTS[row.cells[position].casefold()] for row in table.rows]


def _check_groups(table: SiteTable, groups: Sequence[str | None], parts: Sequence[Part | None]) -> None:
    """Check that all rows of a group are in one part of the split."""
    first: dict[str, Part | None] = {}
    for row, group, part in zip(table.rows, groups, parts, strict=True):
        if group is not None and first.setdefault(group, part) != part:
            raise InputError(
                f"{table.at(row)}: the group {group!r} is in {first[group]} and in {part} of the split: put it "
                "into one",
                public="a group of its table is in two parts of its split",
            )


def _find_column(table: SiteTable, name: str, setting: str) -> int:
    if name not in table.header:
        raise InputError(
            f"data.{setting}: {table.path} has no column {name!r}; it has {join_names(table.header, 20)}",
            public=f"its table has no column {name!r} of data.{setting}",
        )
    return table.header.index(name)


def _hash_content(data: DataConfig, columns: Columns, digests: Sequence[bytes]) -> str:
    """Hash all that a run's data depend on: another reading of the same files is another dataset."""
    about = [data.target, data.scale, data.missing, [(column.name, column.kind) for column in columns]]
    return hashlib.blake2b(json.dumps(about).encode() + b"".join(digests), digest_size=16).hexdigest()


class Csv(DatasetSource):
    about = "Your own tables of numbers and categories."
    where = "DIR/<site>.csv, or a file with a column that names the site"
    root = "path"
    is_table = True
