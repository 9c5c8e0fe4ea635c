"""How long a deployed run waits, and for how many, unless it is told otherwise."""

SITES = 2
"""Sites that must be connected before a run begins."""
WAIT = 600.0
"""Seconds to wait for them."""
TIMEOUT = 3600.0
"""Seconds that the clients of a round have to answer."""
