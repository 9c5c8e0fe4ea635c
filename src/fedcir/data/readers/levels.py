"""Folders on the way from a dataset's root to its images, and whether those of one level are a split."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fedcir.data.pictures.items import Part
from fedcir.data.pictures.square import SUFFIXES
from fedcir.data.readers.unused import OF_SYSTEMS, kind_of
from fedcir.types import InputError

Inodes = tuple[tuple[int, int], ...]
Counts = Counter[tuple[str, str]]
"""Files by place and kind."""

PARTS: dict[str, Part] = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
"""What the folders of a split are called, in any case."""


class Level(NamedTuple):
    """A folder."""

    path: str
    name: str
    """How the names of the images in it begin."""
    inodes: Inodes
    """Of itself and of the folders above: a link back to one of them is not followed."""
    part: Part | None = None

    def within(self, folder: str, part: Part | None = None) -> "Level":
        path = f"{self.path}/{folder}"
        return Level(path, f"{self.name}{folder}/", (*self.inodes, _inode(path)), part or self.part)

    def folders(self) -> list[str]:
        """Names of the folders in it, in order."""
        return [e.name for e in _entries(self.path) if _is_folder(e) and _inode(e.path) not in self.inodes]

    def files(self) -> Iterator[str]:
        """Names of the files in it and in the folders within, in order."""
        return _files(self.path, self.inodes)

    def images(self) -> Iterator[str]:
        return (name for name in self.files() if name.lower().endswith(SUFFIXES))

    def count_files(self, unused: Counts) -> None:
        """Count what lies directly in it, where images have no class."""
        unused.update((self.name, kind_of(e.name)) for e in _entries(self.path) if not _is_folder(e))


def top_level(root: "str | os.PathLike[str]", name: str = "") -> Level:
    path = os.fspath(root)
    return Level(path, name, (_inode(path),))


def split_level(level: Level) -> list[Level]:
    """The folders in a level that are a split: train and test, val too. The level itself where there is none.

    A class may be called train or test. So they are a split only where there is nothing else beside them.
    """
    names = level.folders()
    parts = {name: PARTS[name.casefold()] for name in names if name.casefold() in PARTS}
    parts = {name: part for name, part in parts.items() if _holds_images(level, name)}
    if not parts:
        return [level]
    kinds = set(parts.values())
    whole = "train" in kinds and len(kinds) > 1
    stray = next((name for name in names if name not in parts and _holds_images(level, name)), None)
    told = " and ".join(parts)
    if stray is None and not whole:
        missing = "test" if "train" in kinds else "train"
        raise InputError(
            f"{level.path} holds {told} but no {missing}: add it, "
            f"or move the folders in {told} one level up, or rename {told} if this is not a split"
        )
    inner = {name for part in parts for name in level.within(part).folders()}
    if stray is not None and (whole or not inner.isdisjoint(names)):
        raise InputError(
            f"{level.path} mixes a split ({told}) with other folders ({stray}): "
            f"put {stray} into train, or rename the folders that are not part of a split"
        )
    return [level] if stray is not None else [level.within(name, part) for name, part in parts.items()]


def _holds_images(level: Level, folder: str) -> bool:
    return next(level.within(folder).images(), None) is not None


def _files(folder: str, inodes: Inodes) -> Iterator[str]:
    """A folder that several links lead to is gone through once; as deep as it goes, which Python's calls do not."""
    seen = set(inodes)
    open_folders = [("", iter(_entries(folder)))]
    while open_folders:
        within, entries = open_folders[-1]
        entry = next(entries, None)
        if entry is None:
            open_folders.pop()
        elif not _is_folder(entry):
            yield f"{within}{entry.name}"
        elif (inode := _inode(entry.path)) not in seen:
            seen.add(inode)
            open_folders.append((f"{within}{entry.name}/", iter(_entries(entry.path))))


def _entries(path: str) -> list["os.DirEntry[str]"]:
    """What is in a folder, in order, but for what is hidden."""
    with _naming(path), os.scandir(path) as entries:
        shown = [e for e in entries if not e.name.startswith(".") and e.name.lower() not in OF_SYSTEMS]
    return sorted(shown, key=lambda entry: entry.name)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _inode(path: str) -> tuple[int, int]:
    with _naming(path):
        status = os.stat(path)
    return status.st_dev, status.st_ino


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot read the folder {path}: {error.strerror}", public="a folder of its images cannot be read"
        ) from error
