"""Targets of a dataset: which task they suggest, and their form for that task.

Classes and whole numbers are classified. A column of other numbers, or of more than MOST_CLASSES whole ones, is
regression; several columns of 0 and 1 are labels; a number for each pixel is segmentation. Survival has to be named.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedcir.data.domains import CHUNK, CLASSIFICATION, Domain, Domains, Split
from fedcir.errors import InputError
from fedcir.tasks.multilabel import MultiLabel
from fedcir.tasks.regression import Regression
from fedcir.tasks.segmentation import MAX_CLASSES, Segmentation
from fedcir.tasks.survival import Survival
from fedcir.tasks.task import Task, describe_shape, find_task

MOST_CLASSES = 20
"""Different whole numbers up to which a target column holds classes."""
WantedTask = str | Task | None
"""The task by name or with its fields; None to follow the data."""


@dataclass(frozen=True)
class TargetColumn:
    """What a site tells of a target column, to agree on the task."""

    name: str
    kind: Literal["text", "whole", "real"]
    """Texts, whole numbers, or other numbers."""
    values: tuple[str, ...] = ()
    """Sorted different whole numbers; none if there are more than MOST_CLASSES."""


def merge_target_columns(sites: Sequence[Sequence[TargetColumn]]) -> tuple[TargetColumn, ...]:
    """Merge the target columns of all sites."""
    merged = []
    for parts in zip(*sites, strict=True):
        kinds = {part.kind for part in parts}
        values = {value for part in parts for value in part.values}
        is_known = all(part.values for part in parts) and len(values) <= MOST_CLASSES
        kind: Literal["text", "whole", "real"] = next(kind for kind in ("text", "real", "whole") if kind in kinds)
        merged.append(TargetColumn(parts[0].name, kind, tuple(sorted(values)) if is_known else ()))
    return tuple(merged)


def choose_task(wanted: str | None, columns: Sequence[TargetColumn]) -> Task:
    """Return the wanted task on these target columns, or the one that they suggest; class names come from rows."""
    names = tuple(column.name for column in columns)
    if wanted is not None:
        return _make_named_task(wanted, columns)
    if len(columns) == 1:
        is_regression = columns[0].kind == "real" or (columns[0].kind == "whole" and not columns[0].values)
        return Regression(names) if is_regression else CLASSIFICATION
    if all(column.kind == "whole" and set(column.values) <= {"0", "1"} and column.values for column in columns):
        return MultiLabel(names)
    message = (
        f"data.target names {len(names)} columns that are not all 0 or 1, which may be several tasks: name one column, "
        "or set task.name=regression, or task.name=survival with data.target=event,time"
    )
    raise InputError(message, public=message)


def _make_named_task(name: str, columns: Sequence[TargetColumn]) -> Task:
    kind, names = find_task(name), tuple(column.name for column in columns)
    if issubclass(kind, Segmentation):
        raise InputError(f"task.name={name} takes masks of images, not columns: use the dataset masks")
    if issubclass(kind, Survival) and len(columns) != 2:
        raise InputError(f"task.name={name} needs two target columns, as in data.target=event,time; got {len(columns)}")
    if kind.has_classes:
        if len(columns) != 1:
            raise InputError(f"data.target names {len(columns)} columns, but a class is one: name one column")
        if columns[0].kind == "real":
            fix = f"set task.name=regression, or make two classes with data.target={names[0]}>NUMBER"
            raise InputError(f"task.name={name} takes classes, but {names[0]} holds numbers that are not whole: {fix}")
        return kind(())
    return kind(names)


def assign_task(domains: Domains, wanted: WantedTask) -> Domains:
    """Give a dataset of arrays its task, with targets and strata in the form of that task."""
    raw = domains.domains[0].train.targets
    if raw is None and (wanted is None or not all(label.isdecimal() for label in domains.classes)):
        task = wanted if isinstance(wanted, Task) else CLASSIFICATION if wanted is None else find_task(wanted)(())
        if not task.has_classes:
            fix = "leave task.name out, or set task.name=classification"
            raise InputError(f"task.name={task.name} does not fit {domains.name}, which holds classes: {fix}")
        return replace(domains, task=task)
    if not domains.task.has_classes:  # the dataset has chosen
        names = domains.task.names
        task = domains.task if wanted is None else wanted if isinstance(wanted, Task) else find_task(wanted)(names)
        if not isinstance(task, type(domains.task)):
            raise InputError(f"task.name={task.name} does not fit {domains.name}: its task is {domains.task.name}")
        return replace(domains, task=task)
    arrays = [split.select_targets(np.arange(len(split))) for domain in domains for split in domain.splits]
    task = wanted if isinstance(wanted, Task) else _choose_array_task(wanted, arrays)
    if task.has_classes:
        if raw is not None:
            raise InputError(f"task.name={task.name} takes classes: y must be one whole number a sample")
        return replace(domains, task=task)

    def convert(split: Split, where: str) -> Split:
        kind = np.uint8 if isinstance(task, Segmentation) else np.float32
        targets = np.zeros((len(split.images), *split.select_targets(np.arange(1)).shape[1:]), kind)
        targets = targets[:, None] if targets.ndim == 1 else targets
        for start in range(0, len(split), CHUNK):
            rows = np.arange(start, min(start + CHUNK, len(split)))
            values = torch.from_numpy(split.select_targets(rows).astype(np.int64 if kind == np.uint8 else np.float64))
            targets[split.where[rows]] = task.check_targets(values, where).numpy()
        return replace(split, targets=targets, labels=task.strata(targets[split.where]))

    converted = []
    for domain in domains:
        train, test = (
            convert(domain.train, f"y_train of {domain.name!r}"),
            convert(domain.test, f"y_test of {domain.name!r}"),
        )
        validation = None if domain.validation is None else convert(domain.validation, f"y of {domain.name!r}")
        converted.append(Domain(domain.name, train, test, validation))
    return replace(domains, classes=(), domains=tuple(converted), task=task)


def _choose_array_task(wanted: str | None, arrays: Sequence[NDArray[Any]]) -> Task:
    """Return the wanted task on these targets, or the one that they suggest."""
    first = arrays[0]
    width = first.shape[1] if first.ndim > 1 else 1
    is_binary = all(((values == 0) | (values == 1)).all() for values in arrays)
    if wanted is None:
        kind: type[Task] = Segmentation if first.ndim == 3 else MultiLabel if width > 1 and is_binary else Regression
    else:
        kind = find_task(wanted)
    if kind.has_classes:
        return kind(())
    if issubclass(kind, Segmentation) != (first.ndim == 3):
        shape = "a class number for each pixel, (N, H, W)" if issubclass(kind, Segmentation) else "numbers (N, T)"
        raise InputError(f"task.name={wanted} takes {shape}, but y is of the shape {describe_shape(first.shape)}")
    if issubclass(kind, Segmentation):
        return kind(name_pixel_classes(arrays))
    if issubclass(kind, Survival):
        return kind(("event", "time"))
    return kind(("y",) if width == 1 else tuple(str(column) for column in range(width)))


def name_pixel_classes(masks: Sequence[NDArray[Any]]) -> tuple[str, ...]:
    """Number the classes of masks, of which all up to the highest occur."""
    present = np.zeros(MAX_CLASSES, dtype=bool)
    for part in (array[start : start + CHUNK] for array in masks for start in range(0, len(array), CHUNK)):
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= MAX_CLASSES:
            raise InputError(f"a mask holds the class {low if low < 0 else high}: classes are 0 to 255")
        present |= np.bincount(part.ravel(), minlength=MAX_CLASSES) > 0
    count = int(np.flatnonzero(present)[-1]) + 1
    if not present[:count].all():
        gap = int(np.argmin(present))
        fix = f"number classes from 0, without gaps, such as {gap} for {count - 1}"
        raise InputError(f"no mask has a pixel of class {gap}, but one has class {count - 1}: {fix}")
    if count < 2:
        raise InputError("all masks are 0, the background: mark the pixels of other classes")
    return tuple(str(number) for number in range(count))
