"""Cells of CSV files as text: a spreadsheet runs one that begins with =, and so a domain could be called =cmd|...

An apostrophe before it tells the spreadsheet that it is text. Our own readers take it away again.
"""

import re

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def safe_cell(cell: str) -> str:
    """A cell that no spreadsheet runs. Numbers stay numbers."""
    return f"'{cell}" if _FORMULA.match(cell) and not _is_number(cell) else cell


def plain_cell(cell: str) -> str:
    """The cell as it was before."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
