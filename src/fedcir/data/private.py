"""Files and folders that are their owner's alone, whatever the umask: decoded images, and what a run tells of them.

A folder that is there already keeps its mode, and files in it are as open as it is: a team that shares a cache goes on
sharing it.
"""

import os
from pathlib import Path


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, and those above it that are missing."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def inner_folder(path: Path) -> None:
    """Make a folder that is as open as the one that it lies in."""
    path.mkdir(mode=path.parent.stat().st_mode & 0o777)


def as_open_as_folder(path: str, flags: int) -> int:
    """For `open(..., opener=...)`: a new file that may be read by those who may enter its folder."""
    return os.open(path, flags, os.stat(os.path.dirname(path) or ".").st_mode & 0o666)


def new_file(path: Path) -> Path:
    """The path of an empty file, for those who open it by its name."""
    with open(path, "wb", opener=as_open_as_folder):
        return path
