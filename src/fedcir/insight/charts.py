"""What a figure shows, before anything is drawn: numbers with names. The page and the plots draw the same ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedcir.runs.run import Run
from fedcir.types import RoundRecord

Values = tuple[float, ...]
Measure = Callable[[RoundRecord], float | None]


@dataclass(frozen=True)
class Series:
    """One method's points, and how far up and down they spread."""

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Lines:
    """Points along an axis, joined where the axis is a quantity."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    """Names of the places 0, 1, 2, ... where the axis is no number."""
    joined: bool = True
    diagonal: bool = False
    """Whether both axes are the same quantity, with a line where they are equal."""


@dataclass(frozen=True)
class Bars:
    """A bar for each series in each group."""

    title: str
    y: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]
    """Their x are the numbers of the groups."""


@dataclass(frozen=True)
class Heat:
    """A number in each cell of a grid; None where there is none."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    low: float
    high: float
    unit: str = ""
    """A word for what is counted; per cent or a plain number if not given."""


@dataclass(frozen=True)
class Cloud:
    """Points in the plane, each of a group."""

    title: str
    groups: tuple[str, ...]
    points: tuple[tuple[float, float, int], ...]
    """x, y and the number of the group."""


Chart = Lines | Bars | Heat | Cloud


def curve(name: str, runs: Iterable[Run], measure: Measure, along: Measure | None = None) -> Series | None:
    """The mean over seeds against the round, or against what `along` has added up to, from lowest to highest seed.

    Rounds that not all seeds have are left out; None if there is none.
    """
    by_seed = [_points(run.records, measure, along) for run in runs]
    rounds = sorted(set.intersection(*(set(each) for each in by_seed))) if by_seed else []
    if not rounds:
        return None
    values = [[each[round][1] for each in by_seed] for round in rounds]
    several = len(by_seed) > 1
    return Series(
        name,
        tuple(_mean([each[round][0] for each in by_seed]) for round in rounds),
        tuple(_mean(each) for each in values),
        tuple(min(each) for each in values) if several else None,
        tuple(max(each) for each in values) if several else None,
    )


def _points(records: Sequence[RoundRecord], measure: Measure, along: Measure | None) -> dict[int, tuple[float, float]]:
    """x and y of each round that has a y."""
    points, spent = {}, 0.0
    for record in records:
        spent += 0.0 if along is None else along(record) or 0.0
        if (value := measure(record)) is not None:
            points[record.round] = (float(record.round) if along is None else spent, value)
    return points


def spread(name: str, points: Sequence[tuple[float, float, float | None]]) -> Series:
    """Means, each with one standard deviation to both sides where there is one: x, mean, deviation."""
    x, y = tuple(float(place) for place, _, _ in points), tuple(mean for _, mean, _ in points)
    if not any(std for _, _, std in points):
        return Series(name, x, y)
    low, high = (tuple(mean + sign * (std or 0.0) for _, mean, std in points) for sign in (-1, 1))
    return Series(name, x, y, low, high)


def accuracy(record: RoundRecord) -> float | None:
    """In per cent, the plain mean over the domains that somebody trains on."""
    return None if record.accuracy_mean is None else 100 * record.accuracy_mean


def accuracy_unseen(record: RoundRecord) -> float | None:
    """The same over the domains that nobody trains on."""
    return None if record.accuracy_unseen is None else 100 * record.accuracy_unseen


def risk(record: RoundRecord) -> float | None:
    """The mean over clients of the global model's loss on their test images."""
    return record.risk_mean


def training_loss(record: RoundRecord) -> float | None:
    """The mean over clients of their own models' cross-entropy, while they train."""
    return record.losses.get("ce")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
