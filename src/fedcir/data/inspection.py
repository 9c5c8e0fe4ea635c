"""What is in a dataset, and whether it can be trained on."""

import hashlib
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcir.config import DataConfig
from fedcir.data.catalogue import ALL, IMAGE_SIZE, find
from fedcir.data.domains import Domains
from fedcir.data.hashes import drop_copies, hash_arrays
from fedcir.data.opening import check_classes, labels_of, of_classes, open_dataset
from fedcir.data.pictures.cache import Prepared
from fedcir.data.pictures.decode import Look, OnFile, decode_files
from fedcir.data.pictures.items import Item
from fedcir.data.pictures.square import Limits
from fedcir.data.readers.named import verify
from fedcir.data.readers.spelling import notes_on_spelling
from fedcir.data.readers.unused import Unused
from fedcir.data.split import Splitting, copies, disputed, split_items
from fedcir.types import InputError


@dataclass(frozen=True)
class Findings:
    """Everything that a look at all images tells."""

    counts: dict[str, Counter[str]]
    """Images by domain and class."""
    published: dict[str, int]
    """Images by domain according to the publication, where there is one."""
    unreadable: list[str]
    duplicates: list[list[str]]
    """Images of equal content, in groups."""
    disputed: list[list[str]]
    """Two of each such group whose classes differ."""
    spelling: tuple[str, ...]
    """Classes that may be one, spelt differently at different sites."""
    unused: tuple[Unused, ...]
    """Files that lie there too."""
    sizes: Counter[tuple[int, int]]
    """Width and height."""
    notes: tuple[str, ...]
    obstacle: str
    """Why it cannot be trained on; empty if it can."""
    copies_left_out: int
    """How many of the duplicates a run would not take; of arrays, the test images that are training images too."""

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
        found = {domain: sum(classes.values()) for domain, classes in self.counts.items()}
        return {d: (found.get(d, 0), n) for d, n in self.published.items() if found.get(d, 0) != n}


def inspect_dataset(data: DataConfig, on_file: OnFile | None = None) -> Findings:
    """Look at every image of a dataset."""
    source, root = find(data)
    obstacle = ""
    left_out = 0
    notes: tuple[str, ...] = ()
    unused: tuple[Unused, ...] = ()
    if source.pictures is None:
        whole = open_dataset(data, seed=0, to_train=False)
        check_classes(whole, f"in any domain of {data.name}")
        items, looks = _of_arrays(whole)
        left_out = _test_images(whole) - _test_images(drop_copies(hash_arrays(whole), "test"))
    else:
        pictures, notes, unused = source.pictures(root, data)
        try:
            if source.published is not None:
                verify(pictures.items, source.published, data.name, root)
        except InputError as error:
            obstacle = str(error)
        pictures = of_classes(pictures, data.classes, root)
        items = list(pictures.items)
        with tempfile.TemporaryDirectory() as staging:
            size, limits = data.image_size or IMAGE_SIZE, Limits(data.max_bytes, data.max_pixels)
            looks = decode_files(pictures.paths(Path(staging)), size, on_file=on_file, limits=limits)
    every = (data.classes or source.classes) == ALL and source.published is not None
    unreadable = [f"{root / item.name}: {look.error}" for item, look in zip(items, looks, strict=True) if look.error]
    read = [row for row, look in enumerate(looks) if not look.error]
    groups = [[read[row] for row in group] for group in copies([looks[row].digest for row in read])]
    counts = labels_of(items)
    return Findings(
        counts=counts,
        published=dict(source.published.counts) if every and source.published else {},
        unreadable=unreadable,
        duplicates=[[items[row].name for row in group] for group in groups],
        disputed=[[items[row].name for row in pair] for pair in disputed(items, groups)],
        spelling=notes_on_spelling(counts, most=len(items)),
        unused=unused,
        sizes=Counter((look.width, look.height) for look in looks if not look.error),
        notes=notes,
        copies_left_out=left_out if source.pictures is None else sum(len(group) - 1 for group in groups),
        obstacle=obstacle or ("" if source.pictures is None else _obstacle(data, items, looks)),
    )


def _obstacle(data: DataConfig, items: list[Item], looks: list[Look]) -> str:
    """What a run would say."""
    bad = sum(bool(look.error) for look in looks)
    if bad:
        return f"{bad} file{'s are' if bad > 1 else ' is'} not readable: fix or remove {'them' if bad > 1 else 'it'}"
    digests = np.frombuffer(bytes.fromhex("".join(look.digest for look in looks)), dtype="V16")
    prepared = Prepared(np.empty((0, 1, 1, 3), np.uint8), digests, "")
    try:
        domains = split_items(data.name, items, prepared, Splitting(data.test_fraction, seed=0))
        check_classes(domains, f"in any domain of {data.name}")
    except InputError as error:
        return str(error)
    return ""


def _test_images(domains: Domains) -> int:
    return sum(len(domain.test) for domain in domains)


def _of_arrays(domains: Domains) -> tuple[list[Item], list[Look]]:
    height, width, _ = domains.image_shape
    items, looks = [], []
    for domain in domains:
        for split in (domain.train, domain.test):
            for image, label, name in zip(split.pixels(np.arange(len(split))), split.labels, split.ids, strict=True):
                items.append(Item(name, domain.name, domains.classes[label]))
                looks.append(Look(hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest(), width, height, ""))
    return items, looks
