"""Decoded images to a dataset: without duplicates, and divided into train and test before anything else."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedcir.data.domains import Domain, Domains, Indices, Labels, Split, rows_by_group, stratified_sample
from fedcir.data.hashes import hashes_of_files
from fedcir.data.pictures.cache import Prepared
from fedcir.data.pictures.items import Item
from fedcir.rng import numpy_rng
from fedcir.types import InputError


@dataclass(frozen=True)
class Splitting:
    """How images are divided where no list tells."""

    test_fraction: float
    seed: int


def split_items(
    name: str, items: Sequence[Item], prepared: Prepared, splitting: Splitting, classes: Sequence[str] = ()
) -> Domains:
    """The dataset of these images, every domain divided into train and test.

    Its classes are those of the images, unless more are agreed upon.
    """
    kept = without_duplicates(items, prepared.digests)
    classes = tuple(classes) or tuple(sorted({item.label for item in items}))
    number = {label: i for i, label in enumerate(classes)}
    rows_of: dict[str, list[int]] = {item.domain: [] for item in items}
    for row in kept.tolist():
        rows_of[items[row].domain].append(row)
    hashes = hashes_of_files(prepared.digests)
    domains = []
    for domain, held in rows_of.items():
        some = [items[row] for row in held]
        labels = np.array([number[item.label] for item in some], dtype=np.int64)
        groups = _groups(some)
        names, rows = [item.name for item in some], np.array(held, dtype=np.int64)
        whole = Split(prepared.images, labels, names, rows, groups, hashes)
        test = _test_rows(some, whole, splitting, domain)
        aside = np.flatnonzero([item.part == "validation" for item in some])
        train = np.setdiff1d(np.arange(len(some)), [*test, *aside])
        if not len(test) or not len(train):
            if any(item.part is not None for item in some):
                kind = "training" if len(test) else "test"
                raise InputError(
                    f"the split has no {kind} image of domain {domain!r}: add some, or leave the domain out"
                )
            count = f"{len(some)} different images"
            if groups is not None:
                together = len(set(groups.tolist()))
                count += f" in {together} group{'s' * (together > 1)}"
            raise InputError(
                f"domain {domain!r} has {count}, too few to train and to test on: add some, or leave the domain out",
                public=f"it has {count}, too few to train and to test on",
            )
        domains.append(Domain(domain, whole.take(train), whole.take(test), whole.take(aside) if len(aside) else None))
    return Domains(name, classes, tuple(domains), prepared.content, _notes(items, prepared.digests, len(kept)))


def copies(contents: Sequence[object]) -> list[list[int]]:
    """Rows of equal content, in groups."""
    rows: dict[object, list[int]] = {}
    for row, content in enumerate(contents):
        rows.setdefault(content, []).append(row)
    return [group for group in rows.values() if len(group) > 1]


def disputed(items: Sequence[Item], groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """For each group of copies with several labels: its first row, and the next row with another label."""
    pairs = []
    for first, *others in groups:
        other = next((row for row in others if items[row].label != items[first].label), None)
        if other is not None:
            pairs.append((first, other))
    return pairs


def _notes(items: Sequence[Item], digests: NDArray[np.void], different: int) -> tuple[str, ...]:
    """What is to be said of copies."""
    if different == len(items):
        return ()
    notes = [f"{len(items) - different} of {len(items)} files are copies of others and are left out"]
    found = disputed(items, copies(digests.tolist()))
    if found:
        one, other = (items[row].name for row in found[0])
        what = "one image is" if len(found) == 1 else f"{len(found)} images are"
        first = "" if len(found) == 1 else "the first "
        notes.append(
            f"{what} in folders of different classes, {first}as {one} and as {other}; "
            "one copy of each is used: remove the wrong ones"
        )
    return tuple(notes)


def without_duplicates(items: Sequence[Item], digests: NDArray[np.void]) -> Indices:
    """Rows of which no two are the same file, ascending. Of equal ones a test image stays, else the first.

    An image of a validation set goes before one to train on.
    """
    _, kinds = np.unique(digests, return_inverse=True)
    train_last = np.array([{"test": 0, "validation": 1}.get(item.part or "train", 2) for item in items])
    order = np.lexsort((np.arange(len(items)), train_last, kinds))
    first = np.flatnonzero(np.diff(kinds[order], prepend=-1))
    return np.sort(order[first])


def with_validation(domain: Domain, fraction: float, seed: int) -> Domain:
    """A share of every class of the training images set aside, groups whole."""
    rng = numpy_rng(seed, "validation", domain.name)
    held = _whole_groups(domain.train, fraction, rng)
    if not len(held):
        what = "an image" if domain.train.groups is None else "a group"
        raise InputError(
            f"data.val_fraction={fraction}: no class of domain {domain.name!r} has {what} to spare for validation; "
            "leave it out, or add images"
        )
    kept = np.setdiff1d(np.arange(len(domain.train)), held)
    return replace(domain, train=domain.train.take(kept), validation=domain.train.take(held))


def _groups(items: Sequence[Item]) -> Indices | None:
    """The number of each item's group, in order of appearance; one without a group is a group of its own."""
    if all(item.group is None for item in items):
        return None
    numbers: dict[str | int, int] = {}
    keys = (row if item.group is None else item.group for row, item in enumerate(items))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _test_rows(items: Sequence[Item], whole: Split, splitting: Splitting, domain: str) -> Indices:
    """The test samples: those of a list or folder where there is one, else a seeded share of every class."""
    if any(item.part is not None for item in items):
        return np.flatnonzero([item.part == "test" for item in items])
    return _whole_groups(whole, splitting.test_fraction, numpy_rng(splitting.seed, "test", domain))


def _whole_groups(split: Split, fraction: float, rng: np.random.Generator) -> Indices:
    """A share of every class, of no class all, and of every group all or nothing."""
    labels = split.labels
    if split.groups is None:
        return _leaving_one(labels, fraction, rng)
    together = rows_by_group(split.groups)
    drawn = _leaving_one(labels[[rows[0] for rows in together]], fraction, rng).tolist()
    left = Counter(labels.tolist())
    for group in drawn:
        left.subtract(labels[together[group]].tolist())
    for group in list(drawn):  # of groups of several classes some may have taken the last of one
        if any(left[label] <= 0 for label in labels[together[group]].tolist()):
            drawn.remove(group)
            left.update(labels[together[group]].tolist())
    return np.sort(np.array([row for group in drawn for row in together[group]], dtype=np.int64))


def _leaving_one(labels: Labels, fraction: float, rng: np.random.Generator) -> Indices:
    """A stratified sample that takes at least one, and of no class all."""
    drawn = stratified_sample(labels, max(1, round(len(labels) * fraction)), rng)
    rest = set(labels[np.setdiff1d(np.arange(len(labels)), drawn)].tolist())
    spared: set[int] = set()
    taken = []
    for row in drawn.tolist():
        label = int(labels[row])
        if label in rest or label in spared:
            taken.append(row)
        spared.add(label)
    return np.array(taken, dtype=np.int64)
