"""`folders`: any DIR/<domain>/<class>/<image>. Other datasets of files are this with their names checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcir.data.cache import OnFile, prepare
from fedcir.data.domains import Domain, Domains, Labels, Rows, Split, stratified_sample
from fedcir.data.pictures import SUFFIXES
from fedcir.rng import numpy_rng
from fedcir.types import InputError


@dataclass(frozen=True)
class ImageFile:
    """An image by its place: `name` is its path below the root."""

    name: str
    domain: str
    label: str
    test: bool | None = None
    """Whether a published list puts it into the test set; None where none tells."""


@dataclass(frozen=True)
class Splitting:
    """How files are divided where no list tells."""

    test_fraction: float
    seed: int


def scan(root: Path) -> list[ImageFile]:
    """All images below DIR/<domain>/<class>/, in the order of their names; hidden files and folders are passed over."""
    files = []
    for domain in _folders(root):
        for label in _folders(domain):
            for path in sorted(label.iterdir()):
                if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and not path.is_dir():
                    files.append(ImageFile(path.relative_to(root).as_posix(), domain.name, label.name))
    if not files:
        raise InputError(f"data.root: {root} holds no image; it should hold <domain>/<class>/<image>")
    return files


def open_files(
    name: str, root: Path, files: Sequence[ImageFile], size: int, splitting: Splitting, on_file: OnFile | None = None
) -> Domains:
    """A dataset of these files: decoded, without duplicates, split into train and test domain by domain."""
    for file in files:
        if not (root / file.name).is_file():
            raise InputError(f"{root / file.name} is missing, or a link that leads nowhere")
    prepared = prepare(root, [file.name for file in files], size, on_file)
    classes = tuple(sorted({file.label for file in files}))
    number = {label: i for i, label in enumerate(classes)}
    kept = without_duplicates(files, prepared.digests)
    domains = []
    for domain in dict.fromkeys(file.domain for file in files):
        rows = np.array([row for row in kept if files[row].domain == domain], dtype=np.int64)
        labels = np.array([number[files[row].label] for row in rows], dtype=np.int64)
        whole = Split(prepared.images, labels, [files[row].name for row in rows], rows)
        listed = [files[row].test for row in rows]
        test = _listed_or_drawn(listed, labels, splitting, domain)
        if not len(test) or len(test) == len(rows):
            raise InputError(f"domain {domain!r} has {len(rows)} images, too few to train and to test on")
        train = np.setdiff1d(np.arange(len(rows)), test)
        domains.append(Domain(domain, whole.take(train), whole.take(test)))
    return Domains(name, classes, tuple(domains), prepared.content)


def without_duplicates(files: Sequence[ImageFile], digests: Sequence[str]) -> list[int]:
    """Rows of which no two are the same file. Of equal ones a test image stays, else the first."""
    chosen: dict[str, int] = {}
    for row, digest in enumerate(digests):
        if digest not in chosen or (files[row].test and not files[chosen[digest]].test):
            chosen[digest] = row
    return sorted(chosen.values())


def _listed_or_drawn(listed: Sequence[bool | None], labels: Labels, splitting: Splitting, domain: str) -> Rows:
    """Indices of the test samples: those of a list where there is one, else a seeded share of every class."""
    if any(each is not None for each in listed):
        return np.flatnonzero([bool(each) for each in listed])
    rng = numpy_rng(splitting.seed, "test", domain)
    return stratified_sample(labels, round(len(labels) * splitting.test_fraction), rng)


def _folders(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
