"""A dataset opened: read, split, cut to what was asked for, and checked."""

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from fedcir.config import DataConfig, check_memory, nearest
from fedcir.data.catalogue import ALL, IMAGE_SIZE, Source, find, named_classes
from fedcir.data.collection import without_collection
from fedcir.data.domains import Domains, Images, Split
from fedcir.data.hashes import drop_copies, hash_arrays
from fedcir.data.pictures.cache import Prepared, prepare
from fedcir.data.pictures.decode import OnFile
from fedcir.data.pictures.items import Found, Item, Pictures
from fedcir.data.pictures.square import RGB, Limits
from fedcir.data.readers.folders import site
from fedcir.data.readers.named import verify
from fedcir.data.readers.spelling import notes_on_spelling
from fedcir.data.readers.table import LABELS, table_of_site
from fedcir.data.readers.unused import notes_on_unused
from fedcir.data.split import Splitting, split_items, with_validation
from fedcir.types import InputError

HELD: ContextVar[tuple[DataConfig, int, Domains] | None] = ContextVar("held", default=None)
"""The dataset that a process holds open, for itself and for those that are forked from it."""


def open_dataset(
    data: DataConfig,
    seed: int,
    on_file: OnFile | None = None,
    to_train: bool = True,
    test_seed: int | None = None,
) -> Domains:
    """The configured dataset, checked to be one that can be trained on unless it is only looked at.

    Test images are drawn by `test_seed`, or by `seed` if it is not given; all else is drawn by `seed`.
    """
    test_seed = seed if test_seed is None else test_seed
    held = HELD.get()
    if to_train and test_seed == seed and held is not None and held[:2] == (data, seed):
        return held[2]
    with without_collection():
        return _open(data, seed, on_file, to_train, test_seed)


def _open(data: DataConfig, seed: int, on_file: OnFile | None, to_train: bool, test_seed: int) -> Domains:
    source, root = find(data)
    if source.pictures is not None:
        pictures, notes, _ = pictures_of(source, root, data)
        prepared = _prepared(data.name, root, pictures, data, on_file)
        domains = split_items(data.name, pictures.items, prepared, Splitting(data.test_fraction, test_seed))
        domains = replace(domains, notes=(*notes, *domains.notes))
    else:
        assert source.arrays is not None
        domains = source.arrays(root)
        if classes := named_classes(data):
            domains = _of_classes(domains, classes)
        if data.image_size is not None:
            domains = _resized(domains, data.image_size)
        if data.channels not in (None, domains.image_shape[-1]):
            raise InputError(
                f"data.channels is {data.channels}, but the images of {data.name} have {domains.image_shape[-1]} "
                "channels, which they keep: leave data.channels out"
            )
    if not to_train:
        return domains
    check_classes(domains, f"in any domain of {data.name}")
    if source.pictures is None:  # of pictures, copies are left out before they are split
        domains = drop_copies(hash_arrays(domains), "test")
    domains = _held_back(domains, data, seed)
    if data.train_per_domain is not None:
        check_classes(domains, f"left; raise data.train_per_domain={data.train_per_domain}")
    return domains


def open_site(
    root: Path,
    domain: str,
    data: DataConfig,
    seed: int,
    classes: Sequence[str] = (),
    on_file: OnFile | None = None,
) -> Domains:
    """One site's own images, split as a domain of `folders` or `table` would be; of the classes that are agreed."""
    with without_collection():
        found = site_pictures(root, domain, data)
        pictures = of_classes(found.pictures, classes or None, root, missing=True)
        prepared = _prepared("folders", root, pictures, data, on_file)
        domains = split_items("folders", pictures.items, prepared, Splitting(data.test_fraction, seed), classes)
        notes = (*found.notes, *notes_on_unused(found.unused), *domains.notes)
        return _held_back(replace(domains, notes=notes), data, seed)


def _prepared(name: str, root: Path, pictures: Pictures, data: DataConfig, on_file: OnFile | None) -> Prepared:
    limits = Limits(data.max_bytes, data.max_pixels)
    return prepare(name, str(root), pictures, data.image_size or IMAGE_SIZE, on_file, data.channels or RGB, limits)


def site_pictures(root: Path, domain: str, data: DataConfig) -> Found:
    """One site's own images: those of its labels.csv if it has one, else DIR/<class>/<image>."""
    return table_of_site(root, domain, data.columns) if (root / LABELS).is_file() else site(root, domain)


