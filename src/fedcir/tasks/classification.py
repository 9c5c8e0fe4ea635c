"""Classification: one class for each example."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedcir.errors import InputError
from fedcir.tasks.task import Sums, Task, make_task
from fedcir.types import ACCURACY
from fedcir.validation import Between


def to_task(task: Task | int) -> Task:
    """Return a task, which a number stands for if it is classification with classes of no names."""
    return Classification(tuple(map(str, range(task)))) if isinstance(task, int) else task


def choose_task(task: Task | None, num_classes: int | None) -> Task:
    """Return the task of a call in Python, which names either a task or a number of classes."""
    if (task is None) == (num_classes is None):
        given = "neither" if task is None else "both"
        raise InputError(f"give either num_classes or task, such as fedcir.Regression(('bmi',)), got {given}")
    if num_classes is None:
        if not isinstance(task, Task):
            raise InputError(f"task must be one such as fedcir.Regression(('bmi',)), got {task!r}")
        return task
    try:
        count = operator.index(num_classes)
    except TypeError as error:
        raise InputError(f"num_classes must be a whole number, got {num_classes!r}") from error
    Between(2, 1_000_000).check("num_classes", count)
    return to_task(count)


def describe_task(task: Task) -> dict[str, Any]:
    """Describe a task in the metadata of a model; `read_task` is its inverse."""
    classes = {"classes": list(task.names) if task.has_classes else []}
    return classes if type(task) is Classification else {**classes, "task": task.to_card()}


def read_task(card: Mapping[str, Any], folder: Path | None = None) -> Task:
    """Read the task of a model's metadata, which is classification unless they name another one; see `make_task`."""
    return make_task(card["task"], folder) if "task" in card else Classification(tuple(card["classes"]))


@dataclass(frozen=True)
class Classification(Task):
    """Cross-entropy and accuracy; `names` are the classes."""

    metrics_reported = (ACCURACY,)
    has_classes = True
    loss_name = "ce"

    def check_targets(self, targets: Tensor, source: str) -> Tensor:
        """Convert labels of any number type to class numbers (N,)."""
        if targets.numel() != len(targets):
            rows = targets.flatten(1).double()
            is_one_hot = ((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all()
            advice = "several targets a sample need another task, such as multilabel or segmentation"
            advice = "these are one-hot, so labels.argmax(-1) gives them" if is_one_hot else advice
            shape = list(targets.shape[1:])
            raise InputError(f"{source} gives labels of the shape {shape}: give one class number a sample; {advice}")
        flat, classes = targets.reshape(-1), len(self.names)
        numbers = flat.long()
        wrong = (flat.double() != numbers) | (numbers < 0) | (numbers >= classes)
        if wrong.any():
            label, fix = flat[wrong][0].item(), f"labels are whole numbers from 0 to {classes - 1}"
            raise InputError(f"{source} gives the label {label}: with num_classes={classes}, {fix}")
        return numbers

    def example_targets(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), dtype=torch.int64)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def total_loss(self, outputs: Tensor, targets: Tensor) -> float:
        return float(F.cross_entropy(outputs, targets, reduction="sum"))

    @property
    def sum_names(self) -> tuple[str, ...]:
        return ("correct", "count")

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        correct = outputs.argmax(-1) == targets
        return {"correct": float(correct.sum()), "count": float(len(targets))}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["correct"] / sums["count"]}

    def find_sums_fault(self, sums: Mapping[str, float]) -> str | None:
        """A share of correct predictions is at most all of them."""
        fault = super().find_sums_fault(sums)
        is_valid = fault is None and 0 <= sums["correct"] <= sums["count"] and sums["correct"] % 1 == 0
        return fault or (None if is_valid else "its counts are invalid")

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)

    def summarise(self, targets: NDArray[Any]) -> dict[str, float]:
        """Share of the examples of each class."""
        counts = np.bincount(np.asarray(targets, dtype=np.int64), minlength=len(self.names))
        return {
            f"{name} (%)": 100 * float(n) / max(1, len(targets)) for name, n in zip(self.names, counts, strict=True)
        }

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        return np.asarray(targets, dtype=np.int64)
