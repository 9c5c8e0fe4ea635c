"""Train, validation and test splits without copies, and content hashes of images.

Hashes find training images among others under any name. Image files are hashed as files, as `fedcir data check` does;
arrays are hashed as decoded pixels.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcir.data.cache import PreparedImages
from fedcir.data.domains import (
    CLASSIFICATION,
    ContentHashes,
    Domain,
    Domains,
    Hashes,
    HashKind,
    Indices,
    Labels,
    Split,
    rows_by_group,
    stratified_sample,
)
from fedcir.data.partition import ClientPartition, Partition
from fedcir.data.sources.source import ImageRecord
from fedcir.errors import InputError
from fedcir.rng import numpy_rng
from fedcir.tasks.task import Task

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ImageHashes:
    """Hashes of the training and validation images of a run, each sorted and without repetition."""

    kind: HashKind
    train: Hashes
    validation: Hashes

    def find(self, split: Split) -> tuple[Mask, Mask] | None:
        """Find the samples of a split that the run trained on, and others that it validated on; None without hashes."""
        hashes = hash_samples(split, self.kind)
        if hashes is None:
            return None
        trained = np.isin(hashes, self.train)
        return trained, np.isin(hashes, self.validation) & ~trained


def hash_samples(split: Split, kind: HashKind) -> Hashes | None:
    """Hash each sample, (N,); None if file hashes are requested and the samples are not files."""
    if split.hashes is not None and split.hashes.kind == kind:
        return split.hashes.values[split.where]
    return _hash_pixels(split) if kind == "pixels" else None


def _hash_pixels(split: Split) -> Hashes:
    digests = [hashlib.blake2b(image.data, digest_size=8).digest() for chunk in split.chunks() for image in chunk]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def hash_arrays(domains: Domains) -> Domains:
    """Add pixel hashes of all training and test images to a dataset."""

    def add_hashes(split: Split) -> Split:
        values = np.zeros(len(split.images), dtype=np.uint64)
        values[split.where] = _hash_pixels(split)
        return replace(split, hashes=ContentHashes("pixels", values))

    return domains.map_splits(add_hashes)


def hash_images_in_use(domains: Domains, clients: Sequence[ClientPartition]) -> ImageHashes:
    """Hash the training images of all clients, and all validation images."""
    by_domain = Partition.from_clients(clients, domains.names).by_domain
    train = [domains[name].train.take(part.rows.astype(np.int64)) for name, part in by_domain.items()]
    validation = [domain.validation for domain in domains if domain.validation is not None]
    kind = _get_hash_kind(domains)
    return ImageHashes(kind, _merge_hashes(train, kind), _merge_hashes(validation, kind))


def _get_hash_kind(domains: Domains) -> HashKind:
    hashes = domains.domains[0].train.hashes
    return "pixels" if hashes is None else hashes.kind


def _merge_hashes(splits: Sequence[Split], kind: HashKind) -> Hashes:
    parts = [hashes for split in splits if (hashes := hash_samples(split, kind)) is not None]
    return np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *parts]))


def drop_copies(domains: Domains, part: Literal["validation", "test"]) -> Domains:
    """Drop validation or test images that are also training images of any domain and class, and note their number."""
    kind = _get_hash_kind(domains)
    trained = _merge_hashes([domain.train for domain in domains], kind)
    cleaned = []
    count = 0
    for domain in domains:
        split: Split | None = getattr(domain, part)
        if split is not None and (hashes := hash_samples(split, kind)) is not None:
            copies = np.isin(hashes, trained)
            if len(split) and copies.all():
                raise InputError(
                    f"every {part} {split.noun} of domain {domain.name!r} is also a training {split.noun}: add others",
                    public=f"every {part} image is also a training image",
                )
            count += int(copies.sum())
            split = split.take(np.flatnonzero(~copies))
        cleaned.append(replace(domain, **{part: split}))  # type: ignore[arg-type]
    if not count:
        return domains
    subject = "image is also a training image and is" if count == 1 else "images are also training images and are"
    note = f"{count:,} {part} {subject} left out of the {part} set"
    return replace(domains, domains=tuple(cleaned), notes=(*domains.notes, note))


def split_items(
    name: str,
    items: Sequence[ImageRecord],
    prepared: PreparedImages,
    test_fraction: float,
    seed: int,
    classes: Sequence[str] = (),
    task: Task = CLASSIFICATION,
    targets: NDArray[Any] | None = None,
) -> Domains:
    """Build a dataset of these images, with every domain split into train and test.

    Test images are those that the publisher or a folder marked, else a seeded fraction of every class. The classes are
    those of the images, unless `classes` are given. A task without classes takes `targets` of all images (M, ...).
    """
    distinct = drop_duplicates(items, prepared.digests)
    classes = () if targets is not None else tuple(classes) or tuple(sorted({item.label for item in items}))
    number = {label: i for i, label in enumerate(classes)}
    rows_of: dict[str, list[int]] = {item.domain: [] for item in items}
    for row in distinct.tolist():
        rows_of[items[row].domain].append(row)
    # File digests have 16 bytes, of which hashes are the first 8.
    hashes = ContentHashes("file", np.frombuffer(prepared.digests.tobytes(), dtype="<u8")[::2].astype(np.uint64))
    names = [item.name for item in items]
    domains = []
    for domain, rows in rows_of.items():
        records = [items[row] for row in rows]
        if targets is None:
            labels = np.array([number[item.label] for item in records], dtype=np.int64)
        else:
            labels = task.strata(targets[rows])
        groups = _number_groups(records)
        whole = Split(prepared.images, labels, names, np.array(rows, dtype=np.int64), groups, hashes, targets)
        marked = any(item.part is not None for item in records)
        if marked:
            test = np.flatnonzero([item.part == "test" for item in records])
        else:
            test = _draw_groups(whole, test_fraction, numpy_rng(seed, "test", domain))
        validation = np.flatnonzero([item.part == "validation" for item in records])
        train = np.setdiff1d(np.arange(len(records)), [*test, *validation])
        if marked and not (len(test) and len(train)):
            kind = "training" if len(test) else "test"
            raise InputError(
                f"the split has no {kind} {whole.noun} of domain {domain!r}: add some, or leave the domain out"
            )
        if not len(test) or not len(train):
            count = f"{len(records)} {'different ' * (whole.noun == 'image')}{whole.noun}{'s' * (len(records) != 1)}"
            if groups is not None:
                together = len(set(groups.tolist()))
                count += f" in {together} group{'s' * (together > 1)}"
            raise InputError(
                f"domain {domain!r} has {count}, too few to train and to test on: add some, or leave the domain out",
                public=f"it has {count}, too few to train and to test on",
            )
        validation_split = whole.take(validation) if len(validation) else None
        domains.append(Domain(domain, whole.take(train), whole.take(test), validation_split))
    notes = _describe_copies(items, prepared.digests, len(distinct))
    return Domains(name, classes, tuple(domains), prepared.content, notes, task=task)


def find_copies(contents: Sequence[object]) -> list[list[int]]:
    """Group rows of equal content; rows without a copy are left out."""
    rows: dict[object, list[int]] = {}
    for row, content in enumerate(contents):
        rows.setdefault(content, []).append(row)
    return [group for group in rows.values() if len(group) > 1]


def find_label_conflicts(items: Sequence[ImageRecord], groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Find groups of copies with several labels: the first row of each, and the next row with another label."""
    conflicts = ([row for row in group if items[row].label != items[group[0]].label] for group in groups)
    return [(group[0], rows[0]) for group, rows in zip(groups, conflicts, strict=True) if rows]


