"""How results look on a terminal."""

import sys


def print_table(rows: list[list[str]], title: str | None = None) -> None:
    from rich import box
    from rich.table import Table

    from fedcir.cli.console import make_console
    from fedcir.config.display import escape_line

    if title is not None:
        print(title)
    table = Table(*map(escape_line, rows[0]), box=box.SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*map(escape_line, row))
    make_console(sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
