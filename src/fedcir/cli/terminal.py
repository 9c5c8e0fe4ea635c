"""Standard output and error: no name of a file or a class controls the terminal that shows it."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

from fedcir.config.display import escape_controls


class EscapedStream:
    """A text stream that shows control characters instead of passing them on."""

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
    """Escape all that is printed, by whatever module, in the meantime."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(IO[str], EscapedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unescaped(stream: IO[str]) -> IO[str]:
    """The stream itself, for what controls the terminal on purpose, and for files that must be exact."""
    return stream.stream if isinstance(stream, EscapedStream) else stream
