"""Files from elsewhere, read with a limit: regular ones only, since a pipe never ends and neither does /dev/zero."""

import os
import stat
from pathlib import Path

TABLE = 1_000_000_000
"""Bytes of a table of images; far more rows than a dataset has."""


def read_bytes(path: str | Path, most: int, limit: str = "") -> bytes:
    """What a file holds. Raises OSError or ValueError, whose text says what is wrong with it.

    `limit` is the setting that says how much is the `most`, if one does.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(handle)  # a pipe is opened at once, without waiting for its other end
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        folder = stat.S_ISDIR(status.st_mode)
        raise ValueError("it is a folder" if folder else "it is not a regular file, but a pipe or a device")
    with open(handle, "rb") as file:
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size:,} bytes, more than {f'{limit}=' if limit else ''}{most:,}")
        return file.read(status.st_size)


def read_text(path: str | Path, most: int) -> str:
    """The same as text, with or without a byte order mark."""
    return read_bytes(path, most).decode("utf-8-sig")
