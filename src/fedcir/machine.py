"""CPU cores, memory, threads and the end of this process."""

import ctypes
import os
import re
import signal
import sys
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


def retain_freed_memory() -> None:
    """Make glibc retain the memory of freed tensors instead of returning it to the system in every step.

    This saves a tenth of the step of a small network. Memory left over from opening a dataset is returned first. It
    does nothing on other C libraries.
    """
    try:
        mallopt, trim = ctypes.CDLL(None).mallopt, ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
    for option in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(option, 1 << 30)


def stop_openmp_threads() -> None:
    """Stop OpenMP's idle threads: a forked process lacks them and would wait for them forever."""
    if not sys.platform.startswith("linux"):
        return
    with open("/proc/self/maps", encoding="utf-8") as file:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in file if re.search(r"/lib(g|i)?omp[^/]*$", line)}
    for path in loaded:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(2)  # omp_pause_hard


def exit_with_parent(parent: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Make the system end this process when its parent ends, even by kill -9 (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal_number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is a lack of memory, which torch reports only in its message."""
    messages = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(message in str(error) for message in messages)
