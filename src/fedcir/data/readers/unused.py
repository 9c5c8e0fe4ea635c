"""Files below a dataset's folder that are not used: how many, of which kind, where, and what to do about them."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedcir.data.pictures.square import SUFFIXES

IMAGE = "image"
OF_SYSTEMS = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx"})
"""What systems leave behind: it is passed over as hidden files are."""

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


class Unused(NamedTuple):
    """Files of one kind in one place."""

    place: str
    """The folder below the dataset's; empty for that one itself."""
    kind: str
    """How their names end; `image` for images that are in no class folder."""
    files: int
    advice: str
    """What to do about them, where there is anything to do."""

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        return f"{_files(self.kind, self.files)} {self.place or 'the data root'}{advice}"


def kind_of(name: str) -> str:
    """How a file's name ends, in small letters. A number is no ending: the names of DICOM files are full of them."""
    if name.lower().endswith(SUFFIXES):
        return IMAGE
    stem, _, ending = name.lower().rpartition(".")
    packed = stem.rpartition(".")[2] if ending in ("gz", "bz2", "xz") else ""
    known = stem and ending.isalnum() and not ending.isdigit() and len(ending) <= 10
    return f".{packed}.{ending}" if packed in ("nii", "tar") else f".{ending}" if known else ""


def unused_files(counts: Mapping[tuple[str, str], int]) -> tuple[Unused, ...]:
    """Counts by place and kind, images first, then what there is most of."""
    found = [
        Unused(_shown(place.rstrip("/")), _shown(kind), count, ADVICE.get(kind, "") if kind or place else "")
        for (place, kind), count in counts.items()
    ]
    return tuple(sorted(found, key=lambda each: (each.kind != IMAGE, -each.files, each.place, each.kind)))


def notes_on_unused(unused: Sequence[Unused], most: int = 3) -> tuple[str, ...]:
    """One line for a run, kind by kind; none where everything is used."""
    if not unused:
        return ()
    counts = Counter[str]()
    for each in unused:
        counts[each.kind] += each.files
    told = []
    for kind, count in counts.most_common(most):
        places = [each.place or "the data root" for each in unused if each.kind == kind]
        others = f" and {len(places) - 1} other folder{'s' * (len(places) > 2)}" if len(places) > 1 else ""
        advice = f" ({ADVICE[kind]})" if kind in ADVICE else ""
        told.append(f"{_files(kind, count)} {places[0]}{others}{advice}")
    rest = len(counts) - len(told)
    more = f", and {rest} other kind{'s' * (rest > 1)}" if rest else ""
    return (f"files that are not used: {', '.join(told)}{more}; `fedcir data check` lists them",)


def _shown(name: str) -> str:
    """A name that can be printed, even if it is not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _files(kind: str, count: int) -> str:
    plural = "s" * (count > 1)
    if kind == IMAGE:
        return f"{count:,} image{plural} directly in"
    return f"{count:,} {kind} file{plural} in" if kind else f"{count:,} file{plural} without an extension in"
