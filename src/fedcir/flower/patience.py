"""How long a deployed run waits, and for how many, unless it is told otherwise."""

import time
from collections.abc import Callable
from dataclasses import dataclass

SITES = 2
"""Sites that must be connected before a run begins."""
WAIT = 600.0
"""Seconds to wait for them."""
TIMEOUT = 3600.0
"""Seconds that the clients of a round have to answer."""


@dataclass(frozen=True)
class Clock:
    """The time that waiting is measured in; tests pass one of their own."""

    now: Callable[[], float] = time.monotonic
    """Seconds since any fixed moment."""
    sleep: Callable[[float], None] = time.sleep
