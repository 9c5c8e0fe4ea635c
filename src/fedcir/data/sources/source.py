"""Base class of datasets, which list image files or load arrays.

Also the notes on names that all sources share: unused files with advice, and classes that may be spelling variants.
"""

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from fedcir.config import DataConfig
from fedcir.data.decoding import SUFFIXES
from fedcir.data.domains import Domains
from fedcir.data.sources.download import Download
from fedcir.errors import InputError
from fedcir.text import join_names

if TYPE_CHECKING:
    from fedcir.data.sources.site_tables import SiteTable

Part = Literal["train", "validation", "test"]
ALL_CLASSES = ("all",)
"""Value of data.classes that selects every class."""
IMAGE = "image"  # kind of an image outside of class folders
SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx"})
"""Files of operating systems, which are skipped like hidden files."""

_ADVICE = {
    "move into a class folder": (IMAGE,),
    "convert to PNG": (
        ".heic", ".heif", ".avif", ".jp2", ".jxl", ".psd", ".tga", ".ppm", ".pgm", ".exr", ".ico",
    ),
    "save one frame as PNG": (".gif",),
    "rename to .jpg": (".jfif", ".jpe"),
    "save slices as PNG": (".nii", ".nii.gz", ".nrrd", ".mha", ".mhd", ".mgz"),
    "save tiles as PNG": (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".czi"),
    "convert to JPEG or PNG": (".raw", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2"),
    "save as PNG": (".svg", ".eps", ".pdf"),
    "save frames as PNG": (".mp4", ".avi", ".mov", ".mkv", ".webm"),
    "unpack": (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".rar", ".7z"),
    "use the dataset arrays": (".npz",),
    "rename to .dcm": (".dicom", ".dic"),
    "if DICOM, rename to .dcm": ("",),
}  # fmt: skip
ADVICE = {kind: advice for advice, kinds in _ADVICE.items() for kind in kinds}


class ImageRecord(NamedTuple):
    """An image file and its annotations."""

    name: str
    """Path below the dataset's root, with / as separator; the same on every machine."""
    domain: str
    label: str
    part: Part | None = None
    """Split that the publisher or a folder assigned; None if neither did."""
    group: str | None = None
    """Images of one group, such as those of a patient, are never divided between train and test."""


class ImageList(Protocol):
    """The images of a dataset, in files or in a table."""

    @property
    def items(self) -> Sequence[ImageRecord]: ...

    def only(self, rows: Sequence[int]) -> "ImageList":
        """Select images."""
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes when an image changes, without reading the images."""
        ...

    def paths(self, staging: Path) -> list[str]:
        """Return a file for each image; images that are not in files are written into `staging`."""
        ...


@dataclass(frozen=True)
class ImageFiles:
    """Image files below a root."""

    root: Path
    items: Sequence[ImageRecord]
    prefix: str = ""  # part of every name that is not part of the path below the root

    def only(self, rows: Sequence[int]) -> "ImageFiles":
        return replace(self, items=[self.items[row] for row in rows])

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(os.fsencode(self.root.resolve()), digest_size=16)
        for item, path in zip(self.items, self.paths(), strict=True):
            try:
                status = os.stat(path)
            except OSError as error:
                shown = f"{self.root}/{item.name.removeprefix(self.prefix)}"
                raise InputError(
                    f"{shown} is missing, or a broken link: restore or remove it", public="an image is a broken link"
                ) from error
            digest.update(f"\0{item.name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def paths(self, staging: Path | None = None) -> list[str]:
        root = os.fspath(self.root.resolve())
        return [f"{root}/{item.name.removeprefix(self.prefix)}" for item in self.items]


class UnusedFiles(NamedTuple):
    """Unused files of one kind in one folder, and what the user can do about them."""

    place: str  # folder below the root; empty for the root
    kind: str  # extension; `image` for images outside of class folders
    files: int
    advice: str  # may be empty

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        return f"{_count_files(self.kind, self.files)} {self.place or 'the data root'}{advice}"


class ImageIndex(NamedTuple):
    """Images that a dataset found, and notes for the user."""

    pictures: ImageList
    notes: tuple[str, ...] = ()
    unused: tuple[UnusedFiles, ...] = ()
    masks: ImageList | None = None
    """Mask of each image, for segmentation."""
    targets: "SiteTable | None" = None
    """Row of each image in a table whose columns `data.target` names; its images have no labels."""


@dataclass(frozen=True)
class Published:
    """Domains and classes of a dataset according to its publication."""

    counts: dict[str, int]  # images by domain
    classes: tuple[str, ...] = ()  # empty if they are not checked
    partial: bool = False  # whether domains may be missing

    def check(self, items: Sequence[ImageRecord], name: str, root: Path) -> None:
        """Raise an error if domains or classes differ from the publication."""
        for kind, plural, got, want in (
            ("domain", "domains", {item.domain for item in items}, set(self.counts)),
            ("class", "classes", {item.label for item in items}, set(self.classes)),
        ):
            if want and (extra := got - want):
                names = f"the {plural} of {name} are {', '.join(sorted(want))}"
                raise InputError(f"{root} has the {kind} {min(extra)!r}, but {names}; use folders for your own images")
            if want and not self.partial and (missing := want - got):
                raise InputError(f"{root} lacks the {kind} {min(missing)!r} of {name}")


class DatasetSource:
    """A dataset. A subclass overrides `list_images` (files, decoded into the cache) or `load_arrays`."""

    about: ClassVar[str] = "Your own dataset."
    licence: ClassVar[str] = "yours"
    size: ClassVar[str] = "any"
    where: ClassVar[str] = "your own file"
    """How to get the dataset."""
    root: ClassVar[Literal["folder", "path", "name", "nothing"]] = "folder"
    """What data.root has to be; a path is a folder or a file."""
    is_table: ClassVar[bool] = False
    """Whether the dataset consists of CSV tables of numbers and categories."""
    published: ClassVar[Published | None] = None
    classes: ClassVar[tuple[str, ...]] = ALL_CLASSES
    """Classes that are used unless data.classes selects others."""
    downloads: ClassVar[tuple[Download, ...]] = ()
    """Files that `fedcir data prepare` downloads."""

    @property
    def has_image_files(self) -> bool:
        """Whether the dataset consists of image files, and not of arrays."""
        return type(self).list_images is not DatasetSource.list_images

    def list_images(self, root: Path, data: DataConfig) -> ImageIndex:
        """List the image files with their domains and labels."""
        raise NotImplementedError

    def load_arrays(self, root: Path) -> Domains:
        """Load images of one size, split into train and test."""
        raise NotImplementedError


def kind_of(name: str) -> str:
    """Return the extension in lower case; a number is not an extension, since names of DICOM files contain many."""
    if name.lower().endswith(SUFFIXES):
        return IMAGE
    stem, _, ending = name.lower().rpartition(".")
    packed = stem.rpartition(".")[2] if ending in ("gz", "bz2", "xz") else ""
    is_extension = stem and ending.isalnum() and not ending.isdigit() and len(ending) <= 10
    return f".{packed}.{ending}" if packed in ("nii", "tar") else f".{ending}" if is_extension else ""


def unused_files(counts: Mapping[tuple[str, str], int]) -> tuple[UnusedFiles, ...]:
    """Convert counts by folder and kind, images first, then the most frequent kinds."""
    unused = []
    for (folder, kind), count in counts.items():
        # Names may not be UTF-8, and are made printable.
        folder_name, ending = (os.fsencode(name).decode(errors="replace") for name in (folder.rstrip("/"), kind))
        unused.append(UnusedFiles(folder_name, ending, count, ADVICE.get(kind, "") if kind or folder else ""))
    return tuple(sorted(unused, key=lambda files: (files.kind != IMAGE, -files.files, files.place, files.kind)))


def notes_on_unused(unused: Sequence[UnusedFiles]) -> tuple[str, ...]:
    """Describe unused files in one note; none if every file is used."""
    if not unused:
        return ()
    counts = Counter[str]()
    for files in unused:
        counts[files.kind] += files.files
    kinds = []
    for kind, count in counts.most_common(3):
        first, *others = (files.place or "the data root" for files in unused if files.kind == kind)
        elsewhere = f" and {len(others)} other folder{'s' * (len(others) > 1)}" if others else ""
        kinds.append(f"{_count_files(kind, count)} {first}{elsewhere}{f' ({ADVICE[kind]})' if kind in ADVICE else ''}")
    rest = len(counts) - len(kinds)
    more = f", and {rest} other kind{'s' * (rest > 1)}" if rest else ""
    return (f"files that are not used: {', '.join(kinds)}{more}; `fedcir data check` lists them",)


def _count_files(kind: str, count: int) -> str:
    plural = "s" * (count > 1)
    if kind == IMAGE:
        return f"{count:,} image{plural} directly in"
    return f"{count:,} {kind} file{plural} in" if kind else f"{count:,} file{plural} without an extension in"


CLOSE = 0.9  # similarity above which two words are spelling variants, such as tumor and tumour
LONG = 5  # letters from which on similar words are unlikely to be different words
SHORT = 3  # letters from which on an s is a plural: MR and MRS are two words
BETWEEN = re.compile(r"(?<=[^\W_])[\s_-]+(?=[^\W\d_])|(?<=[^\W\d_])[\s_-]+(?=[^\W_])")
"""Separators of words, with a letter on at least one side."""


def find_spelling_variants(classes: Mapping[str, Collection[str]]) -> list[tuple[str, str]]:
    """Find pairs of classes that differ in case, separators, a plural s or one letter of a long word.

    `classes` are those of each site. Pairs that occur together at a site are different classes and left out.
    """
    sites: dict[str, set[str]] = {}
    for site, names in classes.items():
        for name in names:
            sites.setdefault(name, set()).add(site)
    by_initial: dict[str, list[str]] = {}
    for name in sorted(name for name in sites if len(sites[name]) < len(classes)):
        by_initial.setdefault("".join(_split_words(name))[:1], []).append(name)
    pairs = (pair for names in by_initial.values() for pair in combinations(names, 2))
    return sorted(
        (a, b) for a, b in pairs if not sites[a] & sites[b] and _are_variants(_split_words(a), _split_words(b))
    )


def notes_on_spelling(classes: Mapping[str, Collection[str]], most: int = 5) -> tuple[str, ...]:
    """Return notes on spelling variants."""
    sites_of = {
        name: join_names([site for site, names in classes.items() if name in names], 3)
        for names in classes.values()
        for name in names
    }
    return tuple(
        f"{a!r} ({sites_of[a]}) and {b!r} ({sites_of[b]}) count as two classes: if they are one, give them one name"
        for a, b in find_spelling_variants(classes)[:most]
    )


def _are_variants(words: Sequence[str], variant: Sequence[str]) -> bool:
    short, long = sorted(("".join(words), "".join(variant)), key=len)
    if long == short or (len(short) >= SHORT and long in (f"{short}s", f"{short}es")):
        return True
    return len(words) == len(variant) and all(
        a == b
        or (
            min(len(a), len(b)) >= LONG
            and (a[0], a[-1]) == (b[0], b[-1])
            and f"{a}{b}".isalpha()
            and SequenceMatcher(None, a, b).ratio() > CLOSE
        )
        for a, b in zip(words, variant, strict=True)
    )


def _split_words(name: str) -> list[str]:
    """Split a name into words in lower case. Signs (HER2+, HER2-) and separators between digits are kept."""
    return BETWEEN.split(unicodedata.normalize("NFKC", name).casefold())
