"""The datasets by name, and how each is opened."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcir.config import DataConfig, nearest
from fedcir.data.arrays import arrays
from fedcir.data.domains import Domains
from fedcir.types import InputError


@dataclass(frozen=True)
class Source:
    about: str
    open: Callable[[Path], Domains]
    needs_root: bool


SOURCES = {
    "minidigits": Source(
        "Digits in four styles, made from what installed packages carry: no download.",
        lambda root: _minidigits(),
        needs_root=False,
    ),
    "arrays": Source("Your own DIR/<domain>.npz files with x_train, y_train, x_test, y_test.", arrays, needs_root=True),
}


def open_dataset(data: DataConfig, seed: int) -> Domains:
    """The configured dataset, checked to be one that can be trained on."""
    if data.name not in SOURCES:
        raise InputError(f"no dataset {data.name!r}; {nearest(data.name, SOURCES)}")
    source = SOURCES[data.name]
    if source.needs_root and data.root is None:
        raise InputError(f"dataset {data.name!r} needs --data-root, the folder that holds it")
    root = Path(data.root or ".")
    if source.needs_root and not root.is_dir():
        raise InputError(
            f"data.root: {root} is a file, not a folder" if root.exists() else f"data.root: no folder {root}"
        )
    domains = source.open(root)
    _check_classes(domains, f"in any domain of {data.name}")
    if data.train_per_domain is not None:
        domains = domains.capped(data.train_per_domain, seed)
        _check_classes(domains, f"left; raise data.train_per_domain={data.train_per_domain}")
    return domains


def _minidigits() -> Domains:
    from fedcir.data.minidigits import minidigits  # brings scikit-learn, which takes a second to import

    return minidigits()


def _check_classes(domains: Domains, where: str) -> None:
    if len(domains.classes) < 2:
        raise InputError(f"{domains.name} has one class only, {domains.classes[0]!r}: a classifier needs two")
    counts = np.bincount(np.concatenate([d.train.labels for d in domains]), minlength=len(domains.classes))
    for name, count in zip(domains.classes, counts, strict=True):
        if count == 0:
            raise InputError(f"class {name!r} has no training image {where}")
    for domain in domains:
        if len(np.unique(domain.train.labels)) == 1:
            only = domains.classes[domain.train.labels[0]]
            raise InputError(
                f"domain {domain.name!r} holds the class {only!r} only: add images of another, or leave it out"
            )
