"""Open a dataset: find it by name, list or load its images, split and limit them, and check that they can be used.

Datasets are found by name, by file (`./mine.py`) or by entry point (group `fedcir.datasets`).
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.cache import prepare_images
from fedcir.data.decoding import MASK, Decoding, OnFile
from fedcir.data.domains import CLASSIFICATION, Domains, Images, Split, stratified_sample
from fedcir.data.sources.arrays import Arrays
from fedcir.data.sources.csv import Csv, build_domains
from fedcir.data.sources.folders import Folders, list_site_folder
from fedcir.data.sources.hub import Hub
from fedcir.data.sources.masks import Masks, list_masks, read_masks
from fedcir.data.sources.minidigits import MiniDigits
from fedcir.data.sources.published import Camelyon17, DomainNet, IWildCam, OfficeCaltech10, Pacs
from fedcir.data.sources.site_tables import read_site_table, read_tables
from fedcir.data.sources.source import (
    ALL_CLASSES,
    DatasetSource,
    ImageIndex,
    ImageList,
    ImageRecord,
    notes_on_spelling,
    notes_on_unused,
)
from fedcir.data.sources.table import LABELS, Table, list_site_table
from fedcir.data.sources.target_columns import list_labels, read_image_targets
from fedcir.data.splits import drop_copies, hash_arrays, split_items, split_validation
from fedcir.data.targets import WantedTask, assign_task
from fedcir.errors import InputError, suggest_name
from fedcir.machine import check_memory
from fedcir.plugins import find_plugin, list_entry_points
from fedcir.rng import numpy_rng
from fedcir.tasks.segmentation import Segmentation
from fedcir.tasks.task import Task

SOURCES: dict[str, type[DatasetSource]] = {
    "minidigits": MiniDigits,
    "folders": Folders,
    "table": Table,
    "masks": Masks,
    "arrays": Arrays,
    "csv": Csv,
    "hub": Hub,
    "pacs": Pacs,
    "office-caltech-10": OfficeCaltech10,
    "domainnet": DomainNet,
    "camelyon17": Camelyon17,
    "iwildcam": IWildCam,
}


def selected_classes(data: DataConfig) -> tuple[str, ...]:
    """Return the classes that `data.classes` names; none if it is left out or selects all."""
    return () if data.classes in (None, ALL_CLASSES) else data.classes or ()


def list_datasets() -> list[str]:
    """Return the names of all datasets, with those of other installed distributions."""
    return [*SOURCES, *list_entry_points("dataset")]


def has_dataset(name: str) -> bool:
    """Check whether a name is that of a dataset; runs of `fedcir.train` on a caller's Datasets have other names."""
    return name in list_datasets() or ".py" in name


def get_source(name: str) -> DatasetSource:
    """Return the dataset of a name, of a file or of an entry point."""

    def is_source(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, DatasetSource) and value is not DatasetSource

    builtin = {builtin_name: lambda source=source: source for builtin_name, source in SOURCES.items()}
    source: type[DatasetSource] = find_plugin(
        "dataset", name, builtin, is_source, "one subclass of fedcir.data.sources.source.DatasetSource"
    )
    return source()


def find_dataset(data: DataConfig) -> tuple[DatasetSource, Path]:
    """Return the configured dataset and its root, which must exist."""
    source = get_source(data.name)
    if data.root is None and data.table is not None and data.name == "table":
        return source, Path(data.table).parent
    if source.root != "nothing" and data.root is None:
        raise InputError(f"dataset {data.name!r} needs data.root, the {source.root} that holds it")
    root = Path(data.root or ".")
    if source.root == "folder" and not root.is_dir():
        if root.exists():
            hint = f": give it as data.table={root}" if data.name == "table" else ""
            message = f"{root} is a file, not a folder{hint}"
        else:
            hint = f"; `fedcir data prepare {data.name} --data-root {root}` fetches it" if source.downloads else ""
            message = f"there is no folder {root}{hint}"
        raise InputError(f"data.root: {message}", public="its data-root is not a folder")
    if source.root == "path" and not root.exists():
        raise InputError(f"data.root: there is no file or folder {root}", public="its data-root does not exist")
    return source, root


