"""How results look on a terminal."""

import sys


def print_table(rows: list[list[str]], title: str | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
