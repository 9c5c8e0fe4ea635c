"""The type that every dataset returns: examples by domain, split into train and test, with class names."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcir.tasks.classification import Classification
from fedcir.tasks.task import Task

if TYPE_CHECKING:
    from fedcir.data.encoding import ColumnSummary

Images = NDArray[Any]
"""Images, uint8 (M, H, W, C), or other inputs of any shape, float32 (M, ...)."""
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]
HashKind = Literal["file", "pixels"]
CHUNK = 1024  # images that are read at once
CLASSIFICATION = Classification(())


class ContentHashes(NamedTuple):
    """Hashes of images, each of the image's file or of its pixels."""

    kind: HashKind
    values: Hashes


@dataclass(frozen=True)
class Split:
    """Labelled samples whose images are rows of an array that several splits may share."""

    images: Images  # (M, H, W, C): often a whole dataset that is mapped from a file
    labels: Labels  # (N,): classes, or the strata of other tasks, by which samples are divided
    names: Sequence[str] | str
    """Names of all `images`, (M,), the same in every run; or a prefix, which the number of the image follows."""
    rows: Indices | None = None  # of each sample's image, (N,); None if the samples are all images in their order
    groups: Indices | None = None  # of each sample, (N,): no split divides a group. None if there are no groups
    hashes: ContentHashes | None = None  # of all `images`, (M,), where they are known
    targets: NDArray[Any] | None = None
    """Targets of all `images` for tasks without classes, (M, ...); None if `labels` are the targets."""

    def __post_init__(self) -> None:
        images = len(self.images if self.rows is None else self.rows)
        if images != len(self.labels):
            raise ValueError(f"{images} images and {len(self.labels)} labels do not match")
        if self.rows is None and not isinstance(self.names, str) and len(self.names) != images:
            raise ValueError(f"{images} images and {len(self.names)} names do not match")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def noun(self) -> str:
        """What a sample is called: an image, a row of numbers, or an example of another shape."""
        return "image" if self.images.dtype == np.uint8 else "row" if self.images.ndim == 2 else "example"

    @property
    def where(self) -> Indices:
        """Row of each sample's image."""
        return np.arange(len(self.images)) if self.rows is None else self.rows

    @property
    def ids(self) -> list[str]:
        """Name of each sample."""
        return self.select_names(np.arange(len(self)))

    def select_names(self, indices: Indices) -> list[str]:
        """Return the names of these samples."""
        rows = self._select_rows(indices).tolist()
        if isinstance(self.names, str):
            return [f"{self.names}{row:06d}" for row in rows]
        return [self.names[row] for row in rows]

    def pixels(self, indices: Sequence[int] | Indices) -> Images:
        """Copy the images of these samples."""
        pixels = np.asarray(self.images[self._select_rows(np.asarray(indices, dtype=np.int64))])
        _release_pages(self.images)
        return pixels

    def select_targets(self, indices: Indices) -> NDArray[Any]:
        """Return the targets of these samples: class numbers, or what `targets` holds."""
        if self.targets is None:
            return self.labels[indices]
        selected = np.asarray(self.targets[self._select_rows(indices)])
        _release_pages(self.targets)
        return selected

    def chunks(self) -> Iterator[Images]:
        """Copy all images, at most CHUNK at a time, since a split may be larger than the memory."""
        for start in range(0, len(self), CHUNK):
            yield np.ascontiguousarray(self.pixels(np.arange(start, min(start + CHUNK, len(self)))))

    def take(self, indices: Sequence[int] | Indices) -> "Split":
        """Select samples, in this order, without copying images or names."""
        chosen = np.asarray(indices, dtype=np.int64)
        groups = None if self.groups is None else self.groups[chosen]
        split = replace(self, labels=self.labels[chosen], rows=self._select_rows(chosen), groups=groups)
        _release_pages(self.labels)
        return split

    def _select_rows(self, indices: Indices) -> Indices:
        return indices if self.rows is None else self.rows[indices]


@dataclass(frozen=True)
class Domain:
    name: str
    train: Split
    test: Split
    validation: Split | None = None

    @property
    def splits(self) -> list[Split]:
        return [split for split in (self.train, self.test, self.validation) if split is not None]


@dataclass(frozen=True)
class Domains:
    """A dataset: the same classes seen in several domains."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[Domain, ...]
    content: str = ""  # hash of all files; empty if the source is not files
    notes: tuple[str, ...] = ()  # for the user, such as how many files were left out
    columns: tuple["ColumnSummary", ...] = ()  # of tables whose cells are not encoded yet
    task: Task = CLASSIFICATION  # the names of a task with classes are `classes`; other tasks have no classes

    def __post_init__(self) -> None:
        if self.task.has_classes:
            object.__setattr__(self, "task", replace(self.task, names=self.classes))

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
    def has_images(self) -> bool:
        return self.domains[0].train.images.dtype == np.uint8

    @property
    def noun(self) -> str:
        """What a sample is called."""
        return self.domains[0].train.noun

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of an example, the same in every domain."""
        return self.domains[0].train.images.shape[1:]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels, the same in every domain."""
        height, width, channels = self.domains[0].train.images.shape[1:]
        return height, width, channels

    def map_splits(self, convert: Callable[[Split], Split]) -> "Domains":
        """Convert the training and test images of every domain."""
        domains = (replace(domain, train=convert(domain.train), test=convert(domain.test)) for domain in self.domains)
        return replace(self, domains=tuple(domains))


def stratified_sample(labels: Labels, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `size` samples (or all) in proportion to their classes, and return their indices in ascending order."""
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
    """Return the rows of each group, in the order of group numbers."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _release_pages(array: NDArray[Any]) -> None:
    """Release the pages of a memory map that were read, so that they do not count as memory of this process."""
    base: object = array
    while isinstance(base, np.ndarray):  # the base of a view is the array that it shows
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
