"""`folders`: images in DIR/<domain>/<class>/, with or without folders train, val and test at some level."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedcir.config import DataConfig
from fedcir.data.decoding import SUFFIXES
from fedcir.data.sources.source import (
    SYSTEM_FILES,
    DatasetSource,
    ImageFiles,
    ImageIndex,
    ImageRecord,
    Part,
    kind_of,
    unused_files,
)
from fedcir.errors import InputError
from fedcir.text import join_names

Counts = Counter[tuple[str, str]]  # number of files by folder and kind

PARTS: dict[str, Part] = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
"""Names of the folders of a split, in lower case."""


class Folder(NamedTuple):
    """A folder below the root of a dataset."""

    path: str
    name: str  # prefix of the names of its images
    inodes: tuple[tuple[int, int], ...]  # of this folder and its parents: a link to one of them is not followed
    part: Part | None = None

    def within(self, folder: str, part: Part | None = None) -> "Folder":
        path = f"{self.path}/{folder}"
        return Folder(path, f"{self.name}{folder}/", (*self.inodes, _get_inode(path)), part or self.part)

    def folders(self) -> list[str]:
        """Return the sorted names of the folders in it."""
        return [e.name for e in _list_entries(self.path) if _is_folder(e) and _get_inode(e.path) not in self.inodes]

    def files(self) -> Iterator[str]:
        """Yield the sorted names of all files below it, of each folder once."""
        seen = set(self.inodes)  # there is no recursion, since folders may be nested deeply
        open_folders = [("", iter(_list_entries(self.path)))]
        while open_folders:
            prefix, entries = open_folders[-1]
            entry = next(entries, None)
            if entry is None:
                open_folders.pop()
            elif not _is_folder(entry):
                yield f"{prefix}{entry.name}"
            elif (inode := _get_inode(entry.path)) not in seen:
                seen.add(inode)
                open_folders.append((f"{prefix}{entry.name}/", iter(_list_entries(entry.path))))

    def images(self) -> Iterator[str]:
        return (name for name in self.files() if name.lower().endswith(SUFFIXES))

    def has_images(self, folder: str) -> bool:
        return next(self.within(folder).images(), None) is not None


def open_folder(root: "str | os.PathLike[str]", name: str = "") -> Folder:
    path = os.fspath(root)
    return Folder(path, name, (_get_inode(path),))


def _list_entries(path: str) -> list["os.DirEntry[str]"]:
    """Return the sorted entries of a folder, without hidden ones."""
    with _report_unreadable(path), os.scandir(path) as entries:
        visible = [e for e in entries if not e.name.startswith(".") and e.name.lower() not in SYSTEM_FILES]
    return sorted(visible, key=lambda entry: entry.name)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _get_inode(path: str) -> tuple[int, int]:
    with _report_unreadable(path):
        status = os.stat(path)
    return status.st_dev, status.st_ino


@contextmanager
def _report_unreadable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        public = "a folder of its images cannot be read"
        raise InputError(f"cannot read the folder {path}: {error.strerror}", public=public) from error


def split_level(level: Folder) -> list[Folder]:
    """Return the folders train, val and test of a folder, or the folder itself if there is no such split.

    A class may be called train or test, so these folders are a split only if there are no others beside them.
    """
    names = level.folders()
    parts = {name: PARTS[name.casefold()] for name in names if name.casefold() in PARTS and level.has_images(name)}
    if not parts:
        return [level]
    kinds = set(parts.values())
    whole = "train" in kinds and len(kinds) > 1
    stray = next((name for name in names if name not in parts and level.has_images(name)), None)
    names_of_parts = " and ".join(parts)
    if stray is None and not whole:
        missing = "test" if "train" in kinds else "train"
        raise InputError(
            f"{level.path} holds {names_of_parts} but no {missing}: add it, "
            f"or move the folders in {names_of_parts} one level up, or rename {names_of_parts} if this is not a split"
        )
    inner = {name for part in parts for name in level.within(part).folders()}
    if stray is not None and (whole or not inner.isdisjoint(names)):
        raise InputError(
            f"{level.path} mixes a split ({names_of_parts}) with other folders ({stray}): "
            f"put {stray} into train, or rename the folders that are not part of a split"
        )
    return [level] if stray is not None else [level.within(name, part) for name, part in parts.items()]


def assign_parts(
    items: list[ImageRecord], plural: str = "folders", singular: str = "folder"
) -> tuple[list[ImageRecord], tuple[str, ...]]:
    """Use the validation images of a domain as test images if it has no test set, and describe the splits in notes.

    Validation images were selected by someone who knew the images, while a random test set might show the same patient
    or scene as the training images. `plural` and `singular` are the words for the parts in notes.
    """
    parts: dict[str, set[Part | None]] = {}
    for item in items:
        parts.setdefault(item.domain, set()).add(item.part)
    if not any(part for domain_parts in parts.values() for part in domain_parts):
        return items, ()
    notes = []
    used = f"the {plural} train{{}} are used as the split"
    for required, sentence in (
        ({"train", "test"}, used.format(" and test")),
        ({"train", "validation", "test"}, used.format(", val and test") + "; the best round is picked on val"),
        ({"train", "validation"}, used.format(" and val") + f"; there is no {singular} test, so val is tested on"),
        ({None}, f"there are no {plural} train and test, so test images are drawn at random"),
    ):
        if domains := [domain for domain, domain_parts in parts.items() if domain_parts == required]:
            notes.append(f"{'all domains' if len(domains) == len(parts) > 1 else join_names(domains)}: {sentence}")
    tested = {domain for domain, domain_parts in parts.items() if domain_parts == {"train", "validation"}}
    items = [i._replace(part="test") if i.domain in tested and i.part == "validation" else i for i in items]
    return items, tuple(notes)


def list_folder_images(root: Path) -> ImageIndex:
    """List all images below DIR/<domain>/<class>/, sorted by name, also those in folders within a class.

    Hidden files and folders are skipped. Other files that are not used are counted.
    """
    top = open_folder(root)
    unused = Counts()
    domains: dict[str, list[Folder]] = {}
    for level in _split_or_whole(top, unused):
        for name in level.folders():
            domains.setdefault(name, []).append(level.within(name))
    items = [item for name in sorted(domains) for item in _list_domain(name, domains[name], unused)]
    if not items:
        raise InputError(f"data.root: {root} {_explain_no_images(top, unused)}")
    items, notes = assign_parts(items)
    return ImageIndex(ImageFiles(root, items), notes, unused_files(unused))


def list_site_folder(root: Path, domain: str) -> ImageIndex:
    """List the images of one site, DIR/<class>/<image>, named as if DIR were the folder of a domain."""
    if not root.is_dir():
        raise InputError(f"data-root: there is no folder {root}", public="its data-root is not a folder")
    unused = Counts()
    items, notes = assign_parts(_list_domain(domain, [open_folder(root, f"{domain}/")], unused))
    if not items:
        raise InputError(f"data-root: {root} holds no <class>/<image>", public="its data-root holds no <class>/<image>")
    return ImageIndex(ImageFiles(root, items, prefix=f"{domain}/"), notes, unused_files(unused))


def _list_domain(domain: str, folders: Sequence[Folder], unused: Counts) -> list[ImageRecord]:
    """List the images of a domain, whose class folders are in these folders."""
    items = []
    for level in (level for parent in folders for level in _split_or_whole(parent, unused)):
        for label in level.folders():
            folder = level.within(label)
            for file in folder.files():
                if not file.lower().endswith(SUFFIXES):
                    unused[folder.name, kind_of(file)] += 1
                    continue
                name = f"{folder.name}{file}"
                try:
                    name.encode()  # names are the same on every machine
                except UnicodeEncodeError:
                    raise InputError(
                        f"the name of {os.fsencode(f'{folder.path}/{file}')!r} is not UTF-8: rename it",
                        public="the name of an image is not UTF-8",
                    ) from None
                items.append(ImageRecord(name, domain, label, level.part))
    return items


def _split_or_whole(level: Folder, unused: Counts) -> list[Folder]:
    """Return the parts of a split folder, or the folder itself, and count the files directly in them."""
    levels = [level] if level.part is not None else split_level(level)
    for folder in {level, *levels}:
        unused.update((folder.name, kind_of(e.name)) for e in _list_entries(folder.path) if not _is_folder(e))
    return levels


def _explain_no_images(top: Folder, unused: Counts) -> str:
    """Describe the likeliest mistake in the layout of the folders."""
    right = "it should hold <domain>/<class>/<image>: put the classes of each domain into a folder of its own"
    for image in top.images():
        *folders, _ = image.split("/")
        layout = "/".join([*(name if name.casefold() in PARTS else "<class>" for name in folders), "<image>"])
        return f"holds images as {layout}, such as {image}; {right}"
    if any(kind == ".npz" for _, kind in unused):
        hint = "; use the dataset arrays for its .npz files"
    else:
        hint = f"; it holds {others[0]}" if (others := unused_files(unused)) else ""
    return f"holds no images; it should hold <domain>/<class>/<image>{hint}"


class Folders(DatasetSource):
    about = "Your own images."
    where = "DIR/<domain>/<class>/<image>"

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        """List all images, and note folders without images at the level of domains."""
        index = list_folder_images(root)
        names = {name for level in split_level(open_folder(root)) for name in level.folders()}
        empty = sorted(names - {item.domain for item in index.pictures.items})
        note = f"folders that hold no <class>/<image> and are left out: {join_names(empty)}"
        return index._replace(notes=(*index.notes, note)) if empty else index
