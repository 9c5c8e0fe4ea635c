"""Images decoded and resized once, kept on disk as one map of bytes that all processes share.

A prepared dataset is a folder named by a hash of its files' content and the image size. Which content a set of files
has is remembered by their names, sizes and times, so that opening it again reads none of them.
"""

import hashlib
import json
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

from fedcir.data.domains import Images, Indices
from fedcir.data.pictures.decode import OnFile, Squares, decode_files
from fedcir.data.pictures.items import Pictures
from fedcir.data.pictures.square import LIMITS, RGB, Limits
from fedcir.data.private import inner_folder, new_file, open_to_append, private_folder
from fedcir.types import InputError

OWN = re.compile(r"(prepared|features|seen|build)-[0-9a-f]{32}(\.lock|\.seen)?|made-[0-9a-f]{32}(-\d+)?\.npz")
"""Names in the cache folder, which may hold other things too."""

VERSION = 1  # of how images are decoded: another version is another cache


SQUARES = "squares.npy"
"""The file of a prepared dataset that holds a hash of each decoded image."""


@dataclass(frozen=True)
class Prepared:
    images: Images  # (N, size, size, channels), mapped
    digests: NDArray[np.void]
    """A hash of each file's content: equal files have equal ones."""
    content: str
    """A hash of everything."""


@dataclass(frozen=True)
class Entry:
    """What the cache holds of one dataset at one size."""

    path: Path
    dataset: str
    root: str
    images: int
    size: int
    bytes: int
    channels: int = RGB


