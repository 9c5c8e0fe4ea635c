"""Cleans up after a process that started Flower and was killed, by kill -9 too: ends all it started, removes its keys.

A process of its own, which imports nothing of fedcir. It reads from a pipe whose other end the watched process holds:
the pipe ends with that process, however it ended.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

HOME = "FLWR_HOME"
"""What all processes of a federation have in their environment: a folder in that of the federation."""
PREFIX, KEYS = "fedcir-", "certs"
"""How the folder of a federation is called, and which folder in it has keys."""
DONE = b"done"
QUIET = 1.0
"""Seconds without any process of the federation, after which no more are expected."""


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Should this process be killed meanwhile, processes whose Flower lies in the folder end, and it is removed."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
    try:
        with _locked(folder):
            yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watcher.communicate(DONE)


def end_abandoned() -> None:
    """The same for federations of this user whose watcher was killed with them: nobody holds their folder any more."""
    for keys in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{KEYS}"):
        with contextlib.suppress(OSError), _locked(keys.parent) as alone:
            if alone and keys.stat().st_uid == os.geteuid():
                _end(str(keys.parent.resolve()))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder until the process ends; whether nobody else does, and the system can tell."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield False
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except BlockingIOError:
        alone = False
    try:
        yield alone
    finally:
        os.close(opened)


def _watch(folder: str) -> None:
    if sys.stdin.buffer.read() != DONE:
        _end(folder)


def _end(folder: str) -> None:
    seen = time.monotonic()
    while time.monotonic() - seen < QUIET:
        if _kill_all(folder):
            seen = time.monotonic()
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def _kill_all(folder: str) -> bool:
    """End all processes of the federation; whether there were any."""
    import psutil

    processes = find_processes(folder)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return bool(processes)


def find_processes(folder: str) -> "list[psutil.Process]":
    """All processes whose Flower lies in the folder, also those whose parent has ended."""
    import psutil

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            home = process.environ().get(HOME, "")
            if home.startswith(folder + os.sep) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


if __name__ == "__main__":
    _watch(sys.argv[1])
