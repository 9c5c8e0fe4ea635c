"""`arrays`: any folder of `<domain>.npz` files, each with x_train, y_train, x_test and y_test."""

import math
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcir.config import MAX_IMAGE_SIZE
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.sources.source import DatasetSource
from fedcir.errors import InputError
from fedcir.machine import check_memory

FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))
IN_MEMORY = 1_000_000  # bytes up to which an array is read into memory


class Header(NamedTuple):
    """Properties of an array, read before it is unpacked."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: "np.dtype[Any]"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _read(file: Path) -> tuple[Split, Split]:
    """Read the splits of a file; no array is unpacked before the headers of all arrays are checked."""
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")
        with zipfile.ZipFile(file) as archive:
            for part in ("train", "test"):
                _check(file, archive, part)
            return _split(file, archive, "train"), _split(file, archive, "test")
    except InputError:
        raise
    except Exception as error:  # a damaged archive raises nearly anything
        raise InputError(f"{file} is not a readable .npz file: {error}") from error


def _check(file: Path, archive: zipfile.ZipFile, part: str) -> None:
    names = sorted(name.removesuffix(".npy") for name in archive.namelist())
    for name in (f"x_{part}", f"y_{part}"):
        if name not in names:
            raise InputError(f"{file} has no array {name!r}; it has {', '.join(names) or 'none'}")
    x, y = _read_header(archive, f"x_{part}.npy"), _read_header(archive, f"y_{part}.npy")
    is_image = x.dtype == np.uint8 and len(x.shape) in (3, 4)
    if not is_image and not (x.dtype in FLOATS and len(x.shape) > 1):
        kinds = "uint8 of (N, H, W, C) or (N, H, W), or floats of any shape (N, ...)"
        raise InputError(f"{file}: x_{part} must be {kinds}, got {x}")
    is_mask = len(y.shape) == 3 and y.shape == x.shape[:3] and y.dtype.kind in "bui"
    if not is_mask and (y.dtype.kind not in "buif" or y.shape[:1] != x.shape[:1] or len(y.shape) > 2):
        kinds = f"{x.shape[0]} classes (whole numbers), numbers (N, T), or masks (N, H, W)"
        raise InputError(f"{file}: y_{part} must be {kinds}, got {y}")
    if x.bytes == 0:
        raise InputError(f"{file}: x_{part} holds no {'image' if is_image else 'number'}, its shape is {list(x.shape)}")
    if is_image and max(x.shape[1:]) > MAX_IMAGE_SIZE:
        shape = f"images of {list(x.shape[1:])}"
        raise InputError(f"{file}: x_{part} holds {shape}: a side has at most {MAX_IMAGE_SIZE:,} pixels")
    folder = tempfile.gettempdir()
    half = shutil.disk_usage(folder).free // 2
    if x.bytes + y.bytes > half:
        size, free = f"{x.bytes / 1e9:,.1f} GB", f"more than half of what is free in {folder}, {half / 1e9:,.1f} GB"
        raise InputError(f"{file}: x_{part} takes {size}, {free}: set TMPDIR to a larger folder")


def _read_header(archive: zipfile.ZipFile, name: str) -> Header:
    with archive.open(name) as packed:
        version = np.lib.format.read_magic(packed)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        header = Header(*read(packed))
        if header.bytes != archive.getinfo(name).file_size - packed.tell():
            raise ValueError(f"{name} does not have the size that it says it has")
    return header


def _open_member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read an array; a large one is unpacked into an unnamed file and mapped, so that it takes no memory."""
    header = _read_header(archive, name)
    with archive.open(name) as packed:
        if header.bytes <= IN_MEMORY:
            return np.asarray(np.lib.format.read_array(packed, allow_pickle=False))
        packed.seek(archive.getinfo(name).file_size - header.bytes)
        with tempfile.TemporaryFile() as file:
            shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            return np.memmap(file, header.dtype, "r", shape=header.shape, order="F" if header.fortran else "C")


def _split(file: Path, archive: zipfile.ZipFile, part: str) -> Split:
    x, y = (_open_member(archive, f"{kind}_{part}.npy") for kind in "xy")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "ui" else y
    targets = None if y.ndim == 1 and y.dtype.kind in "ui" else y
    if targets is not None:
        y = np.zeros(len(y), dtype=np.int64)
    elif y.min() < 0 or y.max() > np.iinfo(np.int64).max:
        wrong = y.min() if y.min() < 0 else y.max()
        raise InputError(f"{file}: y_{part} holds the label {wrong}: number labels from 0")
    if x.dtype != np.uint8:
        check_memory(0 if x.dtype == np.float32 else 4 * x.size, f"{file}: x_{part} in single precision")
        values = np.ascontiguousarray(x, dtype=np.float32)
        if not np.isfinite(values).all():
            raise InputError(f"{file}: x_{part} holds numbers that are not finite, or too large for single precision")
        return Split(values, y.astype(np.int64, copy=False), f"{file.stem}/{part}/", targets=targets)
    images = x if x.ndim == 4 else x[..., None]
    return Split(images, y.astype(np.int64, copy=False), f"{file.stem}/{part}/", targets=targets)


def _describe_targets(targets: NDArray[Any] | None) -> tuple[str, tuple[int, ...]] | None:
    return None if targets is None else ("numbers" if targets.ndim < 3 else "masks", targets.shape[1:])


class Arrays(DatasetSource):
    about = "Your own arrays."
    where = "DIR/<domain>.npz of x_train, y_train, x_test, y_test"

    def load_arrays(self, root: Path) -> Domains:
        """Load images, uint8 of (N, H, W, C) or (N, H, W), or floats (N, ...), of one shape, and labels from 0."""
        files = sorted(root.glob("*.npz"))
        if not files:
            raise InputError(f"data.root: {root} holds no <domain>.npz file")
        domains = tuple(Domain(file.stem, *_read(file)) for file in files)
        shape, dtype = domains[0].train.images.shape[1:], domains[0].train.images.dtype
        for file, domain in zip(files, domains, strict=True):
            if any(split.images.dtype != dtype for split in domain.splits):
                raise InputError(f"{file} holds other numbers than {files[0].name}, {dtype}: images or floats in all")
            if other := next((s.images.shape[1:] for s in domain.splits if s.images.shape[1:] != shape), None):
                shapes = f"{list(other)}, but {files[0].name} of {list(shape)}"
                raise InputError(
                    f"{file} holds {'images' if dtype == np.uint8 else 'inputs'} of the shape {shapes}: make them equal"
                )
        targets = domains[0].train.targets
        for file, domain in zip(files, domains, strict=True):
            if any(_describe_targets(split.targets) != _describe_targets(targets) for split in domain.splits):
                raise InputError(f"{file} holds another kind of y than {files[0].name}: make all of one shape")
        if targets is not None:
            return Domains("arrays", (), domains)
        labels = np.unique(np.concatenate([split.labels for domain in domains for split in domain.splits]))
        if len(gaps := np.flatnonzero(labels != np.arange(len(labels)))):
            count = f"no image in {root} has the label {gaps[0]}, but one has {labels[-1]}"
            raise InputError(f"{count}: number labels from 0, without gaps")
        return Domains("arrays", tuple(str(label) for label in labels), domains)
