"""What each site of a federation gains from it and contributes to it.

A contribution is a Shapley value (L. S. Shapley, 1953, A value for n-person games): the mean gain that a site brings,
over all orders in which the sites can join.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from fedcir.runs.statistics import LEVEL, Interval

MARGIN = 0.01
"""A site loses nothing if the interval of its gain begins at minus one point or above."""
COLUMNS = ("alone", "averaged", "others", "together")
"""Models that are compared at a site: fields of SiteWorth."""

Values = NDArray[np.floating]


def shapley_weights(players: int) -> Values:
    """Weights (P, 2^P) by which the values of all coalitions add up to each player's Shapley value.

    The bits of a coalition's number are its members.
    """
    numbers = np.arange(1 << players)
    is_member = (numbers >> np.arange(players)[:, None] & 1).astype(bool)  # (P, 2^P)
    sizes = is_member.sum(0)
    joins = np.array([1 / (players * math.comb(players - 1, size)) for size in range(players)] + [0.0])
    weights: Values = np.where(is_member, joins[sizes - 1], -joins[sizes])
    return weights


def shapley_values(values: Sequence[Any]) -> Values:
    """Shapley values (P, ...) of a game from the value (...) of every coalition, in the order of their numbers."""
    weights = shapley_weights(len(values).bit_length() - 1)
    total = np.zeros((len(weights), *np.shape(values[0])))
    for column, value in zip(weights.T, values, strict=True):
        total += np.multiply.outer(column, value)
    return total


def paired_interval(differences: Values) -> Interval:
    """Mean of paired differences of hits, each -1, 0 or 1, with an interval that holds for few images too.

    D. G. Bonett, R. M. Price, 2012, Adjusted Wald confidence interval for a difference of binomial proportions based
    on paired data: it adds an image with 1 and one with -1.
    """
    value, count = float(differences.mean()), len(differences) + 2
    centre, squares = float(differences.sum()) / count, (float(np.square(differences).sum()) + 2) / count
    half = float(ndtri((1 + LEVEL) / 2)) * math.sqrt((squares - centre**2) / count)
    return Interval(value, max(-1.0, min(value, centre - half)), min(1.0, max(value, centre + half)))


@dataclass(frozen=True)
class SiteWorth:
    """Accuracies on the test images of one site, its gain from the federation and its contribution to it."""

    site: str
    images: int
    """Training images."""
    tested: int
    """Test images."""
    alone: Interval
    """Accuracy of the head from the site's own sums."""
    averaged: Interval
    """Accuracy of the mean of the other sites' own heads, as model averaging makes it."""
    others: Interval
    """Accuracy of the head from the sums of the others: of a federation that this site never joined."""
    together: Interval
    """Accuracy of the head from the sums of all."""
    gain: Interval
    """`together` minus `alone`, paired by image."""
    contribution: Interval
    """Part of the mean accuracy of the federation that is due to this site."""

    @property
    def verdict(self) -> str:
        points = self.gain.scaled(100)
        if self.gain.beyond_chance:
            lost = Interval(-points.value, -points.high, -points.low)
            does, change = ("gains", points) if points.value > 0 else ("loses", lost)
            return f"{does} {change.value:.1f} points ({change.low:.1f} to {change.high:.1f}) from federating"
        difference = f"{points.value:+.1f} points ({points.low:+.1f} to {points.high:+.1f})"
        if self.gain.low >= -MARGIN:
            return f"loses nothing from federating: {difference}"
        return f"cannot be told from {self.tested:,} test images: {difference}"


@dataclass(frozen=True)
class Worth:
    """Whether federating is worth it for the sites of a run, and the files that were written."""

    name: str
    dataset: str
    sites: tuple[SiteWorth, ...]
    means: Mapping[str, Interval]
    """Means over domains of COLUMNS and of `gain`."""
    is_shapley: bool
    """Whether contributions are Shapley values, or what the mean accuracy loses without the site."""
    notes: tuple[str, ...] = ()
    page: Path | None = None
    numbers: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "dataset": self.dataset,
            "contribution": "shapley" if self.is_shapley else "leave_one_out",
            "means": {name: asdict(interval) for name, interval in self.means.items()},
            "sites": {row.site: {**asdict(row), "verdict": row.verdict} for row in self.sites},
            "notes": list(self.notes),
        }
