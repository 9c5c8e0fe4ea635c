"""Images decoded and resized once, kept on disk as one map of bytes that all processes share.

A prepared dataset is a folder named by a hash of its files' content and the image size. Which content a set of files
has is remembered by their names, sizes and times, so that opening it again reads none of them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcir.data.domains import Images
from fedcir.data.pictures import read_picture
from fedcir.types import InputError

VERSION = 1  # of how images are decoded: another version is another cache

OnFile = Callable[[int, int], None]
"""Told how many files are done, of how many."""


@dataclass(frozen=True)
class Prepared:
    images: Images  # (N, size, size, 3), mapped
    digests: list[str]
    """A hash of each file's content: equal files have equal ones."""
    content: str
    """A hash of everything."""


def cache_folder() -> Path:
    """FEDCIR_CACHE, or the user's cache folder."""
    given = os.environ.get("FEDCIR_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcir"


def cache_bytes() -> int:
    return sum(path.stat().st_size for path in cache_folder().rglob("*") if path.is_file())


def clear_cache() -> int:
    """Remove everything that was prepared; gives the bytes that were freed."""
    freed = cache_bytes()
    shutil.rmtree(cache_folder(), ignore_errors=True)
    return freed


def prepare(root: Path, names: Sequence[str], size: int, on_file: OnFile | None = None) -> Prepared:
    """The images of these files below `root`, from the cache or into it."""
    seen = _seen(root, names, size)
    folder = cache_folder()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    prepared = _open(folder, seen)
    if prepared is None:
        with _writing(folder), _alone(folder / f"{seen}.lock"):
            prepared = _open(folder, seen)  # another process may have built it while this one waited
            if prepared is None:
                _build(folder, seen, root, names, size, on_file)
                prepared = _open(folder, seen)
    assert prepared is not None
    return prepared


def _seen(root: Path, names: Sequence[str], size: int) -> str:
    """A hash of what the files look like from outside."""
    digest = hashlib.blake2b(json.dumps([VERSION, size, str(root.resolve())]).encode(), digest_size=16)
    for name in names:
        status = os.stat(root / name)
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _open(folder: Path, seen: str) -> Prepared | None:
    try:
        content = (folder / f"{seen}.content").read_text(encoding="ascii")
        digests = json.loads((folder / content / "digests.json").read_text(encoding="ascii"))
        images = np.load(folder / content / "images.npy", mmap_mode="r")
    except (OSError, ValueError):
        return None
    return Prepared(images, digests, content) if len(images) == len(digests) else None


def _build(folder: Path, seen: str, root: Path, names: Sequence[str], size: int, on_file: OnFile | None) -> None:
    """Decode everything into a folder beside, then move it to its place."""
    beside = folder / f"{seen}.tmp"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    beside.mkdir()
    try:
        shape = (len(names), size, size, 3)
        images = np.lib.format.open_memmap(beside / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
        with open(beside / "images.npy", "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, images.offset + images.nbytes)  # a full disk is an error, not a crash

        def decode(index: int) -> str:
            path = root / names[index]
            try:
                images[index] = read_picture(path, size)
            except Exception as error:  # Pillow raises nearly anything on a damaged file
                raise InputError(
                    f"{path} is not a readable image: {error}; `fedcir data check` lists all such"
                ) from error
            return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()

        digests = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for digest in pool.map(decode, range(len(names))):
                digests.append(digest)
                if on_file is not None:
                    on_file(len(digests), len(names))
        images.flush()
        content = hashlib.blake2b(
            json.dumps([VERSION, size, list(names), digests]).encode(), digest_size=16
        ).hexdigest()
        (beside / "digests.json").write_text(json.dumps(digests), encoding="ascii")
        if not (folder / content).exists():
            os.replace(beside, folder / content)
        pointer = folder / f"{seen}.content.tmp"
        pointer.write_text(content, encoding="ascii")
        os.replace(pointer, folder / f"{seen}.content")
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends, however it ends; wait for it if another has it."""
    with open(path, "w", encoding="ascii") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except ImportError:  # no such locks on Windows: the same work may be done twice
            pass
        yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write the cache in {folder}: {error.strerror or error}; name another folder in FEDCIR_CACHE"
        ) from error
