"""Regression: one or several numbers for each example."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcir.errors import InputError
from fedcir.tasks.task import Sums, Task, average_known, check_shape, divide
from fedcir.types import Metric

STRATA = 4


@dataclass(frozen=True)
class Regression(Task):
    """Squared error; RMSE, MAE and R2 in the units of the targets (N, T), whose columns `names` lists.

    The network predicts standardised targets, so that the learning rate does not depend on their units.
    """

    means: tuple[float, ...] = ()
    """Mean of each target column over the training rows of all clients; without it, targets are not standardised."""
    spreads: tuple[float, ...] = ()
    """Standard deviation of each target column."""

    metrics_reported = (
        Metric("rmse", "RMSE", higher_is_better=False, is_share=False),
        Metric("mae", "MAE", higher_is_better=False, is_share=False),
        Metric("r2", "R2", is_share=False),
    )
    loss_name = "mse"
    takes_sums = True

    def __post_init__(self) -> None:
        widths = {len(self.means), len(self.spreads)}
        is_finite = all(math.isfinite(mean) for mean in self.means) and all(0 < s < math.inf for s in self.spreads)
        if widths not in ({0}, {len(self.names)}) or not is_finite:
            raise InputError(f"the task's means and spreads must be {len(self.names)} finite numbers each, or none")

    def fit(self, means: Sequence[float], spreads: Sequence[float]) -> Self:
        return replace(self, means=tuple(means), spreads=tuple(spreads))

    def check_targets(self, targets: Tensor, source: str) -> Tensor:
        targets = targets[:, None] if targets.ndim == 1 else targets
        columns = len(self.names)
        check_shape(targets, [columns], source, f"give {columns} number{'s' * (columns > 1)} a sample")
        values = targets.float()
        if not values.isfinite().all():
            raise InputError(f"{source} gives targets that are not finite, or too large for single precision")
        return values

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.means:
            targets = (targets - outputs.new_tensor(self.means)) / outputs.new_tensor(self.spreads)
        return (outputs - targets).square().mean()

    @property
    def sum_names(self) -> tuple[str, ...]:
        kinds = ("squared", "absolute", "total", "squares")
        return ("count", *(f"{kind}_{column}" for kind in kinds for column in range(len(self.names))))

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        truth = targets.double()
        errors = self.predict(outputs).double() - truth
        sums = {"count": float(len(targets))}
        for kind, values in (
            ("squared", errors.square()),
            ("absolute", errors.abs()),
            ("total", truth),
            ("squares", truth.square()),
        ):
            sums |= {f"{kind}_{column}": total for column, total in enumerate(values.sum(0).tolist())}
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the target columns."""
        by_column = [self._scores(sums, column) for column in range(len(self.names))]
        return {metric.name: average_known(s[metric.name] for s in by_column) for metric in self.metrics_reported}

    def scores_by_name(self, sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
        return {name: self._scores(sums, column) for column, name in enumerate(self.names) if len(self.names) > 1}

    def _scores(self, sums: Mapping[str, float], column: int) -> dict[str, float]:
        count, squared = sums["count"], sums[f"squared_{column}"]
        spread = sums[f"squares_{column}"] - sums[f"total_{column}"] ** 2 / count
        r2 = 1 - divide(squared, spread if spread > 1e-12 * sums[f"squares_{column}"] else 0)
        return {"rmse": math.sqrt(squared / count), "mae": sums[f"absolute_{column}"] / count, "r2": r2}

    def find_sums_fault(self, sums: Mapping[str, float]) -> str | None:
        fault = super().find_sums_fault(sums)
        if fault is None and any(value < 0 for name, value in sums.items() if not name.startswith("total_")):
            return "its sums of errors are negative"
        return fault

    def predict(self, outputs: Tensor) -> Tensor:
        if not self.means:
            return outputs
        return outputs * outputs.new_tensor(self.spreads) + outputs.new_tensor(self.means)

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        """Quarter of the first column that an example lies in."""
        first = np.asarray(targets, dtype=np.float64).reshape(len(targets), -1)[:, 0]
        edges = np.quantile(first, np.arange(1, STRATA) / STRATA) if len(first) else np.zeros(0)
        return np.searchsorted(edges, first).astype(np.int64)