def open_dataset(
    data: DataConfig,
    seed: int,
    on_file: OnFile | None = None,
    to_train: bool = True,
    test_seed: int | None = None,
    task: WantedTask = None,
) -> Domains:
    """Open the configured dataset; with `to_train`, check that it can be trained on and set validation images aside.

    Test images are drawn with `test_seed`, or with `seed` if it is not given; everything else is drawn with `seed`.
    """
    drawn = seed if test_seed is None else test_seed
    source, root = find_dataset(data)
    check_settings(data, source)
    if source.is_table:
        domains = build_domains(data.name, read_tables(root, data), data, drawn, wanted=task)
        domains = _select_array_classes(domains, selected_classes(data))
        if to_train and root.is_file() and len(domains) == 1:
            raise InputError(f"{root} has one site in its column {data.site!r}, {domains.names[0]!r}: it needs two")
    elif source.has_image_files:
        name = Path(data.name.partition(".py:")[0]).stem if ".py" in data.name else data.name
        index = source.list_images(root, data)
        if source.published is not None:
            source.published.check(index.pictures.items, data.name, root)
        if index.masks is None and index.targets is None:
            images = select_classes(index.pictures, data.classes, root)
            notes = (*index.notes, *notes_on_spelling(count_labels(images.items)))
            index = index._replace(pictures=images, notes=notes)
        domains = _open_images(name, root, index, data, drawn, on_file, task=task)
    else:
        domains = _select_array_classes(assign_task(source.load_arrays(root), task), selected_classes(data))
        if not domains.has_images:
            check_settings(data, source, "arrays of floats")
        elif data.image_size is not None:
            domains = _resize(domains, data.image_size)
        if domains.has_images and data.channels not in (None, domains.image_shape[-1]):
            own = domains.image_shape[-1]
            raise InputError(
                f"data.channels is {data.channels}, but the arrays of {data.name} have {own}: leave it out"
            )
    if not to_train:
        return domains
    check_classes(domains, f"in any domain of {data.name}")
    if not (source.has_image_files or source.is_table):  # copies among image files are left out before they are split
        domains = drop_copies(hash_arrays(domains), "test")
    domains = _set_aside(domains, data, seed)
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
    task: WantedTask = None,
) -> Domains:
    """Open a site's own images or table, split like a domain of all sites' data; only the agreed classes are used."""
    if data.name == "csv":
        check_settings(data, Csv())
        table = read_site_table(root, domain, data)
        return _set_aside(build_domains("csv", [table], data, seed, classes, task), data, seed)
    index = list_site_images(root, domain, data)
    if index.masks is None and index.targets is None:
        index = index._replace(pictures=select_classes(index.pictures, classes or None, root, missing=True))
    return _set_aside(_open_images("folders", root, index, data, seed, on_file, classes, task), data, seed)


IMAGE_SETTINGS = ("image_size", "channels", "lists", "table")
TABLE_SETTINGS = ("target", "group", "split", "ignore", "categorical", "missing", "scale")


def check_settings(data: DataConfig, source: DatasetSource, kind: str = "tables") -> None:
    """Refuse settings of images for other data, and settings of tables for images."""
    has_images = not source.is_table and kind == "tables"
    refused: tuple[str, ...] = TABLE_SETTINGS if has_images else IMAGE_SETTINGS
    takes_targets = isinstance(source, Table)
    if not source.has_image_files or takes_targets:  # targets of arrays and of images are scaled too
        refused = tuple(name for name in refused if name != "scale" and not (takes_targets and name == "target"))
    for name in refused:
        if getattr(data, name) != getattr(DataConfig, name):
            owner = "tables (csv)" if has_images else "images"
            if name == "target":
                owner = "tables (csv) and images with a labels.csv (table)"
            raise InputError(
                f"data.{name} is for {owner}, and {data.name} holds {'images' if has_images else kind}: leave it out"
            )


