"""Files that are written atomically, with a checksum, for their owner only; size-limited reading; locks.

A new file has the mode of its folder, whatever the umask: new folders are private, and a folder that a team shares
stays shared. No file is opened through a symbolic link in a run folder, which may come from somebody else. Nothing is
pickled. Checksums detect damage, not forgery; files of earlier versions without one are accepted.
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor
from safetensors import SafetensorError

from fedcir.errors import InputError
from fedcir.text import to_one_line
from fedcir.validation import check_type

MAX_TABLE_BYTES = 1_000_000_000
"""Largest CSV table of images in bytes."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
WANDB_FOLDER = ("track", "wandb")
"""Folder in which Weights & Biases creates symbolic links of its own."""
LOCK_TIMEOUT = 3.0
"""Seconds to wait for the workers of a killed run: they inherit its lock, and might still write."""
RESTORE_HINT = "restore the file, or repeat the run in another folder"
CHECKSUM_KEY = "checksum"
UNSTABLE_KEYS = ("seconds", "peak_memory")
"""Keys that differ between equal runs: checksums leave them out."""


def read_bytes(path: str | Path, most: int, limit: str = "") -> bytes:
    """Read a regular file of at most `most` bytes; `limit` names the setting that holds this number.

    Raises OSError or ValueError, whose text says what is wrong with the file.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    status = os.fstat(handle)  # with O_NONBLOCK, opening a pipe does not wait for its other end
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        is_folder = stat.S_ISDIR(status.st_mode)
        raise ValueError("it is a folder" if is_folder else "it is not a regular file, but a pipe or a device")
    with open(handle, "rb") as file:
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size:,} bytes, more than {f'{limit}=' if limit else ''}{most:,}")
        return file.read(status.st_size)


def read_text(path: str | Path, most: int) -> str:
    """Read a text file of at most `most` bytes, with or without a byte order mark."""
    return read_bytes(path, most).decode("utf-8-sig")


def check_regular_file(path: Path) -> Path:
    """Return the path of a regular file; reading a pipe or a device might never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a file")
    return path


@contextlib.contextmanager
def explain_read_errors(source: Path | str, fix: str) -> Iterator[None]:
    """Turn the errors of a missing or damaged file into an InputError with its name and the fix."""
    try:
        yield
    except RecursionError as error:
        raise InputError(f"cannot read {source}: it is nested too deeply; {fix}") from error
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or ("No such file" if isinstance(error, FileNotFoundError) else error)
        raise InputError(f"cannot read {source}: {to_one_line(reason)}; {fix}") from error


def check_output_folder(folder: Path) -> None:
    """Check before long work that files can be written in `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"{existing} is a file: choose another folder")
    if not os.access(existing, os.W_OK):
        raise InputError(f"the folder {existing} cannot be written to: choose another")


def check_output_file(path: Path, endings: Collection[str] = ()) -> None:
    """Check before long work that a file can be written at `path`, and that its name has one of the `endings`."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file in it")
    if endings and path.suffix.lower() not in endings:
        raise InputError(f"the name of the file must end in {', '.join(endings)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}: create it, or choose another")
    check_output_folder(path.parent)


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner may enter, and its missing parents."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_inner_folder(path: Path) -> None:
    """Create a folder with the mode of its parent."""
    path.mkdir(mode=path.parent.stat().st_mode & 0o777)


def check_no_links(folder: Path) -> None:
    """Refuse a folder that holds a symbolic link at any depth; the folder itself may be reached through links."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if _is_link(path) and not _is_wandb_link(path):
                raise InputError(f"{path} is a link, and a run folder must hold none: replace it by what it points to")


def _is_link(path: Path) -> bool:
    return path.is_symlink() or getattr(os.path, "isjunction", os.path.islink)(path)


def _is_wandb_link(path: Path) -> bool:
    """Return whether a link stays in the folder of W&B, or is the log of its service, which fedcir never opens."""
    folder = next((parent for parent in path.parents if parent.parts[-2:] == WANDB_FOLDER), None)
    if folder is None:
        return False
    if path.name == "debug-core.log" and path.parent.name == "logs":
        return True
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def write_file(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file atomically, even when the disk is full or the process is killed. Content may come in pieces."""
    pieces = [content] if isinstance(content, str | bytes) else content
    temporary = f".{secrets.token_hex(8)}.tmp"  # nobody can guess the name and put a link there beforehand
    with name_in_errors(path), _open_folder(path.parent) as folder:
        target = path.name
        if folder is None:
            temporary, target = str(path.with_name(temporary)), str(path)
        mode = os.stat(path.parent if folder is None else folder).st_mode & 0o666
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode, dir_fd=folder)
        try:
            with open(handle, "wb") as file:
                file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise


