"""Data that are made and not read: they are kept in the cache, so that a machine makes them once."""

import hashlib
import os
import zipfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np

from fedcir import rng
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.pictures.cache import cache_folder
from fedcir.data.private import new_file, private_folder

PARTS = ("train", "test")
SOURCES = (Path(__file__), Path(__file__).with_name("minidigits.py"), Path(rng.__file__))
PACKAGES = ("matplotlib", "numpy", "pillow", "scikit-learn", "scipy")
"""What the digits are drawn by, and drawn from."""


def kept_minidigits() -> Domains:
    """The same as `minidigits()`, to the bit, at the cost of reading a file."""
    place = cache_folder() / f"made-{_key()}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # not there, or damaged: make it anew
        return _read(place)
    from fedcir.data.readers.minidigits import minidigits  # brings scikit-learn, which takes a second to import

    made = minidigits()
    with suppress(OSError):  # a cache that cannot be written to costs time and nothing else
        _write(made, place)
    return made


def _key() -> str:
    """A hash of all that the data depend on: another version of it makes them anew."""
    versions = "".join(f"{name} {version(name)}\n" for name in PACKAGES)
    return hashlib.blake2b(b"".join(map(Path.read_bytes, SOURCES)) + versions.encode(), digest_size=16).hexdigest()


def _write(domains: Domains, place: Path) -> None:
    count = sum(len(domain.train) + len(domain.test) for domain in domains)
    about = {"dataset": domains.name, "images": count, "size": domains.image_shape[0]}  # for `fedcir data cache`
    arrays = {name: np.array(value) for name, value in about.items()}
    arrays |= {"classes": np.array(domains.classes), "domains": np.array(domains.names)}
    for domain in domains:
        for part, split in zip(PARTS, (domain.train, domain.test), strict=True):
            where = f"{domain.name}.{part}."
            arrays |= {where + "images": split.images, where + "labels": split.labels}
            arrays[where + "ids"] = np.array(split.ids)
    private_folder(place.parent)
    beside = place.with_name(f"{place.stem}-{os.getpid()}.npz")
    try:
        np.savez(new_file(beside), allow_pickle=False, **arrays)
        os.replace(beside, place)
    finally:
        beside.unlink(missing_ok=True)


def _read(place: Path) -> Domains:
    with open(place, "rb") as file, np.load(file) as arrays:  # numpy does not close a file that it cannot read

        def split(domain: str, part: str) -> Split:
            images, labels, ids = (arrays[f"{domain}.{part}.{name}"] for name in ("images", "labels", "ids"))
            return Split(images, labels, ids.tolist())

        made = (Domain(name, *(split(name, part) for part in PARTS)) for name in arrays["domains"].tolist())
        return Domains("minidigits", tuple(arrays["classes"].tolist()), tuple(made))
