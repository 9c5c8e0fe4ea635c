"""Inspection of a dataset: its content, and whether it can be trained on."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from fedcir.config import Config, DataConfig
from fedcir.data.agreement import agree, summarise_data
from fedcir.data.cache import PreparedImages
from fedcir.data.columns import ColumnComparison, compare_columns, note_codes
from fedcir.data.decoding import DecodedFile, Decoding, OnFile, decode_files
from fedcir.data.domains import Domains, Split
from fedcir.data.encoding import encode_domains
from fedcir.data.opening import check_classes, check_settings, count_labels, find_dataset, open_dataset, select_classes
from fedcir.data.sources.source import (
    ALL_CLASSES,
    ImageFiles,
    ImageIndex,
    ImageRecord,
    Part,
    UnusedFiles,
    notes_on_spelling,
)
from fedcir.data.sources.target_columns import read_image_targets
from fedcir.data.splits import drop_copies, find_copies, find_label_conflicts, hash_arrays, split_items
from fedcir.data.targets import WantedTask
from fedcir.errors import InputError


@dataclass(frozen=True)
class Inspection:
    """Properties of all images of a dataset."""

    counts: dict[str, Counter[str]]  # images by domain and class
    published: dict[str, int]  # images by domain according to the publication, where there is one
    unreadable: list[str]
    duplicates: list[list[str]]  # images of equal content, in groups
    disputed: list[list[str]]  # two images of each such group whose classes differ
    spelling: tuple[str, ...]  # classes that may be one, spelt differently at different sites
    unused: tuple[UnusedFiles, ...]  # other files in the folder
    sizes: Counter[tuple[int, int]]  # width and height
    notes: tuple[str, ...]
    obstacle: str  # why it cannot be trained on; empty if it can
    copies_left_out: int
    """Number of duplicates that a run leaves out; of arrays, test images that are also training images."""
    noun: str = "image"
    """What a sample is called."""
    task: str = "classification"
    shape: tuple[int, ...] = ()
    """Shape of a sample that is no image: the number of columns of a table, or the shape of an array."""
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Distribution of the targets of each domain, for tasks without classes."""
    columns: tuple[ColumnComparison, ...] = ()
    """Columns of tables."""
    parts: frozenset[str] = frozenset()
    """Parts of the split that the data define: train, validation, test."""

    @property
    def classes(self) -> list[str]:
        return [] if self.targets else sorted({label for counts in self.counts.values() for label in counts})

    @property
    def missing(self) -> dict[str, list[str]]:
        """Classes that a domain lacks."""
        lacking = {domain: [c for c in self.classes if not counts[c]] for domain, counts in self.counts.items()}
        return {domain: classes for domain, classes in lacking.items() if classes}

    @property
    def off(self) -> dict[str, tuple[int, int]]:
        """Domains whose number of images is not the published one: found and published."""
        totals = {domain: sum(self.counts.get(domain, Counter()).values()) for domain in self.published}
        return {domain: (totals[domain], n) for domain, n in self.published.items() if totals[domain] != n}