def _held_back(domains: Domains, data: DataConfig, seed: int) -> Domains:
    """What is left to train on once validation images are set aside and domains are cut to size."""
    if data.val_fraction:
        given = [domain.name for domain in domains if domain.validation is not None]
        kept = tuple(d if d.name in given else with_validation(d, data.val_fraction, seed) for d in domains)
        unused = f"data.val_fraction={data.val_fraction} is not used for domains that have validation images"
        note = f"{unused}: {', '.join(given)}"
        domains = replace(domains, domains=kept, notes=(*domains.notes, note) if given else domains.notes)
        domains = drop_copies(domains, "validation")
    return domains if data.train_per_domain is None else domains.capped(data.train_per_domain, seed)


def pictures_of(source: Source, root: Path, data: DataConfig) -> Found:
    """The pictures of a dataset, those of the configured classes, its names checked."""
    assert source.pictures is not None
    found = source.pictures(root, data)
    if source.published is not None:
        verify(found.pictures.items, source.published, data.name, root)
    pictures = of_classes(found.pictures, data.classes, root)
    spelling = notes_on_spelling(labels_of(pictures.items))
    return Found(pictures, (*found.notes, *notes_on_unused(found.unused), *spelling), found.unused)


def labels_of(items: Sequence[Item]) -> dict[str, Counter[str]]:
    """Images by domain and class."""
    counts: dict[str, Counter[str]] = {}
    for item in items:
        counts.setdefault(item.domain, Counter())[item.label] += 1
    return counts


def of_classes(pictures: Pictures, classes: Sequence[str] | None, root: Path, missing: bool = False) -> Pictures:
    """Those of the given classes, of which some may be `missing`."""
    if classes is None or classes == ALL:
        return pictures
    if not missing:
        _known(classes, {item.label for item in pictures.items}, str(root))
    return pictures.only([row for row, item in enumerate(pictures.items) if item.label in classes])


def _known(classes: Sequence[str], there: set[str], where: str) -> None:
    for label in classes:
        if label not in there:
            raise InputError(f"data.classes: there is no class {label!r} in {where}; {nearest(label, there)}")


def _of_classes(domains: Domains, classes: Sequence[str]) -> Domains:
    _known(classes, set(domains.classes), domains.name)
    kept = sorted(domains.classes.index(label) for label in set(classes))
    number = np.full(len(domains.classes), -1)
    number[kept] = np.arange(len(kept))

    def of(split: Split) -> Split:
        some = split.take(np.flatnonzero(number[split.labels] >= 0))
        return replace(some, labels=number[some.labels])

    some = tuple(replace(domain, train=of(domain.train), test=of(domain.test)) for domain in domains)
    return replace(domains, classes=tuple(domains.classes[k] for k in kept), domains=some)


def _resized(domains: Domains, size: int) -> Domains:
    if domains.image_shape[:2] == (size, size):
        return domains
    images = sum(len(split) for domain in domains for split in (domain.train, domain.test))
    check_memory(images * size * size * domains.image_shape[-1], f"data.image_size={size} for {images:,} images")

    def of(split: Split) -> Split:
        images = np.stack([_square(image, size) for image in split.pixels(np.arange(len(split)))])
        return Split(images, split.labels, split.ids)

    return replace(domains, domains=tuple(replace(d, train=of(d.train), test=of(d.test)) for d in domains))


def _square(image: Images, size: int) -> Images:
    channels = [
        np.asarray(Image.fromarray(image[..., c]).resize((size, size), Image.Resampling.BILINEAR))
        for c in range(image.shape[-1])
    ]
    return np.stack(channels, axis=-1)


def check_classes(domains: Domains, where: str) -> None:
    """Two classes, images of each, and no domain of one class only."""
    if len(domains.classes) < 2:
        raise InputError(f"{domains.name} has only one class, {domains.classes[0]!r}: a classifier needs two")
    counts = np.bincount(np.concatenate([d.train.labels for d in domains]), minlength=len(domains.classes))
    for name, count in zip(domains.classes, counts, strict=True):
        if count == 0:
            raise InputError(f"class {name!r} has no training image {where}")
    for domain in domains:
        if not len(domain.train) or not len(domain.test):
            raise InputError(f"domain {domain.name!r} has no image left to train or to test on")
        if len(np.unique(domain.train.labels)) == 1:
            only = domains.classes[domain.train.labels[0]]
            raise InputError(
                f"domain {domain.name!r} holds only the class {only!r}: add images of another, or leave the domain out"
            )
