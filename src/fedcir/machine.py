"""CPU cores, free memory and torch threads of this process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedcir.errors import InputError

CGROUP = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """Count the cores that this process may use: a container or a scheduler may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Return the bytes that this process may still allocate, within the limit of its container too."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # psutil does not read the limit of a container
        limit, used = (int((CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def check_memory(needed: int, use: str) -> None:
    """Raise an error if memory cannot hold `needed` bytes; `use` names their use and the setting to lower."""
    free = free_memory()
    if needed > free:
        raise InputError(f"{use} needs {needed / 1e9:,.1f} GB of memory, but {free / 1e9:,.1f} GB are free: lower it")


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads, on which results depend, and restore it afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