@contextlib.contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that lacks it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int | None]:
    """Open a folder, so that it cannot be exchanged; None where the system cannot work relative to a folder."""
    if not {os.open, os.rename, os.unlink} <= os.supports_dir_fd:
        yield None
        return
    folder = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def open_append(path: Path) -> IO[bytes]:
    """Open a file to append to or to lock, and create it if it is missing; symbolic and hard links are refused."""
    if _is_link(path):
        raise InputError(f"{path} is a link: replace it by what it points to")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file: delete it")
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, os.stat(path.parent).st_mode & 0o666)
    if (status := os.fstat(handle)).st_nlink > 1 and stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise InputError(f"{path} is the same file as another (a hard link): replace it by a copy")
    return open(handle, "ab")


def create_file(path: Path) -> Path:
    """Create an empty file, for functions that open it by its name."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, os.stat(path.parent).st_mode & 0o666))
    return path


def acquire_lock(path: Path, timeout: float | None = None) -> IO[bytes] | None:
    """Lock a file until it is closed or the process ends; return None if another holds the lock after `timeout`.

    Without a timeout it waits. Forked workers inherit the lock. A lock file that its former holder removed in the
    meantime excludes nobody, so the file that is now at `path` is locked instead.
    """
    until = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        make_private_folder(path.parent)
        try:
            file = open_append(path)
        except FileNotFoundError:  # the folder was removed just now
            if time.monotonic() > until:
                raise
            continue
        while not lock_descriptor(file.fileno(), blocking=False):
            if time.monotonic() > until:
                file.close()
                return None
            time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()


def hash_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def read_json(path: Path, kind: type, fix: str) -> dict[str, Any]:
    """Read a JSON object of a type from a file, and verify its checksum."""
    with explain_read_errors(path, fix):
        values: dict[str, Any] = verify_checksum(json.loads(check_regular_file(path).read_bytes()), kind, path.stem)
    return values


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values together with their checksum."""
    return {**values, CHECKSUM_KEY: compute_checksum(values)}


def verify_checksum(values: Any, kind: type, name: str) -> Any:
    """Return values as a type, without their checksum, which is compared if there is one."""
    bare = {key: value for key, value in check_type(values, dict, name).items() if key != CHECKSUM_KEY}
    typed = check_type(bare, kind, name)
    if CHECKSUM_KEY in values:
        compare_checksums(values[CHECKSUM_KEY], compute_checksum(bare))
    return typed


def compare_checksums(saved: object, computed: str) -> None:
    if saved != computed:
        raise InputError(f"its checksum is {saved}, but that of its content is {computed}")


def compute_checksum(values: Any) -> str:
    """Compute the CRC-32 of values as JSON with sorted keys."""
    return f"{zlib.crc32(json.dumps(_drop_unstable(values), sort_keys=True, default=str).encode()):08x}"


def _drop_unstable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_unstable(item) for key, item in value.items() if key not in UNSTABLE_KEYS}
    return [_drop_unstable(item) for item in value] if isinstance(value, list | tuple) else value


EVENTS_FILE = "FEDCIR_EVENTS"
"""Environment variable with the file for events. The process that starts a run sets it and reads the file."""


def send_event(event: str, text: str) -> bool:
    """Append an event, which is "note" or "failed", to the events file. Returns whether there is one."""
    if path := os.environ.get(EVENTS_FILE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "text": text}) + "\n")
    return bool(path)


def read_events(path: Path) -> list[dict[str, str]]:
    """Read all complete lines of an events file; a killed process may leave an incomplete last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
