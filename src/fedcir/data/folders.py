"""`folders`: any DIR/<domain>/<class>/<image>. Other datasets of files are this with their names checked."""

import os
from collections.abc import Iterator
from pathlib import Path

from fedcir.data.items import Files, Found, Item
from fedcir.data.pictures import SUFFIXES
from fedcir.types import InputError

Inodes = tuple[tuple[int, int], ...]


def folders(root: Path) -> Found:
    """All images, and a word on folders that hold none where a domain's should be."""
    items = scan(root)
    empty = [name for name in _folders(os.fspath(root), ()) if name not in {item.domain for item in items}]
    note = f"folders without any <class>/<image>, which are left out: {', '.join(empty[:5])}"
    return Found(Files(root, items), (note,) if empty else ())


def scan(root: Path) -> list[Item]:
    """All images below DIR/<domain>/<class>/, in the order of their names, folders within a class too.

    Hidden files and folders are passed over, and files that are not images by their ending.
    """
    base = os.fspath(root)
    items = []
    for domain in _folders(base, (_inode(base),)):
        items += _of_domain(f"{base}/{domain}", domain, (_inode(base),))
    if not items:
        raise InputError(f"data.root: {root} {_what_is_wrong(base)}")
    return items


def site(root: Path, domain: str) -> Found:
    """The images of one site, DIR/<class>/<image>, named as if DIR were one domain's folder among others."""
    if not root.is_dir():
        raise InputError(f"data-root: no folder {root}", public="its data-root is no folder")
    items = _of_domain(os.fspath(root), domain, ())
    if not items:
        raise InputError(f"data-root: {root} holds no <class>/<image>", public="its data-root holds no <class>/<image>")
    return Found(Files(root, items, within=f"{domain}/"))


def _of_domain(folder: str, domain: str, above: Inodes) -> list[Item]:
    above = (*above, _inode(folder))
    items = []
    for label in _folders(folder, above):
        names = _images(f"{folder}/{label}", above)
        items += [Item(f"{domain}/{label}/{name}", domain, label) for name in names]
    for item in items:
        if any("\udc80" <= letter <= "\udcff" for letter in item.name):
            path = f"{folder}/{item.name.removeprefix(f'{domain}/')}"
            raise InputError(
                f"the name of {os.fsencode(path)!r} is not UTF-8: rename it", public="the name of an image is not UTF-8"
            )
    return items


def _images(folder: str, above: Inodes) -> Iterator[str]:
    """Names of the images in a folder and in those within it, in order; a link back to one above is not followed."""
    here = (*above, _inode(folder))
    for entry in _entries(folder):
        if _is_folder(entry):
            if _inode(entry.path) not in here:
                yield from (f"{entry.name}/{name}" for name in _images(entry.path, here))
        elif entry.name.lower().endswith(SUFFIXES):
            yield entry.name


def _folders(path: str, above: Inodes) -> list[str]:
    """Names of the folders in a folder, in order, but for links back to one above."""
    return [entry.name for entry in _entries(path) if _is_folder(entry) and _inode(entry.path) not in above]


def _entries(path: str) -> list["os.DirEntry[str]"]:
    with os.scandir(path) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _inode(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _what_is_wrong(root: str) -> str:
    """The likeliest mistake."""
    right = "it should hold <domain>/<class>/<image>: put the classes of each site into a folder with the site's name"
    for name in _images(root, ()):
        place = "/".join(["<class>" for _ in name.split("/")[:-1]] + ["<image>"])
        return f"holds images as {place}, such as {name}; {right}"
    hint = "; use --dataset arrays for its .npz files" if list(Path(root).glob("*.npz")) else ""
    return f"holds no image; it should hold <domain>/<class>/<image>{hint}"
