"""Charts as values, which the HTML page draws in the browser and `reporting/drawing.py` with matplotlib."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fedcir.runs.reader import Run
from fedcir.runs.statistics import Estimate, Interval
from fedcir.types import RoundRecord

Values = tuple[float, ...]
Measure = Callable[[RoundRecord], float | None]


@dataclass(frozen=True)
class Series:
    """Points of one method, with lower and upper ends of their error bars."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None

    @classmethod
    def from_intervals(cls, name: str, intervals: Sequence[Interval]) -> "Series":
        """Make a series at x = 0, 1, 2, ... from values with their intervals."""
        value, low, high = (tuple(getattr(interval, end) for interval in intervals) for end in ("value", "low", "high"))
        return cls(name, tuple(map(float, range(len(intervals)))), value, low, high)


@dataclass(frozen=True)
class Lines:
    """Line chart, or points if they are not `joined`."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    """Labels of x = 0, 1, 2, ..., if the axis is categorical."""
    joined: bool = True
    diagonal: bool = False
    """Draw the line of equal x and y; both axes are the same quantity."""


@dataclass(frozen=True)
class Bars:
    """A bar for each series in each group."""

    title: str
    y: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]
    """Their x are numbers of groups."""


@dataclass(frozen=True)
class Heatmap:
    """A number in each cell of a grid; None where there is none."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    low: float
    high: float
    unit: str = ""
    """Name of what is counted, if cells are counts."""

    @classmethod
    def from_counts(cls, counts: NDArray[np.int64], rows: Sequence[str], columns: Sequence[str]) -> "Heatmap":
        """Make a heatmap of numbers of images; zeros stay empty."""
        cells = tuple(tuple(int(count) or None for count in row) for row in counts)
        return cls("images", tuple(rows), tuple(columns), cells, 0.0, float(counts.max()), "images")


@dataclass(frozen=True)
class Scatter:
    """Points in the plane, each of a group."""

    title: str
    groups: tuple[str, ...]
    points: tuple[tuple[float, float, int], ...]
    """x, y and the number of the group."""


Chart = Lines | Bars | Heatmap | Scatter


def build_curve(name: str, runs: Iterable[Run], measure: Measure, along: Measure | None = None) -> Series | None:
    """Compute the mean over seeds by round, or by the cumulative sum of `along`; the band spans all seeds.

    Rounds that some seed lacks are left out. Returns None if no round is left.
    """
    by_seed: list[dict[int, tuple[float, float]]] = []
    for run in runs:
        points, spent = {}, 0.0
        for record in run.records:
            spent += 0.0 if along is None else along(record) or 0.0
            if (value := measure(record)) is not None:
                points[record.round] = (float(record.round) if along is None else spent, value)
        by_seed.append(points)
    rounds = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    if not rounds:
        return None
    values = [[points[round][1] for points in by_seed] for round in rounds]
    x = tuple(fmean(points[round][0] for points in by_seed) for round in rounds)
    ends = (tuple(map(min, values)), tuple(map(max, values))) if len(by_seed) > 1 else (None, None)
    return Series(name, x, tuple(map(fmean, values)), *ends)


def series_with_errors(name: str, estimates: Sequence[Estimate | None]) -> Series:
    """Make a series at x = 0, 1, 2, ... from means, with their standard deviations as error bars; None is left out."""
    points = [(float(x), estimate.mean, estimate.std) for x, estimate in enumerate(estimates) if estimate is not None]
    x, y = tuple(x for x, _, _ in points), tuple(mean for _, mean, _ in points)
    if not any(std for _, _, std in points):
        return Series(name, x, y)
    low, high = (tuple(mean + sign * (std or 0.0) for _, mean, std in points) for sign in (-1, 1))
    return Series(name, x, y, low, high)


def score(record: RoundRecord) -> float | None:
    """Mean of the primary metric over the domains trained on, in per cent if it is a share."""
    return None if record.score_mean is None else record.metric.scale * record.score_mean


def score_unseen(record: RoundRecord) -> float | None:
    """Mean of the primary metric over the domains not trained on, in per cent if it is a share."""
    return None if record.score_unseen is None else record.metric.scale * record.score_unseen


def risk(record: RoundRecord) -> float | None:
    """Mean test loss of the global model over clients."""
    return record.risk_mean


def training_loss(record: RoundRecord) -> float | None:
    """Mean training cross-entropy over clients."""
    return record.losses.get("ce")


def convergence_chart(runs: Mapping[str, Mapping[int, Run]]) -> Lines:
    """Make the chart of the mean score by round, one line for each method."""
    metric = next(run.metric for by_seed in runs.values() for run in by_seed.values())
    unseen = any(record.unseen for by_seed in runs.values() for run in by_seed.values() for record in run.records)
    averaged = "domains trained on" if unseen else "domains"
    unit = " (%)" if metric.is_share else ""
    return plot_runs(runs, score, f"test {metric.title}, mean over {averaged}{unit}")


def plot_runs(
    runs: Mapping[str, Mapping[int, Run]], measure: Measure, y: str, x: str = "round", along: Measure | None = None
) -> Lines:
    """Make the chart of a measure, one line for each method that has it."""
    curves = [build_curve(name, by_seed.values(), measure, along) for name, by_seed in runs.items()]
    return Lines("", x, y, tuple(curve for curve in curves if curve is not None))
