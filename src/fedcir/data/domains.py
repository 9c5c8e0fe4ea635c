"""The one type that every dataset returns: images by domain, split into train and test, with class names."""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcir.data.partition.names import Chosen
from fedcir.rng import numpy_rng

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Kind = Literal["file", "pixels"]


class ContentHashes(NamedTuple):
    """A hash of each of some images: of its file, or of its pixels."""

    kind: Kind
    values: Hashes


@dataclass(frozen=True)
class Split:
    """Samples with their labels, and a name for each that stays the same from run to run."""

    images: Images  # (M, H, W, C): often a whole dataset, mapped from a file, of which `rows` are these samples
    labels: Labels  # (N,)
    ids: Sequence[str]
    rows: Indices | None = None
    """Where each sample's image is; all images in their order if not given."""
    groups: Indices | None = None
    """The number of each sample's group, (N,), which no split may tear apart; None if each stands for itself."""
    hashes: ContentHashes | None = None
    """Of the content of all `images`, (M,), where it is known."""

    def __post_init__(self) -> None:
        images = len(self.images if self.rows is None else self.rows)
        if not images == len(self.labels) == len(self.ids):
            raise ValueError(f"{images} images, {len(self.labels)} labels and {len(self.ids)} ids do not match")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def where(self) -> Indices:
        """The row of each sample's image."""
        return np.arange(len(self.images)) if self.rows is None else self.rows

    def pixels(self, indices: Sequence[int] | Indices) -> Images:
        """A copy of the images of these samples."""
        chosen = np.asarray(self.images[self._at(np.asarray(indices, dtype=np.int64))])
        _release(self.images)
        return chosen

    def take(self, indices: Sequence[int] | Indices) -> "Split":
        """These samples, in this order; no image and no name is copied."""
        chosen = np.asarray(indices, dtype=np.int64)
        groups = None if self.groups is None else self.groups[chosen]
        ids = Chosen(self.ids, chosen)
        some = Split(self.images, self.labels[chosen], ids, self._at(chosen), groups, self.hashes)
        _release(self.labels)
        return some

    def _at(self, chosen: Indices) -> Indices:
        return chosen if self.rows is None else self.rows[chosen]


@dataclass(frozen=True)
class Domain:
    name: str
    train: Split
    test: Split
    validation: Split | None = None


@dataclass(frozen=True)
class Domains:
    """A dataset: the same classes seen in several domains."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    content: str = ""
    """A hash of all that is in it, where the source has one; made from the pixels otherwise."""
    notes: tuple[str, ...] = ()
    """What its user should know, such as files that were left out."""

    def __iter__(self) -> Iterator[Domain]:
        return iter(self.domains)

    def __len__(self) -> int:
        return len(self.domains)

    def __getitem__(self, name: str) -> Domain:
        for domain in self.domains:
            if domain.name == name:
                return domain
        raise KeyError(f"no domain {name!r} in {self.name}; it has {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(domain.name for domain in self.domains)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels, the same in every domain."""
        height, width, channels = self.domains[0].train.images.shape[1:]
        return height, width, channels

    def capped(self, train_per_domain: int, seed: int) -> "Domains":
        """At most this many training images a domain, a seeded sample that keeps the shares of the classes."""
        kept = []
        for domain in self.domains:
            rng = numpy_rng(seed, "train_per_domain", domain.name)
            chosen = stratified_sample(domain.train.labels, train_per_domain, rng)
            kept.append(replace(domain, train=domain.train.take(chosen)))
        return replace(self, domains=tuple(kept))


def stratified_sample(labels: Labels, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Indices of `size` samples (or all), ascending, each class in its share as nearly as whole numbers allow."""
    if size >= len(labels):
        return np.arange(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * (size / len(labels))
    quota = np.floor(exact).astype(int)
    remainder = size - quota.sum()
    quota[np.argsort(quota - exact, kind="stable")[:remainder]] += 1  # the largest fractions are rounded up
    picks = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, quota, strict=True)]
    return np.sort(np.concatenate(picks))


def rows_by_group(groups: Indices) -> list[Indices]:
    """The rows of each group, in the order of their numbers."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _release(images: Images | Labels) -> None:
    """Let go of the pages of a map that were read: the system keeps them, but they no longer count as ours."""
    pages: object = images
    while isinstance(pages, np.ndarray):  # a view has the array that it is of as its base
        pages = pages.base
    if isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)