def list_site_classes(root: Path, domain: str, data: DataConfig) -> tuple[str, ...]:
    """List the classes of a site's own images or table; none if it has other targets."""
    if data.name == "csv":
        labels = list_labels(read_site_table(root, domain, data), data)
    else:
        index, _, _ = read_image_targets(list_site_images(root, domain, data), data, "classification")
        labels = [item.label for item in index.pictures.items]
    return tuple(sorted(set(labels) - {""}))


def list_site_images(root: Path, domain: str, data: DataConfig) -> ImageIndex:
    """List a site's own images: with masks, those of its labels.csv if it has one, else DIR/<class>/<image>."""
    if data.name == "masks":
        return list_masks(root, domain)
    if (root / LABELS).is_file():
        return list_site_table(root, domain, data)
    if data.target is not None:
        raise InputError(
            f"data.target={data.target} names columns of {root / LABELS}, which does not exist: add it",
            public=f"it has no {LABELS} with the target columns",
        )
    return list_site_folder(root, domain)


def _open_images(
    name: str,
    root: Path,
    index: ImageIndex,
    data: DataConfig,
    seed: int,
    on_file: OnFile | None,
    classes: Sequence[str] = (),
    task: WantedTask = None,
) -> Domains:
    """Decode images, read their masks or the columns of their targets, and split them."""
    targets: NDArray[Any] | None = None
    own_task: Task = CLASSIFICATION
    if index.targets is not None:
        index, own_task, targets = read_image_targets(index, data, task)
        if targets is None:
            wanted = classes or selected_classes(data) or None
            index = index._replace(pictures=select_classes(index.pictures, wanted, root, missing=bool(classes)))
        elif selected_classes(data):
            raise InputError(f"data.classes selects classes, and {own_task.name} has none: leave it out")
    decoding, items = Decoding.from_config(data), index.pictures.items
    prepared = prepare_images(name, str(root), index.pictures, decoding, on_file)
    if index.masks is None:
        if targets is not None:
            content = f"{prepared.content} {own_task.name} {data.target}".encode() + targets.tobytes()
            prepared = replace(prepared, content=hashlib.blake2b(content, digest_size=16).hexdigest())
            classes = ()
        domains = split_items(name, items, prepared, data.test_fraction, seed, classes, own_task, targets)
    else:
        masks = prepare_images(name, str(root), index.masks, decoding._replace(channels=MASK), on_file)
        names = classes or selected_classes(data)
        targets, names = read_masks(prepared, masks, index.masks, str(root), names)
        both = hashlib.blake2b(f"{prepared.content} {masks.content}".encode(), digest_size=16).hexdigest()
        prepared = replace(prepared, content=both)
        domains = split_items(name, items, prepared, data.test_fraction, seed, (), Segmentation(names), targets)
    domains = assign_task(domains, task)
    return replace(domains, notes=(*index.notes, *notes_on_unused(index.unused), *domains.notes))


def _set_aside(domains: Domains, data: DataConfig, seed: int) -> Domains:
    """Set validation images aside, and limit the training images of each domain to a stratified sample."""
    if data.val_fraction:
        ready = [domain.name for domain in domains if domain.validation is not None]
        split = tuple(d if d.name in ready else split_validation(d, data.val_fraction, seed) for d in domains)
        unused = f"data.val_fraction={data.val_fraction} is not used for domains that have validation images"
        notes = (*domains.notes, f"{unused}: {', '.join(ready)}") if ready else domains.notes
        domains = drop_copies(replace(domains, domains=split, notes=notes), "validation")
    if data.train_per_domain is None:
        return domains
    limited = []
    for domain in domains:
        rng = numpy_rng(seed, "train_per_domain", domain.name)
        sample = stratified_sample(domain.train.labels, data.train_per_domain, rng)
        limited.append(replace(domain, train=domain.train.take(sample)))
    return replace(domains, domains=tuple(limited))


