"""Standard output and error, with control characters in names of files and classes escaped; tables."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

from fedcir.text import escape_controls, escape_line


class EscapedStream:
    """A text stream that escapes control characters."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def escape_output() -> Iterator[None]:
    """Escape everything that any module prints within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(IO[str], EscapedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def get_raw_stream(stream: IO[str]) -> IO[str]:
    """Return the stream without escapes, for progress bars and for files that must be exact."""
    return stream.stream if isinstance(stream, EscapedStream) else stream


def print_note(note: str) -> None:
    """Print a note on standard error, or send it to the process that started this one."""
    from fedcir.files import send_event

    if not send_event("note", note):
        print(f"note: {note}", file=sys.stderr)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1, ensure_ascii=False))


def print_table(rows: list[list[str]], title: str | None = None) -> None:
    """Print rows of cells, the first of which is the header."""
    from rich import box
    from rich.table import Table

    from fedcir.cli.progress import make_console

    if title is not None:
        print(title)
    table = Table(*map(escape_line, rows[0]), box=box.SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*map(escape_line, row))
    make_console(sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)
