"""Inspection of a dataset: its content, and whether it can be trained on."""

import hashlib
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from fedcir.config import DataConfig
from fedcir.data.cache import PreparedImages
from fedcir.data.decoding import DecodedFile, Decoding, OnFile, decode_files
from fedcir.data.domains import Domains
from fedcir.data.opening import check_classes, count_labels, find_dataset, open_dataset, select_classes
from fedcir.data.sources.source import ALL_CLASSES, ImageRecord, UnusedFiles, notes_on_spelling
from fedcir.data.splits import drop_copies, find_copies, find_label_conflicts, hash_arrays, split_items
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

    @property
    def classes(self) -> list[str]:
        return sorted({label for counts in self.counts.values() for label in counts})

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


def inspect_dataset(data: DataConfig, on_file: OnFile | None = None) -> Inspection:
    """Decode every image of a dataset, and collect what is in it."""
    source, root = find_dataset(data)
    obstacle = ""
    notes: tuple[str, ...] = ()
    unused: tuple[UnusedFiles, ...] = ()
    if source.has_image_files:
        pictures, notes, unused, _ = source.list_images(root, data)
        try:
            if source.published is not None:
                source.published.check(pictures.items, data.name, root)
        except InputError as error:
            obstacle = str(error)
        pictures = select_classes(pictures, data.classes, root)
        items = list(pictures.items)
        with tempfile.TemporaryDirectory() as staging:
            files = decode_files(pictures.paths(Path(staging)), Decoding.from_config(data), on_file=on_file)
        obstacle = obstacle or _find_obstacle(data, items, files)
    else:
        domains = open_dataset(data, seed=0, to_train=False)
        check_classes(domains, f"in any domain of {data.name}")
        items, files = _list_arrays(domains)
    read = [row for row, file in enumerate(files) if not file.error]
    groups = [[read[row] for row in group] for group in find_copies([files[row].digest for row in read])]
    if source.has_image_files:
        left_out = sum(len(group) - 1 for group in groups)
    else:
        distinct = drop_copies(hash_arrays(domains), "test")
        left_out = sum(len(domain.test) - len(distinct[domain.name].test) for domain in domains)
    counts = count_labels(items)
    every = (data.classes or source.classes) == ALL_CLASSES
    return Inspection(
        counts=counts,
        published=dict(source.published.counts) if every and source.published is not None else {},
        unreadable=[f"{root / item.name}: {file.error}" for item, file in zip(items, files, strict=True) if file.error],
        duplicates=[[items[row].name for row in group] for group in groups],
        disputed=[[items[row].name for row in pair] for pair in find_label_conflicts(items, groups)],
        spelling=notes_on_spelling(counts, most=len(items)),
        unused=unused,
        sizes=Counter((file.width, file.height) for file in files if not file.error),
        notes=notes,
        copies_left_out=left_out,
        obstacle=obstacle,
    )


def _find_obstacle(data: DataConfig, items: list[ImageRecord], files: list[DecodedFile]) -> str:
    """Return the error that a run would end with; empty if there is none."""
    if bad := sum(bool(file.error) for file in files):
        return f"{bad} file{'s are' if bad > 1 else ' is'} not readable: fix or remove {'them' if bad > 1 else 'it'}"
    digests = np.frombuffer(bytes.fromhex("".join(file.digest for file in files)), dtype="V16")
    prepared = PreparedImages(np.empty((0, 1, 1, 3), np.uint8), digests, "")
    try:
        domains = split_items(data.name, items, prepared, data.test_fraction, seed=0)
        check_classes(domains, f"in any domain of {data.name}")
    except InputError as error:
        return str(error)
    return ""


def _list_arrays(domains: Domains) -> tuple[list[ImageRecord], list[DecodedFile]]:
    """List the images of arrays as if they were files."""
    height, width, _ = domains.image_shape
    items, files = [], []
    for domain in domains:
        for split in (domain.train, domain.test):
            images = chain.from_iterable(split.chunks())
            for image, label, name in zip(images, split.labels, split.ids, strict=True):
                items.append(ImageRecord(name, domain.name, domains.classes[label]))
                digest = hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()
                files.append(DecodedFile(digest, width, height, ""))
    return items, files
