"""How much can be done at a time, where the settings do not say."""

import os


def cores() -> int:
    """Those that this process may use: a container or a scheduler may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
