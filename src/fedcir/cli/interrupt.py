"""Ctrl-C: the first one ends a command in order, and what it leaves behind is told."""

import os
import signal
import time
from types import FrameType

PATIENCE = 5.0
"""Seconds in which further signals do not disturb a command that is already ending."""


class Interrupted(Exception):
    """The user asked to stop; the message says how to continue."""


def catch_signals() -> None:
    """Turn the first SIGINT or SIGTERM into a KeyboardInterrupt. One that comes much later ends the process at once."""
    first: list[float] = []

    def caught(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - first[0] > PATIENCE:
            os.write(2, b"\nfedcir: ended at once\n")
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT for what runs in the background
        signal.signal(number, caught)


def ignore_signals() -> None:
    """For the end of the process, in which Python would print a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
