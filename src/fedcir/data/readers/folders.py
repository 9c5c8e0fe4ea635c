"""`folders`: any DIR/<domain>/<class>/<image>. Other datasets of files are this with their names checked.

Folders train, val and test, above those of the domains or within each, are the split.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from fedcir.data.pictures.items import Files, Found, Item
from fedcir.data.pictures.square import SUFFIXES
from fedcir.data.readers.levels import PARTS, Counts, Level, split_level, top_level
from fedcir.data.readers.parts import agreed, some
from fedcir.data.readers.unused import kind_of, unused_files
from fedcir.types import InputError


def folders(root: Path) -> Found:
    """All images, and a word on folders that hold none where a domain's should be."""
    found = scan(root)
    names = {name for level in split_level(top_level(root)) for name in level.folders()}
    empty = sorted(names - {item.domain for item in found.pictures.items})
    note = f"folders that hold no <class>/<image> and are left out: {some(empty)}"
    return found._replace(notes=(*found.notes, note)) if empty else found


def scan(root: Path) -> Found:
    """All images below DIR/<domain>/<class>/, in the order of their names, folders within a class too.

    Hidden files and folders are passed over. Other files that are not used are counted.
    """
    top = top_level(root)
    unused = Counts()
    domains: dict[str, list[Level]] = {}
    for level in _divided(top, unused):
        for name in level.folders():
            domains.setdefault(name, []).append(level.within(name))
    items = [item for name in sorted(domains) for item in _of_domain(name, domains[name], unused)]
    if not items:
        raise InputError(f"data.root: {root} {_what_is_wrong(top, unused)}")
    items, notes = agreed(items)
    return Found(Files(root, items), notes, unused_files(unused))


def site(root: Path, domain: str) -> Found:
    """The images of one site, DIR/<class>/<image>, named as if DIR were one domain's folder among others."""
    if not root.is_dir():
        raise InputError(f"data-root: there is no folder {root}", public="its data-root is not a folder")
    unused = Counts()
    items, notes = agreed(_of_domain(domain, [top_level(root, f"{domain}/")], unused))
    if not items:
        raise InputError(f"data-root: {root} holds no <class>/<image>", public="its data-root holds no <class>/<image>")
    return Found(Files(root, items, within=f"{domain}/"), notes, unused_files(unused))


def _of_domain(domain: str, places: Sequence[Level], unused: Counts) -> list[Item]:
    """The images of a domain, whose class folders are in these places."""
    items = []
    for level in (level for place in places for level in _divided(place, unused)):
        for label in level.folders():
            folder = level.within(label)
            for name in folder.files():
                if name.lower().endswith(SUFFIXES):
                    items.append(Item(_utf8(folder, name), domain, label, level.part))
                else:
                    unused[folder.name, kind_of(name)] += 1
    return items


def _divided(level: Level, unused: Counts) -> list[Level]:
    """The level, or the folders in it that are a split; files beside these are counted."""
    levels = [level] if level.part is not None else split_level(level)
    for each in {level, *levels}:
        each.count_files(unused)
    return levels


def _utf8(folder: Level, name: str) -> str:
    """The name of an image, which must mean the same on every machine."""
    whole = f"{folder.name}{name}"
    try:
        whole.encode()
    except UnicodeEncodeError:
        path = os.fsencode(f"{folder.path}/{name}")
        raise InputError(
            f"the name of {path!r} is not UTF-8: rename it", public="the name of an image is not UTF-8"
        ) from None
    return whole


def _what_is_wrong(top: Level, unused: Counts) -> str:
    """The likeliest mistake."""
    right = "it should hold <domain>/<class>/<image>: put the classes of each domain into a folder of its own"
    for name in top.images():
        *folders, _ = name.split("/")
        place = "/".join([*(each if each.casefold() in PARTS else "<class>" for each in folders), "<image>"])
        return f"holds images as {place}, such as {name}; {right}"
    if any(kind == ".npz" for _, kind in unused):
        hint = "; use the dataset arrays for its .npz files"
    else:
        hint = f"; it holds {there[0]}" if (there := unused_files(unused)) else ""
    return f"holds no images; it should hold <domain>/<class>/<image>{hint}"
