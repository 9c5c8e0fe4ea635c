"""How a reader ended on an input: well, or with one InputError of one line. Anything else is a fault."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

from fedcir.errors import FedcirError, InputError

HANG = 300
"""Seconds after which a reader counts as stuck, on a machine that has much else to do."""
LONG = 6000
"""Characters of a line: a path alone may have 4,096."""


class Stuck(BaseException):
    """No reader takes it for an error of its own."""


@contextlib.contextmanager
def not_stuck() -> Iterator[None]:
    def end(*_: object) -> None:
        raise Stuck

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault(work: Callable[[], Any], clean: type[FedcirError] = InputError) -> str | None:
    """What is wrong with how it ended; None if nothing is."""
    try:
        with not_stuck():
            work()
    except clean as error:
        line = str(error)
        return None if line.isprintable() and 0 < len(line) < LONG else f"not one line: {line[:300]!r}"
    except Stuck:
        return f"still busy after {HANG} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None
