"""Cache of decoded and resized images: one memory-mapped file per dataset and size, shared by all processes.

A prepared dataset is a folder named by a hash of its files' content and the image size. The content of a set of files
is looked up by their names, sizes and times, so that opening a prepared dataset reads none of them.
"""

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcir.data.decoding import RGB, Decoding, OnFile, PixelFile, decode_files
from fedcir.data.domains import Images, Indices
from fedcir.data.sources.source import ImageList
from fedcir.errors import InputError
from fedcir.files import acquire_lock, create_file, make_inner_folder, make_private_folder, write_file

CACHE_NAMES = re.compile(r"(prepared|features|seen|build)-[0-9a-f]{32}(\.lock|\.seen)?|made-[0-9a-f]{32}(-\d+)?\.npz")
"""Names that fedcir uses in the cache folder, which may hold other files too."""
VERSION = 1  # of the decoding: another version gives another cache
SQUARES, SIZES = "squares.npy", "sizes.npy"  # hashes of the decoded images, and sizes of the files


@dataclass(frozen=True)
class PreparedImages:
    """Decoded images of a dataset at one size, the hash of each file's content, and that of the whole dataset."""

    images: Images  # (N, size, size, channels), mapped
    digests: NDArray[np.void]
    content: str
    sizes: NDArray[np.int64] | None = None
    """Stored width and height of each image (N, 2); None if an earlier version prepared them."""


@dataclass(frozen=True)
class CacheEntry:
    """A dataset at one size in the cache."""

    path: Path
    dataset: str
    root: str
    images: int
    size: int
    bytes: int
    channels: int = RGB