def inspect_dataset(data: DataConfig, on_file: OnFile | None = None, task: WantedTask = None) -> Inspection:
    """Read a whole dataset, decode every image of it, and collect what is in it."""
    source, root = find_dataset(data)
    check_settings(data, source)
    domains: Domains | None = None
    obstacle = ""
    index = ImageIndex(ImageFiles(root, ()))
    if source.has_image_files:
        index, _, targets = read_image_targets(source.list_images(root, data), data, task)
        try:
            if source.published is not None:
                source.published.check(index.pictures.items, data.name, root)
        except InputError as error:
            obstacle = str(error)
        has_classes = index.masks is None and targets is None
        pictures = select_classes(index.pictures, data.classes, root) if has_classes else index.pictures
        items = list(pictures.items)
        with tempfile.TemporaryDirectory() as staging:
            files = decode_files(pictures.paths(Path(staging)), Decoding.from_config(data), on_file=on_file)
        obstacle = obstacle or _find_unreadable(files)
        if not obstacle and has_classes:
            obstacle = _find_obstacle(data, items, files)
        elif not obstacle:
            try:
                domains = open_dataset(data, seed=0, to_train=False, task=task)
            except InputError as error:
                obstacle = str(error)
    else:
        domains = open_dataset(data, seed=0, to_train=False, task=task)
        check_classes(domains, f"in any domain of {data.name}")
        items, files = _list_examples(domains, has_parts=not source.is_table or data.split is not None)
        obstacle = _find_encoding_obstacle(data, domains)
        index = index._replace(notes=(*domains.notes, *note_codes(domains)))
    read = [row for row, file in enumerate(files) if not file.error]
    groups = [[read[row] for row in group] for group in find_copies([files[row].digest for row in read])]
    if source.has_image_files:
        left_out = sum(len(group) - 1 for group in groups)
    elif source.is_table or domains is None:  # equal rows are different persons
        groups, left_out = [], 0
    else:
        distinct = drop_copies(hash_arrays(domains), "test")
        left_out = sum(len(domain.test) - len(distinct[domain.name].test) for domain in domains)
    counts = count_labels(items)
    every = (data.classes or source.classes) == ALL_CLASSES
    has_targets = domains is not None and not domains.task.has_classes
    return Inspection(
        counts=counts,
        published=dict(source.published.counts) if every and source.published is not None else {},
        unreadable=[f"{root / item.name}: {file.error}" for item, file in zip(items, files, strict=True) if file.error],
        duplicates=[[items[row].name for row in group] for group in groups],
        disputed=[[items[row].name for row in pair] for pair in find_label_conflicts(items, groups)],
        spelling=notes_on_spelling(counts, most=len(items)),
        unused=index.unused,
        sizes=Counter((file.width, file.height) for file in files if not file.error and file.width),
        notes=index.notes,
        copies_left_out=left_out,
        obstacle=obstacle,
        noun=domains.noun if domains is not None else "image",
        task=domains.task.name if domains is not None else "classification",
        shape=() if domains is None or domains.has_images else domains.input_shape,
        targets=summarise_targets(domains) if domains is not None and has_targets else {},
        columns=compare_columns(domains) if domains is not None else (),
        parts=frozenset(item.part for item in items if item.part),
    )


def summarise_targets(domains: Domains) -> dict[str, dict[str, float]]:
    """Describe the distribution of the targets of each domain."""
    return {
        domain.name: domains.task.summarise(
            np.concatenate([split.select_targets(np.arange(len(split))) for split in domain.splits])
        )
        for domain in domains
    }


def _find_unreadable(files: list[DecodedFile]) -> str:
    if bad := sum(bool(file.error) for file in files):
        return f"{bad} file{'s are' if bad > 1 else ' is'} not readable: fix or remove {'them' if bad > 1 else 'it'}"
    return ""


def _find_encoding_obstacle(data: DataConfig, domains: Domains) -> str:
    """Return why the cells of tables cannot be encoded; empty if they can."""
    try:
        rows = {domain.name: np.arange(len(domain.train)) for domain in domains}
        agreed = agree({domains.name: summarise_data(Config(data=data), domains, rows)}, data.scale)
        if agreed.encoding is not None:
            encode_domains(domains, agreed.encoding)
    except InputError as error:
        return str(error)
    return ""


def _find_obstacle(data: DataConfig, items: list[ImageRecord], files: list[DecodedFile]) -> str:
    """Return the error that a run would end with; empty if there is none."""
    digests = np.frombuffer(bytes.fromhex("".join(file.digest for file in files)), dtype="V16")
    prepared = PreparedImages(np.empty((0, 1, 1, 3), np.uint8), digests, "")
    try:
        domains = split_items(data.name, items, prepared, data.test_fraction, seed=0)
        check_classes(domains, f"in any domain of {data.name}")
    except InputError as error:
        return str(error)
    return ""


def _list_examples(domains: Domains, has_parts: bool) -> tuple[list[ImageRecord], list[DecodedFile]]:
    """List the samples of arrays or tables as if they were files; only images have a size."""
    height, width = domains.image_shape[:2] if domains.has_images else (0, 0)
    items, files = [], []
    for domain in domains:
        splits: dict[Part, Split | None] = {"train": domain.train, "test": domain.test, "validation": domain.validation}
        for part, split in splits.items():
            images = () if split is None else chain.from_iterable(split.chunks())
            labels, names = ((), ()) if split is None else (split.labels, split.ids)
            for image, number, name in zip(images, labels, names, strict=True):
                label = domains.classes[number] if domains.task.has_classes else ""
                items.append(ImageRecord(name, domain.name, label, part if has_parts else None))
                digest = hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()
                files.append(DecodedFile(digest, width, height, ""))
    return items, files
