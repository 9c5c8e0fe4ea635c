"""How results look on a terminal."""

import sys


def print_table(rows: list[list[str]], title: str | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if title is not None:
        print(title)
    table = Table(*rows[0], box=box.SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False).print(table)
