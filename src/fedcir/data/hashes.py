"""Content hashes of images, which tell under any name whether a model was trained on an image.

Images that are files are hashed as files, as `fedcir data check` does; arrays are hashed as decoded pixels.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedcir.data.domains import ContentHashes, Domain, Domains, Hashes, Kind, Split
from fedcir.data.partition.shares import Share, Shares
from fedcir.types import InputError

AT_A_TIME = 1024
"""Images that are read together."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class ImageHashes:
    """Hashes of the images that a run trained on and chose on (validation), each sorted and without repetition."""

    kind: Kind
    train: Hashes
    validation: Hashes

    def find(self, split: Split) -> tuple[Mask, Mask] | None:
        """Which samples of a split the run trained on, and which others it chose on; None if it has no such hashes."""
        hashes = hash_samples(split, self.kind)
        if hashes is None:
            return None
        trained, chosen = is_among(hashes, self.train), is_among(hashes, self.validation)
        return trained, chosen & ~trained


def hash_samples(split: Split, kind: Kind) -> Hashes | None:
    """The hash of each sample, (N,); None where hashes of files are asked for and the samples are no files."""
    if split.hashes is not None and split.hashes.kind == kind:
        return split.hashes.values[split.where]
    return _hash_pixels(split) if kind == "pixels" else None


def hash_arrays(domains: Domains) -> Domains:
    """The same dataset with a hash of the pixels of each training and test image."""

    def with_hashes(split: Split) -> Split:
        values = np.zeros(len(split.images), dtype=np.uint64)
        values[split.where] = _hash_pixels(split)
        return replace(split, hashes=ContentHashes("pixels", values))

    hashed = (replace(d, train=with_hashes(d.train), test=with_hashes(d.test)) for d in domains)
    return replace(domains, domains=tuple(hashed))


def hashes_of_files(digests: NDArray[np.void]) -> ContentHashes:
    """The first 8 of the 16 bytes of each file's digest."""
    return ContentHashes("file", np.frombuffer(digests.tobytes(), dtype="<u8")[::2].astype(np.uint64))


def image_hashes(domains: Domains, shares: Sequence[Share]) -> ImageHashes:
    """Hashes of the images that clients hold to train on, and of all validation images."""
    held = Shares.of(shares, domains.names).held
    train = [domains[name].train.take(rows.rows.astype(np.int64)) for name, rows in held.items()]
    validation = [domain.validation for domain in domains if domain.validation is not None]
    kind = _kind(domains)
    return ImageHashes(kind, _union(train, kind), _union(validation, kind))


def drop_copies(domains: Domains, part: Literal["validation", "test"]) -> Domains:
    """Drop validation or test images that are also training images, of any domain and class; a note says how many."""
    kind = _kind(domains)
    trained = _union([domain.train for domain in domains], kind)
    kept: dict[str, Domain] = {}
    count = 0
    for domain in domains:
        split: Split | None = getattr(domain, part)
        hashes = None if split is None else hash_samples(split, kind)
        if split is None or hashes is None or not (copies := is_among(hashes, trained)).any():
            continue
        if copies.all():
            raise InputError(
                f"every {part} image of domain {domain.name!r} is also a training image: add others",
                public=f"every {part} image is also a training image",
            )
        kept[domain.name] = replace(domain, **{part: split.take(np.flatnonzero(~copies))})  # type: ignore[arg-type]
        count += int(copies.sum())
    if not count:
        return domains
    what = (
        f"{part} image is also a training image and is"
        if count == 1
        else f"{part} images are also training images and are"
    )
    rest = tuple(kept.get(domain.name, domain) for domain in domains)
    return replace(domains, domains=rest, notes=(*domains.notes, f"{count:,} {what} left out of the {part} set"))


def is_among(hashes: Hashes, ascending: Hashes) -> Mask:
    """Which hashes are among those of a sorted array."""
    if not len(ascending):
        return np.zeros(len(hashes), dtype=np.bool_)
    places = np.minimum(np.searchsorted(ascending, hashes), len(ascending) - 1)
    found: Mask = ascending[places] == hashes
    return found


def _kind(domains: Domains) -> Kind:
    hashes = domains.domains[0].train.hashes
    return "pixels" if hashes is None else hashes.kind


def _union(splits: Sequence[Split], kind: Kind) -> Hashes:
    found = [hashes for split in splits if (hashes := hash_samples(split, kind)) is not None]
    return np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *found]))


def _hash_pixels(split: Split) -> Hashes:
    digests = bytearray()
    for start in range(0, len(split), AT_A_TIME):
        some = split.pixels(np.arange(start, min(start + AT_A_TIME, len(split))))
        rows = np.ascontiguousarray(some).reshape(len(some), -1)
        digests += b"".join([hashlib.blake2b(row.data, digest_size=8).digest() for row in rows])
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
