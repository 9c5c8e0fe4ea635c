"""`folders`: any DIR/<domain>/<class>/<image>. Other datasets of files are this with their names checked."""

import os
from collections.abc import Iterator
from pathlib import Path

from fedcir.data.items import Item
from fedcir.data.pictures import SUFFIXES
from fedcir.types import InputError


def scan(root: Path) -> list[Item]:
    """All images below DIR/<domain>/<class>/, in the order of their names, folders within a class too.

    Hidden files and folders are passed over, and files that are not images by their ending.
    """
    base = os.fspath(root)
    items = []
    for domain in _folders(base):
        for label in _folders(f"{base}/{domain}"):
            place = f"{domain}/{label}"
            items += [Item(f"{place}/{name}", domain, label) for name in _images(f"{base}/{place}", ())]
    if not items:
        raise InputError(f"data.root: {root} {_what_is_wrong(root)}")
    for item in items:
        if not item.name.isprintable() and any("\udc80" <= letter <= "\udcff" for letter in item.name):
            raise InputError(f"the name of {os.fsencode(root / item.name)!r} is not UTF-8: rename it")
    return items


def _images(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Names of the images in a folder and in those within it, in order; a link back to one above is not followed."""
    with os.scandir(folder) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    here = os.stat(folder)
    inode = (here.st_dev, here.st_ino)
    for entry in found:
        if entry.name.lower().endswith(SUFFIXES) and not entry.is_dir():
            yield entry.name
        elif entry.is_dir() and inode not in above:
            yield from (f"{entry.name}/{name}" for name in _images(entry.path, (*above, inode)))


def _folders(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _what_is_wrong(root: Path) -> str:
    """The likeliest mistake."""
    inside = _folders(os.fspath(root))
    for name in inside:
        if any(True for _ in _images(os.fspath(root / name), ())):
            return (
                f"holds images as {name}/<image>; it should hold <domain>/<class>/<image>: "
                "put the classes of each site into a folder with the site's name"
            )
    return "holds no image; it should hold <domain>/<class>/<image>"