def cache_folder() -> Path:
    """FEDCIR_CACHE, or the user's cache folder."""
    given = os.environ.get("FEDCIR_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcir"


def cache_entries() -> list[Entry]:
    """All that is prepared."""
    entries = []
    for folder in sorted(each for kind in ("prepared", "features") for each in cache_folder().glob(f"{kind}-*")):
        with suppress(OSError, ValueError, TypeError, AttributeError, ZeroDivisionError):
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
            if (width := about.pop("width", None)) is not None:  # features, one row of floats per image
                about["images"] = (folder / "features").stat().st_size // (4 * width)
            taken = sum(path.stat().st_size for path in folder.iterdir())
            about["root"] = os.fsencode(about["root"]).decode(errors="replace")
            entries.append(Entry(folder, **about, bytes=taken))
    for path in sorted(cache_folder().glob("made-*.npz")):
        with suppress(OSError, ValueError, KeyError, BadZipFile), open(path, "rb") as file, np.load(file) as made:
            counts = {name: int(made[name]) for name in ("images", "size")}
            entries.append(Entry(path, str(made["dataset"]), "made by fedcir", **counts, bytes=path.stat().st_size))
    return entries


def clear_cache() -> int:
    """Remove what fedcir has put there, half-built leftovers too; gives the bytes that were freed."""
    freed = 0
    for path in cache_folder().iterdir() if cache_folder().is_dir() else ():
        if OWN.fullmatch(path.name):
            files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
            freed += sum(each.stat().st_size for each in files)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    return freed


def prepare(
    name: str,
    root: str,
    pictures: Pictures,
    size: int,
    on_file: OnFile | None = None,
    channels: int = RGB,
    limits: Limits = LIMITS,
) -> Prepared:
    """The images of a dataset, from the cache or into it."""
    key = json.dumps([*_form(size, channels), pictures.fingerprint()])
    seen = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    folder = cache_folder()
    prepared = _open(folder, seen)
    if prepared is None:
        with writing(folder):
            private_folder(folder)
            with alone(folder / f"build-{seen}.lock"):
                prepared = _open(folder, seen)  # another process may have built it while this one waited
                if prepared is None:
                    about = {"dataset": name, "root": root, "images": len(pictures.items), "size": size}
                    about |= {"channels": channels}
                    _build(folder, seen, pictures, about, on_file, limits)
                    prepared = _open(folder, seen)
    assert prepared is not None
    return prepared


def _form(size: int, channels: int) -> list[int]:
    """What a square depends on beside its file; that of RGB is what it was before there was grey."""
    return [VERSION, size] if channels == RGB else [VERSION, size, channels]


def _open(folder: Path, seen: str) -> Prepared | None:
    try:
        content = (folder / f"seen-{seen}").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return _read(folder / f"prepared-{content}")


def _read(place: Path) -> Prepared | None:
    """What is prepared there, if all of it is."""
    try:
        digests = np.load(place / "digests.npy")
        images = np.load(place / "images.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    content = place.name.removeprefix("prepared-")
    return Prepared(images, digests, content) if len(images) == len(digests) else None


def _build(
    folder: Path, seen: str, pictures: Pictures, about: dict[str, Any], on_file: OnFile | None, limits: Limits
) -> None:
    """Decode everything into a folder beside, then move it to its place."""
    beside = folder / f"build-{seen}"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    inner_folder(beside)
    try:
        size, channels = int(about["size"]), int(about["channels"])
        shape = (len(pictures.items), size, size, channels)
        images = np.lib.format.open_memmap(new_file(beside / "images.npy"), mode="w+", dtype=np.uint8, shape=shape)
        rows = Squares(str(beside / "images.npy"), images.offset)
        if hasattr(os, "posix_fallocate"):
            with open(rows.path, "r+b") as file:  # a full disk is an error now, not a crash later
                os.posix_fallocate(file.fileno(), 0, images.offset + images.nbytes)
        del images
        with tempfile.TemporaryDirectory(dir=beside) as staging:
            looks = decode_files(pictures.paths(Path(staging)), size, rows, on_file, channels, limits)
        bad = [(item.name, look.error) for item, look in zip(pictures.items, looks, strict=True) if look.error]
        if bad:
            others = f" (and {len(bad) - 1} more; `fedcir data check` lists them)" if len(bad) > 1 else ""
            raise InputError(
                f"{about['root']}/{bad[0][0]} is not a readable image: {bad[0][1]}{others}; fix or remove it",
                public=f"{len(bad)} of its {len(looks)} images cannot be read",
            )
        digests = [look.digest for look in looks]
        names = [item.name for item in pictures.items]
        key = json.dumps([*_form(size, channels), names, digests])
        content = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        np.save(new_file(beside / "digests.npy"), np.frombuffer(bytes.fromhex("".join(digests)), dtype="V16"))
        squares = np.load(rows.path, mmap_mode="r")
        np.save(new_file(beside / SQUARES), _hash_images(squares, np.arange(len(squares))))
        del squares
        new_file(beside / "about.json").write_text(json.dumps(about), encoding="utf-8")
        _move(beside, folder / f"prepared-{content}")
        pointer = folder / f"build-{seen}.seen"
        pointer.unlink(missing_ok=True)  # of a process that was killed
        new_file(pointer).write_text(content, encoding="ascii")
        os.replace(pointer, folder / f"seen-{seen}")
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _move(beside: Path, place: Path) -> None:
    """Put a finished folder to its place, unless the same files at another root have been prepared there already."""
    with alone(place.with_name(place.name.replace("prepared", "build") + ".lock")):
        if _read(place) is None:
            shutil.rmtree(place, ignore_errors=True)  # of a disk that lost something
            os.rename(beside, place)


def image_digests(images: Images, rows: Indices) -> NDArray[np.void]:
    """A hash of the shape and the pixels of each of these images, 16 bytes each; a prepared dataset holds them."""
    filename = images.filename if isinstance(images, np.memmap) else None
    if filename is not None and Path(filename).parent.name.startswith("prepared-"):
        with suppress(OSError, ValueError, EOFError):  # of an earlier version, which did not write them
            known: NDArray[np.void] = np.load(Path(filename).with_name(SQUARES))
            if known.dtype == "V16" and known.shape == (len(images),):
                return known[rows]
    return _hash_images(images, rows)


def _hash_images(images: Images, rows: Indices) -> NDArray[np.void]:
    shape = str(images.shape[1:]).encode()
    digests = [hashlib.blake2b(shape + images[row].tobytes(), digest_size=16).digest() for row in rows]
    return np.frombuffer(b"".join(digests), dtype="V16")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends, however it ends; wait for it if another has it."""
    with open_to_append(path) as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # no such locks on Windows: the same work may be done twice
            pass
        yield


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Name the cache in an error of the disk."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write the cache in {folder}: {error.strerror or error}; set FEDCIR_CACHE to another folder",
            public="it cannot write the cache of its images (FEDCIR_CACHE)",
        ) from error
