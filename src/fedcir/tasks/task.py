"""The protocol of tasks: head, loss, additive metrics and prediction, and how a task is found by its name.

Tasks are found like algorithms: by name, by file (`./mine.py`) or by entry point (group `fedcir.tasks`).
"""

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedcir.tasks
from fedcir.errors import InputError
from fedcir.plugins import find_only, find_plugin, is_file_plugin, name_plugin
from fedcir.types import Metric
from fedcir.validation import build_dataclass

Head = nn.Linear | nn.Conv2d
"""Last layer of a network, which has a weight and a bias."""
Sums = dict[str, float]
"""Sums over examples by name, which add over batches, clients and sites. "count" is the number of examples."""


@dataclass(frozen=True)
class Task(ABC):
    """What is predicted and how it is judged. Fields describe the targets of one dataset; there is no other state.

    Targets are int64 class numbers (N,) or (N, H, W), or float32 columns (N, T).
    """

    names: tuple[str, ...]
    """Names of the classes, of the labels, or of the columns that are predicted."""

    metrics_reported: ClassVar[tuple[Metric, ...]]
    """Metrics that `scores` returns; the first is the primary one, by which rounds and methods are compared."""
    has_classes: ClassVar[bool] = False
    """Whether every example has exactly one class, as methods with `needs_classes` require."""
    loss_name: ClassVar[str] = "loss"
    """Name of the loss in records."""
    uses_maps: ClassVar[bool] = False
    """Whether the head takes maps of features (B, F, H, W) instead of vectors (B, F)."""
    compares_examples: ClassVar[bool] = False
    """Whether the loss of an example depends on the others of its batch."""
    takes_sums: ClassVar[bool] = False
    """Whether `fit` is called with the sums over the targets of all training rows."""
    adds_over_batches: ClassVar[bool] = True
    """Whether `metrics` adds over batches of a client; otherwise it is computed on all its examples at once."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def primary(self) -> Metric:
        return self.metrics_reported[0]

    @property
    def outputs(self) -> int:
        """Width of the head's output."""
        return len(self.names)

    @property
    def predicted_names(self) -> tuple[str, ...]:
        """Names of the columns of `predict`."""
        return self.names

    def head(self, features: int) -> Head:
        return nn.Linear(features, self.outputs)

    @abstractmethod
    def check_targets(self, targets: Tensor, source: str) -> Tensor:
        """Return the targets of a dataset in the form of `loss`; raise InputError for values that are out of range."""

    def example_targets(self, x: Tensor) -> Tensor:
        """Targets of the shape and type of `check_targets` for a batch of inputs, to count operations with."""
        return x.new_zeros(len(x), len(self.names), dtype=torch.float32)

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a batch."""

    def total_loss(self, outputs: Tensor, targets: Tensor) -> float:
        """Summed loss of a batch, for evaluation."""
        return float(self.loss(outputs, targets)) * len(targets)

    @property
    @abstractmethod
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums that `metrics` returns."""

    @abstractmethod
    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        """Sums over a batch, from which `scores` computes the metrics of any number of batches, clients and sites."""

    @abstractmethod
    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name; NaN where the examples do not define one."""

    def scores_by_name(self, sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Metrics of each label, class or column by its name; empty if the task has one output."""
        return {}

    def find_sums_fault(self, sums: Mapping[str, float]) -> str | None:
        """Return why the sums of a client cannot be valid; None if they can."""
        if sums.keys() != set(self.sum_names):
            return "its sums are not those of the task"
        count = sums["count"]
        if not (np.isfinite(list(sums.values())).all() and count > 0 and count % 1 == 0):
            return "its counts are invalid"
        return None

    def fit(self, means: Sequence[float], spreads: Sequence[float]) -> Self:
        """Return the task fitted to the mean and the standard deviation of each target column over training rows."""
        return self

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Predictions in the units of the targets: probabilities, values or risks."""

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        """Group of each example (N,) that splits and partitions balance; one group if there is nothing to balance."""
        return np.zeros(len(targets), dtype=np.int64)

    def summarise(self, targets: NDArray[Any]) -> dict[str, float]:
        """Describe how targets are distributed: numbers by their titles, to compare sites; shares in per cent."""
        values = np.asarray(targets, dtype=np.float64).reshape(len(targets), -1)
        columns = zip(self.names, values.T, strict=True)
        return {
            f"{name} {kind}": float(f(column))
            for name, column in columns
            for kind, f in (("mean", np.mean), ("SD", np.std))
        }

    def to_card(self) -> dict[str, Any]:
        """Return the fields and the name, for the metadata of a model; `make_task` reads them."""
        return {"name": name_plugin("task", type(self)) or self.name, **asdict(self)}


def list_tasks() -> list[str]:
    """List the names of the built-in tasks."""
    return sorted(module.name for module in pkgutil.iter_modules(fedcir.tasks.__path__) if module.name != "task")


def find_task(name: str) -> type[Task]:
    """Find the class of a task by its name, by a file such as ./mine.py, or by entry point."""

    def import_task(task: str) -> Any:
        return find_only(importlib.import_module(f"fedcir.tasks.{task}"), _is_task, task, EXPECTED)

    builtin = {task: partial(import_task, task) for task in list_tasks()}
    found: type[Task] = find_plugin("task", name, builtin, _is_task, EXPECTED)
    return found


EXPECTED = "one subclass of fedcir.Task"


def _is_task(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value is not Task


def make_task(card: Mapping[str, Any], folder: Path | None = None) -> Task:
    """Make the task that `to_card` described; a user's file is that in a trusted folder, and refused without one."""
    name, fields = str(card["name"]), {name: value for name, value in card.items() if name != "name"}
    if is_file_plugin(name):
        if folder is None:
            message = f"the task is code of its own, {name}, which was not run: if you trust it, set trust_code"
            raise InputError(message, public="the task is a Python file, which is not run")
        name = str(folder / Path(name).name)
    return build_dataclass(find_task(name), fields, "task")


def average_known(values: Iterable[float]) -> float:
    """Mean of the numbers that are not NaN; NaN if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def divide(total: float, count: float) -> float:
    """Quotient of two sums; NaN where nothing was counted."""
    return total / count if count else math.nan


def add_sums(parts: Sequence[Mapping[str, float]]) -> Sums:
    """Add up sums of the same names."""
    return {name: sum(part[name] for part in parts) for name in parts[0]} if parts else {}


def check_shape(targets: Tensor, shape: Sequence[int], source: str, advice: str) -> None:
    """Raise InputError unless the targets have this shape after the first dimension."""
    if list(targets.shape[1:]) != list(shape):
        raise InputError(f"{source} gives targets of the shape {describe_shape(targets.shape)}: {advice}")


def describe_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(['N', *map(str, shape[1:])])})"
