"""Comparison of the columns of tables between sites: what each site holds, and how far it is from the others."""

from dataclasses import dataclass

import numpy as np

from fedcir.data.domains import Domains
from fedcir.data.encoding import Kind, Values
from fedcir.text import join_names

CODES = (3, 6)
"""Fewest and most different whole numbers of a column that may be codes."""
MIN_NUMBERED = 20
"""Rows of a site from which on different whole numbers in all of them may be numbers of patients."""


@dataclass(frozen=True)
class ColumnComparison:
    """A column as each site holds it."""

    name: str
    kind: Kind
    cells: dict[str, str]
    """By site: mean and standard deviation of numbers, or the most frequent category with its share."""
    missing: dict[str, float]
    """Share of missing cells by site."""
    distances: dict[str, float]
    """How far each site is from all others, from 0 (equally distributed) to 1 (no value in common).

    The largest gap between two distribution functions (Kolmogorov and Smirnov) for numbers, the total variation for
    categories, or the difference in the share of missing cells if that is larger.
    """

    @property
    def largest(self) -> float:
        return max(self.distances.values())


def compare_columns(domains: Domains) -> tuple[ColumnComparison, ...]:
    """Compare the columns of tables whose cells are not encoded yet."""
    values = {d.name: np.concatenate([s.pixels(np.arange(len(s))) for s in d.splits]) for d in domains}  # (N, columns)
    compared = []
    for number, column in enumerate(domains.columns):
        by_site = {site: rows[:, number] for site, rows in values.items()}
        known = {site: cells[~np.isnan(cells)] for site, cells in by_site.items()}
        missing = {site: float(np.isnan(cells).mean()) for site, cells in by_site.items()}
        distances = {}
        for site in by_site:
            others = [other for other in by_site if other != site]
            rest = np.concatenate([known[other] for other in others]) if others else known[site]
            gap = abs(missing[site] - float(np.mean([missing[other] for other in others]))) if others else 0.0
            distances[site] = max(gap, _measure_distance(known[site], rest, len(column.categories)))
        cells = {site: _describe_cells(part, column.categories) for site, part in known.items()}
        compared.append(ColumnComparison(column.name, column.kind, cells, missing, distances))
    return tuple(compared)


def note_codes(domains: Domains) -> list[str]:
    """Note columns of whole numbers that may be codes of categories, or numbers of patients."""
    codes, counters = [], []
    for number, column in enumerate(domains.columns):
        sites = [np.concatenate([s.pixels(np.arange(len(s)))[:, number] for s in d.splits]) for d in domains]
        cells = np.concatenate(sites)
        cells = cells[~np.isnan(cells)]
        if column.kind != "number" or not (cells % 1 == 0).all():
            continue
        if CODES[0] <= len(np.unique(cells)) <= CODES[1]:
            codes.append(column.name)
        if all(len(np.unique(site)) == len(site) >= MIN_NUMBERED for site in sites):
            counters.append(column.name)
    notes = []
    if counters:
        names = join_names(counters, 5)
        notes.append(f"every row has another whole number in {names}: if it names a patient, add it to data.ignore")
    if codes:
        few = f"few different whole numbers ({CODES[0]} to {CODES[1]}): {join_names(codes, 10)}"
        notes.append(f"columns with {few}; if they are codes, such as of a diagnosis, add them to data.categorical")
    return notes


def _measure_distance(cells: Values, others: Values, categories: int) -> float:
    """Measure the distance of two samples of numbers, or of the positions of categories."""
    if not len(cells) or not len(others):
        return 0.0
    if categories:
        shares = (np.bincount(part.astype(np.int64), minlength=categories) / len(part) for part in (cells, others))
        return float(np.abs(np.subtract(*shares)).sum() / 2)
    points = np.unique(np.concatenate([cells, others]))
    below = (np.searchsorted(np.sort(part), points, side="right") / len(part) for part in (cells, others))
    return float(np.abs(np.subtract(*below)).max())


def _describe_cells(cells: Values, categories: tuple[str, ...]) -> str:
    if not len(cells):
        return "-"
    if categories:
        counts = np.bincount(cells.astype(np.int64), minlength=len(categories))
        return f"{categories[int(counts.argmax())]} {counts.max() / len(cells):.0%}"
    return f"{cells.mean():.4g} ± {cells.std():.3g}"
