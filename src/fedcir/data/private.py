"""Files and folders that are their owner's alone, whatever the umask, and that no link leads elsewhere.

A folder that is there already keeps its mode, and files in it are as open as it is: a team that shares a cache goes on
sharing it. A run folder may come from somebody else, who could have put links into it.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fedcir.types import InputError

NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
TRACKER = ("track", "wandb")
"""The folder in which Weights & Biases makes links of its own."""


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, and those above it that are missing."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def inner_folder(path: Path) -> None:
    """Make a folder that is as open as the one that it lies in."""
    path.mkdir(mode=path.parent.stat().st_mode & 0o777)


def check_no_links(folder: Path) -> None:
    """Refuse a folder that holds a symbolic link at any depth; the folder itself may be reached through links."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if _is_link(path) and not _stays_in_tracker(path):
                raise InputError(f"{path} is a link, and a run folder must hold none: replace it by what it points to")


def _is_link(path: Path) -> bool:
    return path.is_symlink() or getattr(os.path, "isjunction", os.path.islink)(path)


def _stays_in_tracker(path: Path) -> bool:
    """Tell whether a link is W&B's: within its folder, or the log of its service, which fedcir never opens."""
    tracker = next((parent for parent in path.parents if parent.parts[-2:] == TRACKER), None)
    if tracker is None:
        return False
    if path.name == "debug-core.log" and path.parent.name == "logs":
        return True
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(tracker))


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` when it is written, and that is removed if that fails.

    Its name cannot be guessed, so nobody can put a link there beforehand.
    """
    name = f".{secrets.token_hex(8)}.tmp"
    with _open_folder(path.parent) as folder:
        temporary, target = (name, path.name) if folder is not None else (str(path.with_name(name)), str(path))
        mode = os.stat(path.parent if folder is None else folder).st_mode & 0o666
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode, dir_fd=folder)
        try:
            with open(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int | None]:
    """Open a folder, so that nothing else can be put in its place; None where the system cannot work relative to it."""
    if not {os.open, os.rename, os.unlink} <= os.supports_dir_fd:
        yield None
        return
    folder = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file to add to it or to lock it, a new one if need be; a link in its place is refused, a hard one too."""
    if _is_link(path):
        raise InputError(f"{path} is a link: replace it by what it points to")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file: delete it")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, os.stat(path.parent).st_mode & 0o666)
    if (status := os.fstat(handle)).st_nlink > 1 and stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise InputError(f"{path} is the same file as another (a hard link): replace it by a copy")
    return open(handle, "ab")


def new_file(path: Path) -> Path:
    """Make an empty file, for those who open it by its name."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, os.stat(path.parent).st_mode & 0o666))
    return path
