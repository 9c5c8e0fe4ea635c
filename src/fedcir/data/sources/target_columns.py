"""Target columns of tables: where they are, what they tell of the task, and the targets of each row or image."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcir.config import DataConfig
from fedcir.data.domains import CLASSIFICATION
from fedcir.data.sources.site_tables import MISSING, SiteTable, parse_number, to_category
from fedcir.data.sources.source import ImageFiles, ImageIndex
from fedcir.data.targets import MOST_CLASSES, TargetColumn, WantedTask, choose_task
from fedcir.errors import InputError
from fedcir.tasks.task import Task
from fedcir.text import join_names

COMPARISON = re.compile(r"(.+?)\s*>\s*(-?\d+(?:\.\d+)?)", re.ASCII)
"""A target such as num>0, which makes two classes of a column of numbers."""


class Target(NamedTuple):
    """A column that is predicted, or compared with a threshold."""

    name: str  # as data.target has it
    column: str
    position: int
    threshold: str = ""


def find_targets(data: DataConfig, header: Sequence[str], path: Path) -> list[Target]:
    """Find the columns that data.target names, separated by commas."""
    if data.target is None:
        raise InputError(
            f"data.target is not set; {path} has the columns {join_names(header, 20)}: name the one to predict, as in "
            f"data.target={header[-1] if header else 'COLUMN'}",
            public="data.target is not set",
        )
    names = [data.target] if data.target in header else [name.strip() for name in data.target.split(",")]
    targets = []
    for name in names:
        match = COMPARISON.fullmatch(name)
        column, threshold = (match[1], match[2]) if match and name not in header else (name, "")
        if column not in header:
            raise InputError(
                f"data.target: {path} has no column {column!r}; it has {join_names(header, 20)}",
                public=f"its table has no target column {column!r}",
            )
        targets.append(Target(name, column, header.index(column), threshold))
    return targets


def summarise_targets(table: SiteTable, data: DataConfig) -> tuple[TargetColumn, ...]:
    """Find what the target columns hold, to agree on the task."""
    targets = find_targets(data, table.header, table.path)
    columns = []
    for target in targets:
        cells = _list_cells(table, target)
        numbers = [parse_number(cell) for cell in cells]
        if (target.threshold and len(targets) == 1) or (not target.threshold and None in numbers):
            columns.append(TargetColumn(target.name, "text"))
        elif target.threshold:
            columns.append(TargetColumn(target.name, "whole", ("0", "1")))
        elif any(number is not None and not number.is_integer() for number in numbers):
            columns.append(TargetColumn(target.name, "real"))
        else:
            values = sorted({to_category(cell) for cell in cells})
            columns.append(TargetColumn(target.name, "whole", tuple(values) if len(values) <= MOST_CLASSES else ()))
    return tuple(columns)


def _list_cells(table: SiteTable, target: Target) -> list[str]:
    """Return the cells of a target column, none of which may be missing."""
    for row in table.rows:
        if row.cells[target.position] in MISSING:
            raise InputError(
                f"{table.at(row)} has no {target.column}: fill it in, or remove the line",
                public="its table has a row without a target",
            )
    return [row.cells[target.position] for row in table.rows]


def list_labels(table: SiteTable, data: DataConfig) -> list[str]:
    """Return the class of each row: the target's text, whole numbers without a decimal point, or a comparison."""
    (target,) = find_targets(data, table.header, table.path)
    cells = _list_cells(table, target)
    if not target.threshold:
        return [to_category(cell) for cell in cells]
    above, below = f"{target.column}>{target.threshold}", f"{target.column}<={target.threshold}"
    return [above if is_above else below for is_above in _parse_target(table, target).tolist()]


def read_targets(table: SiteTable, data: DataConfig, task: Task) -> NDArray[np.float32]:
    """Return the targets (N, T) of each row for a task without classes; errors name the line."""
    columns = [_parse_target(table, target) for target in find_targets(data, table.header, table.path)]
    values = torch.from_numpy(np.stack(columns, axis=1))
    try:
        return task.check_targets(values, str(table.path)).numpy()
    except InputError as error:
        for row, value in zip(table.rows, values, strict=True):
            try:
                task.check_targets(value[None], table.at(row))
            except InputError as faulty:
                raise InputError(str(faulty), public="its table has a target that does not fit the task") from error
        raise


def _parse_target(table: SiteTable, target: Target) -> NDArray[np.float64]:
    """Return the numbers of a target column, or 1 where they are above the threshold and 0 elsewhere."""
    numbers = [parse_number(cell) for cell in _list_cells(table, target)]
    if None in numbers:
        row = table.rows[numbers.index(None)]
        cell = row.cells[target.position][:100]
        verb = f"{target.name} compares numbers, but {target.column} is {cell!r}"
        message = verb if target.threshold else f"the target {target.column!r} is {cell!r}, no number"
        raise InputError(
            f"{table.at(row)}: {message}: correct the cell, or set data.target or task.name",
            public="its table has a target that is no number",
        )
    values = np.array(numbers, dtype=np.float64)
    return (values > float(target.threshold)).astype(np.float64) if target.threshold else values


def read_image_targets(
    index: ImageIndex, data: DataConfig, wanted: WantedTask
) -> tuple[ImageIndex, Task, NDArray[Any] | None]:
    """Return the task of the target columns with the targets of all images, or images labelled with their classes."""
    table, pictures = index.targets, index.pictures
    if table is None or not isinstance(pictures, ImageFiles):
        return index, CLASSIFICATION, None
    task = wanted if isinstance(wanted, Task) else choose_task(wanted, summarise_targets(table, data))
    if not task.has_classes:
        return index, task, read_targets(table, data, task)
    labels = list_labels(table, data)
    items = [item._replace(label=label) for item, label in zip(pictures.items, labels, strict=True)]
    return index._replace(pictures=replace(pictures, items=items), targets=None), task, None
