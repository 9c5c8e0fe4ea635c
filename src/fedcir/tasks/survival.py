"""Survival: the risk of an event over time, with censored examples (Cox's proportional hazards)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcir.errors import InputError
from fedcir.tasks.task import Sums, Task, check_shape, divide
from fedcir.types import Metric

INTERVALS = 20
"""Intervals of the time grid of survival curves."""
GROUPS = ("low", "high")
"""Examples whose risk is at most the median of their client, and the others."""
BLOCK = 1024


@dataclass(frozen=True)
class Survival(Task):
    """Cox's partial likelihood (Breslow) and the concordance index; targets (N, 2) are event (0 or 1) and time.

    A linear network is Cox's model, a deep one DeepSurv. Concordance compares examples of one client only. Events and
    censored examples in each interval of a fixed grid give survival curves by risk group.
    """

    horizon: float = 0.0
    """End of the time grid; 0 without survival curves."""

    metrics_reported = (Metric("concordance", "concordance index"),)
    loss_name = "cox"
    compares_examples = True
    takes_sums = True
    adds_over_batches = False

    def __post_init__(self) -> None:
        if not 0 <= self.horizon < math.inf:
            raise InputError(f"the task's horizon must be a time, or 0, got {self.horizon}")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def predicted_names(self) -> tuple[str, ...]:
        return ("risk",)

    def fit(self, means: Sequence[float], spreads: Sequence[float]) -> Self:
        """End the grid three standard deviations above the mean time, so that intervals have round lengths."""
        end = means[1] + 3 * spreads[1]
        unit = 10.0 ** math.floor(math.log10(end))
        return replace(self, horizon=next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= end))

    def check_targets(self, targets: Tensor, source: str) -> Tensor:
        check_shape(targets, [2], source, "give the event (1, or 0 if censored) and the time of each sample")
        event, time = targets[:, 0], targets[:, 1]
        wrong = (event != 0) & (event != 1)
        if wrong.any():
            fix = "events are 1, or 0 if censored, and come before times, as in data.target=event,time"
            raise InputError(f"{source} gives the event {event[wrong][0].item():g}: {fix}")
        if not (time >= 0).all():
            raise InputError(f"{source} gives the time {time[~(time >= 0)][0].item():g}: times are 0 or more")
        values = targets.float()
        if not values.isfinite().all():
            raise InputError(f"{source} gives a time that is not finite, or too large for single precision")
        return values

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log partial likelihood, divided by the number of examples: clients weighted by it add up to all."""
        event, time = targets.unbind(1)
        time, order = time.sort(descending=True, stable=True)
        risk, event = outputs.flatten()[order], event[order]
        last = torch.searchsorted(-time, -time, right=True) - 1  # of examples at risk: ties are at risk together
        return ((risk.logcumsumexp(0)[last] - risk) * event).mean()

    @property
    def sum_names(self) -> tuple[str, ...]:
        kinds = [f"{group}_{kind}" for group in GROUPS for kind in ("events", "censored")] if self.horizon else []
        curves = [f"{kind}_{interval}" for kind in kinds for interval in range(INTERVALS)]
        return ("count", "concordant", "pairs", *(GROUPS if self.horizon else ()), *curves)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        risk = outputs.flatten().double().cpu().numpy()
        event, time = targets.double().cpu().numpy().T
        concordant, pairs = count_concordant(risk, event > 0, time)
        sums = {"count": float(len(risk)), "concordant": concordant, "pairs": pairs}
        if not self.horizon:
            return sums
        is_high = risk > np.median(risk)
        interval = np.floor(time * (INTERVALS / self.horizon))
        for group, members in zip(GROUPS, (~is_high, is_high), strict=True):
            sums[group] = float(members.sum())
            for kind, chosen in (("events", event > 0), ("censored", event == 0)):
                rows = interval[members & chosen & (interval < INTERVALS)].astype(int)
                counts = np.bincount(rows, minlength=INTERVALS).tolist()
                sums |= {f"{group}_{kind}_{number}": float(count) for number, count in enumerate(counts)}
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"concordance": divide(sums["concordant"], sums["pairs"])}

    def find_sums_fault(self, sums: Mapping[str, float]) -> str | None:
        if fault := super().find_sums_fault(sums):
            return fault
        groups = GROUPS if self.horizon else ()
        is_valid = 0 <= 2 * sums["concordant"] <= 2 * sums["pairs"] <= sums["count"] ** 2
        for group in groups:
            counts = [value for name, value in sums.items() if name.startswith(f"{group}_")]
            is_valid = is_valid and min(counts) >= 0 and sum(counts) <= sums[group]
        is_valid = is_valid and (not groups or sum(sums[group] for group in groups) == sums["count"])
        return None if is_valid else "its counts are invalid"

    def predict(self, outputs: Tensor) -> Tensor:
        """Log of the hazard relative to an example whose output is 0."""
        return outputs

    def summarise(self, targets: NDArray[Any]) -> dict[str, float]:
        """Share of examples with the event, and the median of all times, censored ones among them."""
        event, time = np.asarray(targets, dtype=np.float64).T
        return {f"{self.names[0]} (%)": 100 * float(event.mean()), f"{self.names[1]} median": float(np.median(time))}

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        return np.asarray(targets)[:, 0].astype(np.int64)

    def curve(self, sums: Mapping[str, float], *groups: str) -> list[tuple[float, float]]:
        """Survival of risk groups together at the ends of the intervals (time, share), by the life-table method.

        Censored examples are at risk for half of their interval.
        """
        at_risk, share, points = sum(sums[group] for group in groups), 1.0, [(0.0, 1.0)]
        for interval in range(INTERVALS):
            events, censored = (
                sum(sums[f"{group}_{kind}_{interval}"] for group in groups) for kind in ("events", "censored")
            )
            if at_risk - censored / 2 <= 0:
                break
            share *= max(0.0, 1 - events / (at_risk - censored / 2))
            at_risk -= events + censored
            points.append((self.horizon * (interval + 1) / INTERVALS, share))
        return points


def count_concordant(
    risk: NDArray[np.float64], event: NDArray[np.bool_], time: NDArray[np.float64]
) -> tuple[float, float]:
    """Concordant and comparable pairs of examples (Harrell): the first has the event while the second is at risk.

    Of equal times, an event comes before a censored example, and two events are not compared. Equal risks count half.
    """
    concordant = pairs = 0.0
    rows = np.flatnonzero(event)
    for start in range(0, len(rows), BLOCK):
        first = rows[start : start + BLOCK, None]
        comparable = (time[first] < time) | ((time[first] == time) & ~event)
        concordant += float((comparable & (risk[first] > risk)).sum())
        concordant += float((comparable & (risk[first] == risk)).sum()) / 2
        pairs += float(comparable.sum())
    return concordant, pairs
