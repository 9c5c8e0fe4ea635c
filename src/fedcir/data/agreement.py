"""What the sites of a run agree on without moving rows: the task, and how the columns of tables become features.

A site tells its task, the kinds and categories of its columns, and sums over its training rows. Sums are exact, so that
a run across sites agrees on the same bits as a run in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedcir.config import Config
from fedcir.data.domains import Domains, Indices
from fedcir.data.encoding import (
    MAX_CATEGORIES,
    ColumnSummary,
    Scale,
    TableEncoding,
    merge_columns,
    read_encoding,
    select_used,
    sum_columns,
)
from fedcir.errors import InputError
from fedcir.tasks.segmentation import Segmentation
from fedcir.tasks.task import Task, make_task
from fedcir.validation import build_dataclass


class Agreement(NamedTuple):
    """The task, fitted to the targets of all sites, and the encoding of tables."""

    task: Task
    encoding: TableEncoding | None

    def with_classes(self, classes: Sequence[str]) -> "Agreement":
        """Name the classes of a task that has any."""
        return self._replace(task=replace(self.task, names=tuple(classes))) if self.task.has_classes else self

    def to_card(self) -> dict[str, Any]:
        table = {} if self.encoding is None else {"table": self.encoding.to_card()}
        return {"task": self.task.to_card(), **table}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> "Agreement":
        return cls(make_task(card["task"]), read_encoding(card["table"]) if "table" in card else None)


@dataclass(frozen=True)
class DataSummary:
    """What a site tells of its data, besides the number of its samples and the names of its classes."""

    task: Task
    columns: tuple[ColumnSummary, ...] = ()
    """Columns of a table, with sums over training rows where the scaling needs them."""
    targets: tuple[ColumnSummary, ...] = ()
    """Target columns with their sums, for tasks that take them."""

    def to_card(self) -> dict[str, Any]:
        parts = {"columns": self.columns, "targets": self.targets}
        return {"task": self.task.to_card(), **{name: [asdict(part) for part in p] for name, p in parts.items()}}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> "DataSummary":
        columns, targets = (
            tuple(build_dataclass(ColumnSummary, column, name) for column in card[name])
            for name in ("columns", "targets")
        )
        if crowded := next((column for column in columns if len(column.categories) > MAX_CATEGORIES), None):
            raise InputError(f"column {crowded.name!r} has {len(crowded.categories):,} categories at a site")
        return cls(make_task(card["task"]), columns, targets)


def summarise_data(config: Config, domains: Domains, rows: Mapping[str, Indices]) -> DataSummary:
    """Summarise a dataset with sums over these training rows by domain, where scaling or task take any."""
    task, columns = domains.task, domains.columns
    targets = tuple(ColumnSummary(name, "number") for name in task.names) if task.takes_sums else ()
    if columns or targets:
        check_scaling(config)
    if columns:
        columns = select_used(columns, [s.pixels(np.arange(len(s))) for domain in domains for s in domain.splits])
    if config.data.scale != "federation" or not rows:
        return DataSummary(task, columns)
    splits = {name: domains[name].train.take(part) for name, part in rows.items()}
    every = {name: np.arange(len(split)) for name, split in splits.items()}
    if columns:
        columns = merge_columns({name: sum_columns(columns, s.pixels(every[name])) for name, s in splits.items()})
    if targets:
        values = {name: split.select_targets(every[name]).astype(np.float64) for name, split in splits.items()}
        targets = merge_columns({name: sum_columns(targets, part) for name, part in values.items()})
    return DataSummary(task, columns, targets)


def agree(sites: Mapping[str, DataSummary], scale: Scale) -> Agreement:
    """Agree on the task and on the encoding of tables."""
    task = merge_tasks({site: summary.task for site, summary in sites.items()})
    targets = {site: summary.targets for site, summary in sites.items() if summary.targets}
    if targets:
        merged = merge_columns(targets)
        task = task.fit([column.mean for column in merged], [column.spread for column in merged])
    columns = {site: summary.columns for site, summary in sites.items()}
    return Agreement(task, TableEncoding.fit(merge_columns(columns), scale) if any(columns.values()) else None)


def merge_tasks(tasks: Mapping[str, Task]) -> Task:
    """Return the task of all sites; of masks, the one with most classes."""
    (first, task), *others = tasks.items()
    for site, other in others:
        if isinstance(task, Segmentation) and isinstance(other, Segmentation):
            task = max(task, other, key=lambda segmentation: len(segmentation.names))
        elif other != task and not (task.has_classes and type(other) is type(task)):
            own, theirs = (f"{t.name} of {', '.join(t.names)}".removesuffix(" of ") for t in (task, other))
            raise InputError(
                f"the data of site {first!r} suggest {own}, those of site {site!r} {theirs}: set task.name, and give "
                "all sites the same targets"
            )
    return task


def check_scaling(config: Config) -> None:
    """Refuse statistics of rows that differential privacy does not protect."""
    scale, privacy = config.data.scale, config.privacy
    if privacy.noise and (scale == "federation" or (scale == "client" and privacy.unit == "example")):
        fix = "none" if privacy.unit == "example" else "client, or none"
        reason = "scales by exact sums over rows, which privacy.noise does not protect"
        raise InputError(f"data.scale={scale} {reason}: set data.scale={fix}")
