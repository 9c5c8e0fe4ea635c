"""Clean up after a process that started Flower and was killed, even by kill -9: end its processes, remove its keys.

This file also runs as a script (`python -I`), so it imports nothing of fedcir. The script reads from a pipe whose other
end the watched process holds: the pipe closes with that process, however it ends.
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

import psutil
from filelock import FileLock, Timeout

PREFIX, KEYS = "fedcir-", "certs"
"""Prefix of the folder of a federation, and the folder in it that holds keys."""
DONE = b"done"
QUIET_SECONDS = 1.0
"""Time without any process of the federation, after which no more are expected."""


@contextlib.contextmanager
def watch(folder: Path) -> Iterator[None]:
    """If this process is killed inside, end processes whose FLWR_HOME is in the folder, and remove the folder."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
    try:
        with FileLock(folder / "lock"):
            yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watcher.communicate(DONE)


def end_abandoned() -> None:
    """Clean up after federations of this user whose watcher was killed too: nobody holds their lock."""
    for keys in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{KEYS}"):
        with contextlib.suppress(OSError, Timeout):
            if os.name == "posix" and keys.stat().st_uid == os.geteuid():
                with FileLock(keys.parent / "lock", timeout=0):
                    _end_federation(str(keys.parent.resolve()))


def find_processes(folder: str) -> list[psutil.Process]:
    """Find all processes whose FLWR_HOME is in the folder, also those whose parent has ended."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            home = process.environ().get("FLWR_HOME", "")
            if home.startswith(folder + os.sep) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def _end_federation(folder: str) -> None:
    last_seen = time.monotonic()
    while time.monotonic() - last_seen < QUIET_SECONDS:
        for process in find_processes(folder):
            last_seen = time.monotonic()
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__" and sys.stdin.buffer.read() != DONE:
    _end_federation(sys.argv[1])
