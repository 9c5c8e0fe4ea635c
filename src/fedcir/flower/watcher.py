"""Cleans up after a process that started Flower and was killed, by kill -9 too: ends all it started, removes its keys.

A process of its own, which imports nothing of fedcir. It reads from a pipe whose other end the watched process holds:
the pipe ends with that process, however it ended.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HOME = "FLWR_HOME"
"""What all processes of a federation have in their environment: a folder in that of the federation."""
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
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watcher.communicate(DONE)


def _watch(folder: str) -> None:
    if sys.stdin.buffer.read() != DONE:
        seen = time.monotonic()
        while time.monotonic() - seen < QUIET:
            if _kill_all(folder):
                seen = time.monotonic()
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_all(folder: str) -> bool:
    """End all processes of the federation; whether there were any."""
    import psutil

    found = False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            home = process.environ().get(HOME, "")
            if home.startswith(folder + os.sep) and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                found = True
    return found


if __name__ == "__main__":
    _watch(sys.argv[1])
