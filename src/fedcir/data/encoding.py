"""Encoding of tables as features: what sites tell of their columns, and how it becomes scaling and one-hot columns.

No row leaves a site. A site tells the kind of each column, its categories, whether cells are missing, and for numbers
the count, the sum and the sum of squares over its training rows. Sums are exact fractions, so that the encoding does
not depend on the order of rows or on how they are divided between sites.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcir.data.domains import Domains, Indices, Split
from fedcir.errors import InputError
from fedcir.text import join_names
from fedcir.validation import build_dataclass

Values = NDArray[np.float64]
"""Cells (N, columns): numbers, or positions in the column's categories; NaN where a cell is missing."""
Kind = Literal["number", "category", "empty"]
Scale = Literal["federation", "client", "none"]
LARGEST = 1e30
"""Largest magnitude of a number, which bounds the digits of sums of squares."""
LARGEST_SQUARE = Fraction(LARGEST) ** 2
MAX_CATEGORIES = 1_000
"""Most categories of a column at a site."""
FRACTION = re.compile(r"-?\d{1,1000}(/[1-9]\d{0,999})?", re.ASCII)


@dataclass(frozen=True)
class ColumnSummary:
    """What a site tells of a column; with the sums of all sites added up, what a federation knows of it."""

    name: str
    kind: Kind = "empty"
    """Kind of its cells; empty if all are missing."""
    categories: tuple[str, ...] = ()
    """Sorted."""
    has_missing: bool = False
    count: int = 0
    """Number of cells of training rows that are not missing."""
    total: str = "0"
    """Their sum, an exact fraction."""
    squares: str = "0"
    """The sum of their squares."""

    def __post_init__(self) -> None:
        if not (FRACTION.fullmatch(self.total) and FRACTION.fullmatch(self.squares)):
            raise InputError(f"the sums of column {self.name!r} are no fractions")
        total, squares = Fraction(self.total), Fraction(self.squares)
        are_binary = not any(sum.denominator & (sum.denominator - 1) for sum in (total, squares))
        if not (are_binary and total**2 <= self.count * squares and 0 <= squares <= self.count * LARGEST_SQUARE):
            raise InputError(f"the sums of column {self.name!r} cannot be those of {self.count} numbers")
        if (self.kind == "category") != bool(self.categories):
            raise InputError(f"the categories of column {self.name!r} do not fit its kind, {self.kind}")

    @property
    def mean(self) -> float:
        return float(Fraction(self.total) / self.count) if self.count else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation (of the population); 1 for a constant column."""
        if not self.count:
            return 1.0
        variance = Fraction(self.squares) / self.count - (Fraction(self.total) / self.count) ** 2
        return math.sqrt(variance) or 1.0


Columns = Sequence[ColumnSummary]


def select_used(columns: Columns, parts: Sequence[Values]) -> tuple[ColumnSummary, ...]:
    """Leave out categories that no row of these parts has, such as those of sites that take no part."""
    summaries = []
    for column, *cells in zip(columns, *(part.T for part in parts), strict=True):
        known = [values[~np.isnan(values)] for values in cells]
        codes = sorted({int(code) for values in known for code in np.unique(values)} if column.categories else ())
        summaries.append(
            replace(
                column,
                kind=column.kind if any(map(len, known)) else "empty",
                categories=tuple(column.categories[code] for code in codes),
                has_missing=sum(map(len, known)) < sum(map(len, cells)),
            )
        )
    return tuple(summaries)


def sum_columns(columns: Columns, values: Values) -> tuple[ColumnSummary, ...]:
    """Replace the sums of columns by those of these rows."""
    summaries = []
    for column, cells in zip(columns, values.T, strict=True):
        known = cells[~np.isnan(cells)] if column.kind == "number" else cells[:0]
        total, squares = sum_exactly(known)
        summaries.append(replace(column, count=len(known), total=str(total), squares=str(squares)))
    return tuple(summaries)


def sum_exactly(numbers: Values) -> tuple[Fraction, Fraction]:
    """Sum and sum of squares, without rounding."""
    ratios = [number.as_integer_ratio() for number in numbers.tolist()]
    largest = max((denominator for _, denominator in ratios), default=1)  # all are powers of two
    whole = [numerator * (largest // denominator) for numerator, denominator in ratios]
    return Fraction(sum(whole), largest), Fraction(sum(number**2 for number in whole), largest**2)


def merge_columns(sites: Mapping[str, Columns]) -> tuple[ColumnSummary, ...]:
    """Merge the columns of all sites: the union of categories, and the sums of sums."""
    (first, columns), *others = sites.items()
    for site, own in others:
        for lacking, other, names, known in ((site, first, columns, own), (first, site, own, columns)):
            if missing := sorted({column.name for column in names} - {column.name for column in known}):
                raise InputError(
                    f"site {lacking!r} has no column {missing[0]!r}, which site {other!r} has: add it, if need be with "
                    f"empty cells, or leave it out with data.ignore={missing[0]}"
                )
    merged = []
    for name in (column.name for column in columns):
        parts = {site: next(column for column in own if column.name == name) for site, own in sites.items()}
        kinds = {part.kind: site for site, part in reversed(parts.items())}
        if {"number", "category"} <= kinds.keys():
            where = f"numbers at site {kinds['number']!r} and text at site {kinds['category']!r}"
            text = parts[kinds["category"]].categories[0]
            raise InputError(
                f"column {name!r} holds {where}, such as {text!r}: correct the cells, or set data.categorical={name}"
            )
        kind: Kind = "number" if "number" in kinds else "category" if "category" in kinds else "empty"
        merged.append(
            ColumnSummary(
                name,
                kind,
                tuple(sorted({category for part in parts.values() for category in part.categories})),
                any(part.has_missing for part in parts.values()),
                sum(part.count for part in parts.values()),
                str(sum(Fraction(part.total) for part in parts.values())),
                str(sum(Fraction(part.squares) for part in parts.values())),
            )
        )
    return tuple(merged)


@dataclass(frozen=True)
class EncodedColumn:
    """How a column becomes features: a scaled number or one for each category, and one that tells missing cells."""

    name: str
    categories: tuple[str, ...] = ()
    """Categories; none for a number."""
    has_missing: bool = False
    mean: float = 0.0
    spread: float = 1.0

    @property
    def features(self) -> tuple[str, ...]:
        names = [f"{self.name}={category}" for category in self.categories] or [self.name]
        return (*names, *([f"{self.name} is missing"] if self.has_missing else []))


@dataclass(frozen=True)
class TableEncoding:
    """Encoding of all columns of a table as features."""

    columns: tuple[EncodedColumn, ...]
    scale: Scale = "federation"
    """Whose mean and standard deviation scale numbers: all sites', each site's own, or none."""

    @classmethod
    def fit(cls, columns: Columns, scale: Scale) -> "TableEncoding":
        """Fit an encoding to merged columns; those without any value are left out."""
        known = [column for column in columns if column.kind != "empty"]
        if not known:
            raise InputError("the tables have no column besides the target that holds a value")
        encoded = (EncodedColumn(column.name, column.categories, column.has_missing) for column in known)
        encoding = cls(tuple(encoded), scale)
        return encoding.with_statistics(columns) if scale == "federation" else encoding

    def with_statistics(self, columns: Columns) -> "TableEncoding":
        """Scale numbers by the mean and the standard deviation of these sums."""
        sums = {column.name: column for column in columns}
        scaled = (
            column
            if column.categories
            else replace(column, mean=sums[column.name].mean, spread=sums[column.name].spread)
            for column in self.columns
        )
        return replace(self, columns=tuple(scaled))

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(name for column in self.columns for name in column.features)

    def encode(self, columns: Columns, values: Values, where: str) -> NDArray[np.float32]:
        """Encode rows (N, columns) as features (N, D); `where` names them in errors."""
        positions = {column.name: position for position, column in enumerate(columns)}
        blocks = []
        for column in self.columns:
            if column.name not in positions:
                raise InputError(f"{where} has no column {column.name!r}, which the model takes: add it")
            summary, cells = columns[positions[column.name]], values[:, positions[column.name]]
            if summary.kind != "empty" and (summary.kind == "category") != bool(column.categories):
                kinds = ("categories", "numbers") if column.categories else ("numbers", "categories")
                fix = "correct the cells, or set data.categorical as in training"
                raise InputError(
                    f"column {column.name!r} of {where} holds {kinds[1]}, but the model takes {kinds[0]}: {fix}",
                    public="a column of its table holds another kind of cells than the run takes",
                )
            missing = np.isnan(cells)
            if column.categories:
                own = summary.categories
                used = {own[int(code)] for code in np.unique(cells[~missing])}
                if unknown := sorted(used.difference(column.categories)):
                    known = join_names(column.categories, 10)
                    raise InputError(
                        f"column {column.name!r} of {where} has the category {unknown[0]!r}, which the model has never "
                        f"seen; it knows {known}: correct the cell, or empty it",
                        public="its table has a category that the run does not know",
                    )
                codes = np.array([column.categories.index(name) if name in used else -1 for name in own] + [-1])
                chosen = codes[np.where(missing, len(own), cells).astype(np.int64)]
                blocks.append(chosen[:, None] == np.arange(len(column.categories)))
            else:
                with np.errstate(over="ignore"):
                    blocks.append(np.where(missing, 0.0, (cells - column.mean) / column.spread)[:, None])
            if column.has_missing:
                blocks.append(missing[:, None])
        encoded = np.concatenate(blocks, axis=1, dtype=np.float32, casting="unsafe")
        if not np.isfinite(encoded).all():
            raise InputError(f"{where} holds numbers that are too large for single precision: scale the column")
        return encoded

    def to_card(self) -> dict[str, Any]:
        return asdict(self)


def read_encoding(card: Mapping[str, Any]) -> TableEncoding:
    """Read the encoding of a model card or of a message."""
    encoding = build_dataclass(TableEncoding, card, "table")
    for column in encoding.columns:
        if not (math.isfinite(column.mean) and 0 < column.spread < math.inf):
            raise InputError(f"table.columns: the mean or the spread of {column.name!r} is no valid number")
    return encoding


def encode_domains(domains: Domains, encoding: TableEncoding) -> Domains:
    """Encode the tables of a dataset; with scale=client each domain is scaled by its own training rows."""
    width = len(encoding.features)
    arrays: dict[int, NDArray[np.float32]] = {}
    encoded = []
    for domain in domains:
        own = encoding
        if encoding.scale == "client":
            own = encoding.with_statistics(sum_columns(domains.columns, domain.train.pixels(_all_rows(domain.train))))

        def encode_split(split: Split, own: TableEncoding = own, name: str = domain.name) -> Split:
            array = arrays.setdefault(id(split.images), np.zeros((len(split.images), width), np.float32))
            array[split.where] = own.encode(domains.columns, split.pixels(_all_rows(split)), f"site {name!r}")
            return replace(split, images=array)

        validation = None if domain.validation is None else encode_split(domain.validation)
        train, test = encode_split(domain.train), encode_split(domain.test)
        encoded.append(replace(domain, train=train, test=test, validation=validation))
    return replace(domains, domains=tuple(encoded), columns=())


def _all_rows(split: Split) -> Indices:
    return np.arange(len(split))
