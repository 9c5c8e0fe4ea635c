"""Whether something fits into memory, before it is tried: the system would end the process without a word."""

from contextlib import suppress
from pathlib import Path

from fedcir.types import InputError

SYSTEM = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that this process may still take, in its container too; None where the system does not tell."""
    found = []
    with suppress(OSError, ValueError, KeyError, IndexError):
        lines = (line.split() for line in SYSTEM.read_text(encoding="ascii").splitlines())
        found.append(1024 * int({words[0]: words[1] for words in lines}["MemAvailable:"]))
    with suppress(OSError, ValueError):
        most, taken = (int((CONTAINER / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        found.append(most - taken)
    return min(found, default=None)


def check_memory(needed: int, what: str) -> None:
    """Refuse what cannot fit; `what` names it and its settings."""
    free = free_memory()
    if free is not None and needed > free:
        raise InputError(f"{what} needs {needed / 1e9:,.1f} GB of memory, but {free / 1e9:,.1f} GB are free: lower it")
