"""Targets of images in a table: data.target names its columns, such as findings, a number, or an event and a time."""

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from fedcir.config import DataConfig
from fedcir.data.domains import CLASSIFICATION
from fedcir.data.sources.source import ImageFiles, ImageIndex
from fedcir.data.sources.target_columns import list_labels, read_targets, summarise_targets
from fedcir.data.targets import WantedTask, choose_task
from fedcir.tasks.task import Task


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
