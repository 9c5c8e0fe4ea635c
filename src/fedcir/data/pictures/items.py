"""Encoded images before they are decoded: which there are, and where each lies."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from fedcir.data.readers.unused import Unused
from fedcir.types import InputError

Part = Literal["train", "validation", "test"]


class Item(NamedTuple):
    """One image."""

    name: str
    """Its path below the dataset's root, with / between the parts; the same on every machine."""
    domain: str
    label: str
    part: Part | None = None
    """What it is for according to a published list or its folder; None where neither tells."""
    group: str | None = None
    """Images of one group, such as a burst of one camera, are never divided between train and test."""


class Pictures(Protocol):
    """The images of a dataset, wherever they lie."""

    @property
    def items(self) -> Sequence[Item]: ...

    def only(self, rows: Sequence[int]) -> "Pictures":
        """Some of them."""
        ...

    def fingerprint(self) -> str:
        """A hash that changes when an image does, found without reading any."""
        ...

    def paths(self, staging: Path) -> list[str]:
        """A file for each item; what is not a file yet is written into `staging`."""
        ...


class Found(NamedTuple):
    """What a source found, and what its user should know about it."""

    pictures: Pictures
    notes: tuple[str, ...] = ()
    unused: tuple[Unused, ...] = ()
    """Files that lie there too."""


@dataclass(frozen=True)
class Files:
    """Images that are files below a root."""

    root: Path
    items: Sequence[Item]
    within: str = ""
    """What every name begins with, if the root is that folder itself."""

    def only(self, rows: Sequence[int]) -> "Files":
        return Files(self.root, [self.items[row] for row in rows], self.within)

    def fingerprint(self) -> str:
        root = os.fspath(self.root.resolve())
        digest = hashlib.blake2b(root.encode(errors="surrogateescape"), digest_size=16)
        for item in self.items:
            try:
                status = os.stat(self._path(root, item))
            except OSError as error:
                path = self._path(os.fspath(self.root), item)
                raise InputError(
                    f"{path} is missing, or a broken link: restore or remove it", public="an image is a broken link"
                ) from error
            digest.update(f"\0{item.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def paths(self, staging: Path) -> list[str]:
        root = os.fspath(self.root.resolve())
        return [self._path(root, item) for item in self.items]

    def _path(self, root: str, item: Item) -> str:
        return f"{root}/{item.name.removeprefix(self.within)}"