def count_labels(items: Sequence[ImageRecord]) -> dict[str, Counter[str]]:
    """Count images by domain and class."""
    counts: dict[str, Counter[str]] = {}
    for item in items:
        counts.setdefault(item.domain, Counter())[item.label] += 1
    return counts


def select_classes(images: ImageList, classes: Sequence[str] | None, root: Path, missing: bool = False) -> ImageList:
    """Select the images of these classes, of which some may be `missing`."""
    if classes is None or classes == ALL_CLASSES:
        return images
    if not missing:
        _check_labels(classes, {item.label for item in images.items}, str(root))
    return images.only([row for row, item in enumerate(images.items) if item.label in classes])


def _check_labels(classes: Sequence[str], labels: set[str], where: str) -> None:
    for label in classes:
        if label not in labels:
            raise InputError(f"data.classes: there is no class {label!r} in {where}; {suggest_name(label, labels)}")


def _select_array_classes(domains: Domains, classes: Sequence[str]) -> Domains:
    if not classes:
        return domains
    if not domains.task.has_classes:
        raise InputError(f"data.classes selects classes, and {domains.task.name} has none: leave it out")
    _check_labels(classes, set(domains.classes), domains.name)
    numbers = sorted(domains.classes.index(label) for label in set(classes))

    def select(split: Split) -> Split:
        selected = split.take(np.flatnonzero(np.isin(split.labels, numbers)))
        return replace(selected, labels=np.searchsorted(numbers, selected.labels))

    return replace(domains.map_splits(select), classes=tuple(domains.classes[n] for n in numbers))


def _resize(domains: Domains, size: int) -> Domains:
    height, width, channels = domains.image_shape
    if height == width == size:
        return domains
    count = sum(len(split) for domain in domains for split in (domain.train, domain.test))
    check_memory(count * size * size * channels, f"data.image_size={size} for {count:,} images")

    def resize_image(image: Images) -> Images:
        planes = (
            Image.fromarray(image[..., c]).resize((size, size), Image.Resampling.BILINEAR) for c in range(channels)
        )
        return np.stack([np.asarray(plane) for plane in planes], axis=-1)

    def resize_mask(mask: Images) -> Images:
        return np.asarray(Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST))

    def resize_split(split: Split) -> Split:
        everything = np.arange(len(split))
        images = np.stack([resize_image(image) for image in split.pixels(everything)])
        targets = None if split.targets is None else split.select_targets(everything)
        if targets is not None and targets.ndim == 3:
            targets = np.stack([resize_mask(mask) for mask in targets])
        return Split(images, split.labels, split.ids, targets=targets)

    return domains.map_splits(resize_split)


def check_classes(domains: Domains, where: str) -> None:
    """Check that domains have samples, and classes two with training images of each, and no domain with one only.

    A site with a table may have one class only: a small hospital, or one that sees none but ill patients.
    """
    classes = domains.classes
    if domains.task.has_classes:
        if len(classes) < 2:
            raise InputError(f"{domains.name} has only one class, {classes[0]!r}: a classifier needs two")
        counts = np.bincount(np.concatenate([d.train.labels for d in domains]), minlength=len(classes))
        if not counts.all():
            raise InputError(f"class {classes[int(np.argmin(counts))]!r} has no training {domains.noun} {where}")
    for domain in domains:
        if not len(domain.train) or not len(domain.test):
            raise InputError(f"domain {domain.name!r} has no {domains.noun} left to train or to test on")
        if domains.task.has_classes and not domains.columns and len(np.unique(domain.train.labels)) == 1:
            only = classes[domain.train.labels[0]]
            raise InputError(f"domain {domain.name!r} holds only the class {only!r}: add others, or leave it out")