def cache_folder() -> Path:
    """Return FEDCIR_CACHE, or the user's cache folder."""
    if folder := os.environ.get("FEDCIR_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcir"


def cache_entries() -> list[CacheEntry]:
    """List the prepared datasets."""
    entries = []
    for folder in sorted(path for kind in ("prepared", "features") for path in cache_folder().glob(f"{kind}-*")):
        with suppress(OSError, ValueError, TypeError, AttributeError, ZeroDivisionError):
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
            if (width := about.pop("width", None)) is not None:  # features, one row of floats per image
                about["images"] = (folder / "features").stat().st_size // (4 * width)
            size_on_disk = sum(path.stat().st_size for path in folder.iterdir())
            about["root"] = os.fsencode(about["root"]).decode(errors="replace")
            entries.append(CacheEntry(folder, **about, bytes=size_on_disk))
    for path in sorted(cache_folder().glob("made-*.npz")):
        with suppress(OSError, ValueError, KeyError, BadZipFile), open(path, "rb") as file, np.load(file) as arrays:
            counts = {name: int(arrays[name]) for name in ("images", "size")}
            entries.append(
                CacheEntry(path, str(arrays["dataset"]), "made by fedcir", **counts, bytes=path.stat().st_size)
            )
    return entries


def clear_cache() -> int:
    """Delete everything that fedcir wrote into the cache, and return the number of freed bytes."""
    freed = 0
    for path in cache_folder().iterdir() if cache_folder().is_dir() else ():
        if CACHE_NAMES.fullmatch(path.name):
            files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
            freed += sum(file.stat().st_size for file in files)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return freed


def prepare_images(
    name: str, root: str, pictures: ImageList, decoding: Decoding, on_file: OnFile | None = None
) -> PreparedImages:
    """Return the decoded images of a dataset from the cache; decode them into it first if they are missing."""
    # RGB has no entry in the key, so that caches of earlier versions are used.
    settings = [VERSION, decoding.size, *([decoding.channels] if decoding.channels != RGB else [])]
    seen = _hash_key([*settings, pictures.fingerprint()])
    if (prepared := _find_prepared(seen)) is None:
        with lock_cache(seen) as folder:
            if (prepared := _find_prepared(seen)) is None:  # another process may have built it in the meantime
                about = {"dataset": name, "root": root, "images": len(pictures.items)}
                about |= {"size": decoding.size, "channels": decoding.channels or 1}
                build = folder / f"build-{seen}"
                shutil.rmtree(build, ignore_errors=True)  # left by a killed process
                make_inner_folder(build)
                try:
                    content = _build_prepared(build, settings, pictures, about, decoding, on_file)
                    target = folder / f"prepared-{content}"
                    with lock_cache(content):  # equal files at another root may be prepared at the same time
                        if _open_prepared(target) is None:
                            shutil.rmtree(target, ignore_errors=True)  # a damaged one
                            os.rename(build, target)
                finally:
                    shutil.rmtree(build, ignore_errors=True)
                write_file(folder / f"seen-{seen}", content)
                prepared = _find_prepared(seen)
    assert prepared is not None
    return prepared


def _hash_key(key: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


def _find_prepared(seen: str) -> PreparedImages | None:
    try:
        content = (cache_folder() / f"seen-{seen}").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return _open_prepared(cache_folder() / f"prepared-{content}")


def _open_prepared(path: Path) -> PreparedImages | None:
    """Open a prepared dataset; None if it is missing or incomplete."""
    try:
        digests = np.load(path / "digests.npy")
        images = np.load(path / "images.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    sizes = None
    with suppress(OSError, ValueError, EOFError):
        sizes = np.load(path / SIZES)
    content = path.name.removeprefix("prepared-")
    return PreparedImages(images, digests, content, sizes) if len(images) == len(digests) else None


def _build_prepared(
    folder: Path,
    settings: list[int],
    pictures: ImageList,
    about: dict[str, Any],
    decoding: Decoding,
    on_file: OnFile | None,
) -> str:
    """Decode all images into a folder, and return the hash of the dataset."""
    names = [item.name for item in pictures.items]
    shape = (len(names), decoding.size, decoding.size, decoding.channels or 1)
    path = create_file(folder / "images.npy")
    images = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:  # a full disk is an error now, not a crash later
            os.posix_fallocate(file.fileno(), 0, images.offset + images.nbytes)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        paths = pictures.paths(Path(staging))
        decoded = decode_files(paths, decoding, PixelFile(str(path), images.offset), on_file)
    bad = [(name, file.error) for name, file in zip(names, decoded, strict=True) if file.error]
    if bad:
        more = f" (and {len(bad) - 1} more; `fedcir data check` lists them)" if len(bad) > 1 else ""
        raise InputError(
            f"{about['root']}/{bad[0][0]} is not a readable image: {bad[0][1]}{more}; fix or remove it",
            public=f"{len(bad)} of its {len(decoded)} images cannot be read",
        )
    digests = [file.digest for file in decoded]
    np.save(create_file(folder / "digests.npy"), np.frombuffer(bytes.fromhex("".join(digests)), dtype="V16"))
    np.save(create_file(folder / SIZES), np.array([(file.width, file.height) for file in decoded], dtype=np.int64))
    np.save(create_file(folder / SQUARES), _hash_images(images, np.arange(len(images))))
    create_file(folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    return _hash_key([*settings, names, digests])


def image_digests(images: Images, rows: Indices) -> NDArray[np.void]:
    """Hash shape and pixels of these images, 16 bytes each; prepared datasets have the hashes in a file."""
    filename = images.filename if isinstance(images, np.memmap) else None
    if filename is not None and Path(filename).parent.name.startswith("prepared-"):
        with suppress(OSError, ValueError, EOFError):  # prepared by an earlier version, without hashes
            stored: NDArray[np.void] = np.load(Path(filename).with_name(SQUARES))
            if stored.dtype == "V16" and stored.shape == (len(images),):
                return stored[rows]
    return _hash_images(images, rows)


def _hash_images(images: Images, rows: Indices) -> NDArray[np.void]:
    shape = str(images.shape[1:]).encode()
    digests = [hashlib.blake2b(shape + images[row].tobytes(), digest_size=16).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype="V16")


@contextmanager
def lock_cache(name: str) -> Iterator[Path]:
    """Hold a lock in the cache folder, which is created; wait while another process holds it.

    The system releases the lock when the process ends. Disk errors become an error that names the folder.
    """
    folder = cache_folder()
    try:
        make_private_folder(folder)
        file = acquire_lock(folder / f"build-{name}.lock", math.inf)
        assert file is not None
        with file:
            yield folder
    except OSError as error:
        raise InputError(
            f"cannot write the cache in {folder}: {error.strerror or error}; set FEDCIR_CACHE to another folder",
            public="it cannot write the cache of its images (FEDCIR_CACHE)",
        ) from error
