"""A lock on a folder, which the system releases when the process and its workers have ended."""

import contextlib
import os
import time
from pathlib import Path
from typing import IO

from fedcir.data.private import open_to_append, private_folder

LOCK_PATIENCE = 3.0
"""Seconds that the workers of a killed run are given to end: they hold its lock too, and might still write."""


def take_lock(lock: Path, patience: float) -> IO[bytes] | None:
    """The file of a lock that this process now holds, its folder made if need be; None if another keeps it.

    Whoever held it may have removed it in the meantime. It then locks nobody out, so the one in its place is taken.
    """
    until = time.monotonic() + patience
    while True:
        private_folder(lock.parent)
        try:
            file = open_to_append(lock)
        except FileNotFoundError:  # its folder was removed just now
            if time.monotonic() > until:
                raise
            continue
        if not _lock(file, until):
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        file.close()


def _lock(file: IO[bytes], until: float) -> bool:
    """An advisory lock that the system releases when the process and its workers have ended, however they ended."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return True
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        else:
            return True
