"""Rows of CSV tables by site: DIR/<site>.csv, or one file with a column that names the site."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedcir.config import DataConfig
from fedcir.data.encoding import LARGEST
from fedcir.data.sources.table import open_rows
from fedcir.errors import InputError
from fedcir.machine import check_memory
from fedcir.text import join_names

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"})
"""Cells that count as missing."""
BYTES = 25
"""Memory that a table takes while it is read, for each byte of its file."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", re.ASCII)


class CsvRow(NamedTuple):
    line: int
    cells: list[str]


@dataclass(frozen=True)
class SiteTable:
    """The rows of one site."""

    site: str
    path: Path
    header: tuple[str, ...]
    rows: Sequence[CsvRow]

    def at(self, row: CsvRow) -> str:
        return f"{self.path}, line {row.line}"


def read_tables(root: Path, data: DataConfig) -> list[SiteTable]:
    """Read DIR/<site>.csv, or a file with a column data.site, without splitting or converting anything."""
    if root.is_file():
        header, rows = _read_file(root)
        if data.site not in header:
            raise InputError(
                f"{root} has no column {data.site!r} that names the site of each row; it has {join_names(header, 20)}: "
                "set data.site, or give a folder of one file a site"
            )
        position = header.index(data.site)
        by_site: dict[str, list[CsvRow]] = {}
        for row in rows:
            if not row.cells[position]:
                raise InputError(f"{root}, line {row.line} names no {data.site}: fill it in, or remove the line")
            by_site.setdefault(row.cells[position], []).append(row)
        return [SiteTable(site, root, header, by_site[site]) for site in sorted(by_site)]
    paths = sorted(root.glob("*.csv"))
    if not paths:
        raise InputError(f"data.root: {root} holds no <site>.csv file")
    return [SiteTable(path.stem, path, *_read_file(path)) for path in paths]


def read_site_table(root: Path, site: str, data: DataConfig) -> SiteTable:
    """Read the rows of one site: a file of its own, or its rows of a file with a column data.site."""
    path = find_site_file(root, site)
    header, rows = _read_file(path)
    if root.is_file() and data.site in header:
        position = header.index(data.site)
        rows = [row for row in rows if row.cells[position] == site]
        if not rows:
            raise InputError(
                f"{path} has no row whose {data.site} is {site!r}: name the site as in the table",
                public="its table has no row of its domain",
            )
    return SiteTable(site, path, header, rows)


def find_site_file(root: Path, site: str) -> Path:
    """Return the CSV file of a site: the file itself, or that of its name in a folder."""
    path = root if root.is_file() else root / f"{site}.csv"
    if not path.is_file():
        raise InputError(f"there is no table {path}", public="its data-root holds no table of its name")
    return path


def read_table(path: Path) -> SiteTable:
    """Read all rows of a file, whatever their site."""
    return SiteTable(path.stem, path, *_read_file(path))


def _read_file(path: Path) -> tuple[tuple[str, ...], list[CsvRow]]:
    check_memory(BYTES * path.stat().st_size, f"the table {path}")
    header, cells = open_rows(path)
    if twice := next((name for name, count in Counter(header).items() if count > 1), None):
        raise InputError(f"{path} has two columns {twice!r}: rename one", public="its table has a column twice")
    if "" in header:
        raise InputError(
            f"{path}: column {header.index('') + 1} has no name: name it in the first line",
            public="its table has a column without a name",
        )
    rows = [CsvRow(line, row) for line, row in cells]
    if not rows:
        raise InputError(f"{path} has no rows", public="its table has no rows")
    return tuple(header), rows


def parse_number(cell: str) -> float | None:
    """Parse a number of decimal digits; None for any other text, and for larger ones than LARGEST."""
    number = float(cell) if len(cell) <= 400 and NUMBER.fullmatch(cell) else math.inf
    return number if abs(number) <= LARGEST else None


def to_category(cell: str) -> str:
    """Write whole numbers in one way, so that 1 and 1.0 are one category."""
    number = parse_number(cell)
    is_whole = number is not None and number.is_integer() and abs(number) < 1e15
    return str(int(number)) if is_whole and number is not None else cell