def _describe_copies(items: Sequence[ImageRecord], digests: NDArray[np.void], different: int) -> tuple[str, ...]:
    """Notes for the user on copies."""
    if different == len(items):
        return ()
    notes = [f"{len(items) - different} of {len(items)} files are copies of others and are left out"]
    if conflicts := find_label_conflicts(items, find_copies(digests.tolist())):
        name, other_name = (items[row].name for row in conflicts[0])
        several = len(conflicts) > 1
        notes.append(
            f"{f'{len(conflicts)} images are' if several else 'one image is'} in folders of different classes, "
            f"{'the first ' * several}as {name} and as {other_name}; one copy of each is used: remove the wrong ones"
        )
    return tuple(notes)


def drop_duplicates(items: Sequence[ImageRecord], digests: NDArray[np.void]) -> Indices:
    """Return rows without copies, in ascending order. Of copies a test image is kept, else a validation image."""
    _, kinds = np.unique(digests, return_inverse=True)
    train_last = np.array([{"test": 0, "validation": 1}.get(item.part or "train", 2) for item in items])
    order = np.lexsort((np.arange(len(items)), train_last, kinds))
    first = np.flatnonzero(np.diff(kinds[order], prepend=-1))
    return np.sort(order[first])


def split_validation(domain: Domain, fraction: float, seed: int) -> Domain:
    """Set a fraction of every class of the training images aside for validation, without dividing groups."""
    validation = _draw_groups(domain.train, fraction, numpy_rng(seed, "validation", domain.name))
    if not len(validation):
        unit = {"image": "an image", "row": "a row"}.get(domain.train.noun, "an example")
        unit = unit if domain.train.groups is None else "a group"
        where = f"data.val_fraction={fraction}: no class of domain {domain.name!r}"
        raise InputError(f"{where} has {unit} to spare for validation; leave it out, or add {domain.train.noun}s")
    train = np.setdiff1d(np.arange(len(domain.train)), validation)
    return replace(domain, train=domain.train.take(train), validation=domain.train.take(validation))


def _number_groups(items: Sequence[ImageRecord]) -> Indices | None:
    """Number the groups in order of appearance; an image without a group is a group of its own."""
    if all(item.group is None for item in items):
        return None
    numbers: dict[str | int, int] = {}
    keys = (row if item.group is None else item.group for row, item in enumerate(items))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _draw_groups(split: Split, fraction: float, rng: np.random.Generator) -> Indices:
    """Draw a fraction of every class, never all images of a class, and only whole groups."""
    labels = split.labels
    if split.groups is None:
        return _draw_leaving_one(labels, fraction, rng)
    together = rows_by_group(split.groups)
    drawn = _draw_leaving_one(labels[[rows[0] for rows in together]], fraction, rng).tolist()
    remaining = Counter(labels.tolist())
    for group in drawn:
        remaining.subtract(labels[together[group]].tolist())
    for group in list(drawn):  # groups of several classes may have taken the last image of one
        if any(remaining[label] <= 0 for label in labels[together[group]].tolist()):
            drawn.remove(group)
            remaining.update(labels[together[group]].tolist())
    return np.sort(np.array([row for group in drawn for row in together[group]], dtype=np.int64))


def _draw_leaving_one(labels: Labels, fraction: float, rng: np.random.Generator) -> Indices:
    """Draw a stratified sample of at least one image that leaves one of each class."""
    drawn = stratified_sample(labels, max(1, round(len(labels) * fraction)), rng)
    remaining = set(np.delete(labels, drawn).tolist())
    chosen = []
    for row in drawn.tolist():
        label = int(labels[row])
        if label in remaining:
            chosen.append(row)
        remaining.add(label)  # the first image of a class that would lose all is spared
    return np.array(chosen, dtype=np.int64)
