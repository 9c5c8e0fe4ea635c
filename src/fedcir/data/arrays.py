"""`arrays`: any folder of `<domain>.npz` files, each with x_train, y_train, x_test and y_test."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from fedcir.data.domains import Domain, Domains, Split
from fedcir.types import InputError


def arrays(root: Path) -> Domains:
    """Images are uint8 of (N, H, W, C) or (N, H, W), all of one size; labels are whole numbers from 0."""
    files = sorted(root.glob("*.npz"))
    if not files:
        raise InputError(f"data.root: {root} holds no <domain>.npz file")
    domains = tuple(Domain(file.stem, *_read(file)) for file in files)
    shapes = {domain.train.images.shape[1:] for domain in domains} | {
        domain.test.images.shape[1:] for domain in domains
    }
    if len(shapes) > 1:
        raise InputError(f"images in {root} have several shapes, {sorted(shapes)}: make them all the same")
    count = 1 + max(int(split.labels.max()) for domain in domains for split in (domain.train, domain.test))
    return Domains("arrays", tuple(str(label) for label in range(count)), domains)


def _read(file: Path) -> tuple[Split, Split]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} is not a readable .npz file: {error}") from error
    return _split(file, found, "train"), _split(file, found, "test")


def _split(file: Path, found: dict[str, Any], part: str) -> Split:
    for name in (f"x_{part}", f"y_{part}"):
        if name not in found:
            raise InputError(f"{file} has no array {name!r}; it has {', '.join(sorted(found)) or 'none'}")
    x, y = found[f"x_{part}"], found[f"y_{part}"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise InputError(f"{file}: x_{part} must be uint8 of (N, H, W, C) or (N, H, W), got {x.dtype}{list(x.shape)}")
    if not np.issubdtype(y.dtype, np.integer) or y.shape != (len(x),):
        raise InputError(f"{file}: y_{part} must be {len(x)} whole numbers, got {y.dtype}{list(y.shape)}")
    if len(y) == 0:
        raise InputError(f"{file}: x_{part} holds no image")
    if y.min() < 0:
        raise InputError(f"{file}: y_{part} holds the label {y.min()}; labels start at 0")
    images = x if x.ndim == 4 else x[..., None]
    return Split(images, y.astype(np.int64), [f"{file.stem}/{part}/{i:06d}" for i in range(len(y))])
