"""`arrays`: any folder of `<domain>.npz` files, each with x_train, y_train, x_test and y_test."""

import math
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.data.domains import Domain, Domains, Split
from fedcir.types import InputError

IN_MEMORY = 16_000_000
"""Bytes of an array that is not worth a file."""


def arrays(root: Path) -> Domains:
    """Images are uint8 of (N, H, W, C) or (N, H, W), all of one size; labels are whole numbers from 0."""
    files = sorted(root.glob("*.npz"))
    if not files:
        raise InputError(f"data.root: {root} holds no <domain>.npz file")
    domains = tuple(Domain(file.stem, *_read(file)) for file in files)
    shape = domains[0].train.images.shape[1:]
    for file, domain in zip(files, domains, strict=True):
        for split in (domain.train, domain.test):
            if split.images.shape[1:] != shape:
                other = list(split.images.shape[1:])
                raise InputError(
                    f"{file} holds images of the shape {other}, but {files[0].name} of {list(shape)}: make them equal"
                )
    labels = np.unique(np.concatenate([split.labels for d in domains for split in (d.train, d.test)]))
    gap = next((label for label in range(len(labels)) if labels[label] != label), None)
    if gap is not None:
        raise InputError(
            f"no image in {root} has the label {gap}, but one has {labels[-1]}: number labels from 0, without gaps"
        )
    return Domains("arrays", tuple(str(label) for label in labels), domains)


def _read(file: Path) -> tuple[Split, Split]:
    try:
        with zipfile.ZipFile(file) as archive:
            found = {name.removesuffix(".npy"): _member(archive, name) for name in archive.namelist()}
    except Exception as error:  # a damaged archive raises nearly anything
        raise InputError(f"{file} is not a readable .npz file: {error}") from error
    return _split(file, found, "train"), _split(file, found, "test")


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of the archive. Many bytes go into a file without a name and are mapped: they take no memory then."""
    with archive.open(name) as packed:
        version = np.lib.format.read_magic(packed)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(packed)
        if dtype == np.uint8 and not fortran and math.prod(shape) > IN_MEMORY:
            with tempfile.TemporaryFile() as file:
                shutil.copyfileobj(packed, file, 1 << 20)
                file.flush()
                return np.memmap(file, np.uint8, "r", shape=shape)
    with archive.open(name) as packed:
        return np.asarray(np.lib.format.read_array(packed, allow_pickle=False))


def _split(file: Path, found: dict[str, Any], part: str) -> Split:
    for name in (f"x_{part}", f"y_{part}"):
        if name not in found:
            raise InputError(f"{file} has no array {name!r}; it has {', '.join(sorted(found)) or 'none'}")
    x, y = found[f"x_{part}"], found[f"y_{part}"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise InputError(f"{file}: x_{part} must be uint8 of (N, H, W, C) or (N, H, W), got {x.dtype}{list(x.shape)}")
    if not np.issubdtype(y.dtype, np.integer) or y.shape != (len(x),):
        raise InputError(f"{file}: y_{part} must be {len(x)} whole numbers, got {y.dtype}{list(y.shape)}")
    if x.size == 0:
        raise InputError(f"{file}: x_{part} holds no image, its shape is {list(x.shape)}")
    if y.min() < 0 or y.max() > np.iinfo(np.int64).max:
        raise InputError(
            f"{file}: y_{part} holds the label {y.min() if y.min() < 0 else y.max()}: number labels from 0"
        )
    images = x if x.ndim == 4 else x[..., None]
    return Split(images, y.astype(np.int64), [f"{file.stem}/{part}/{i:06d}" for i in range(len(y))])
