"""Files that are written whole or not at all, and that are named when they cannot be read. Nothing is pickled.

Each carries a checksum of what it holds. It tells of a disk or a hand that changed something; whoever changes a file
on purpose can change the checksum too. Files without one, of earlier versions, are taken as they are.
"""

import contextlib
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedcir.config import typed
from fedcir.data.partition.pieces import compact
from fedcir.data.private import open_replacement
from fedcir.models.tensors import kind_of
from fedcir.types import Arrays, Groups, InputError

RESTORE = "restore the file, or repeat the run in another folder"
CHECKSUM = "checksum"
NOT_SHARED = ("seconds", "peak_memory")
"""What no two runs have in common: checksums leave it out, so that equal runs have equal ones."""


def write(path: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file whole or not at all, even when the disk is full or the process is killed.

    A large one may come in pieces.
    """
    pieces = [content] if isinstance(content, str | bytes) else content
    with naming(path), open_replacement(path) as file:
        file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)


def file_hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error that lacks it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def reading(what: Path | str, fix: str) -> Iterator[None]:
    """Turn what is wrong with a file (missing, damaged, of another kind) into an error with its name and the fix."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or ("No such file" if isinstance(error, FileNotFoundError) else error)
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        raise InputError(f"cannot read {what}: {' '.join(str(why).split())}; {fix}") from error


def content(path: Path) -> bytes:
    return regular(path).read_bytes()


def regular(path: Path) -> Path:
    """The path of a file, since nobody would ever come to the end of a pipe or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a file")
    return path


def read_json(path: Path, kind: type, fix: str) -> dict[str, Any]:
    with reading(path, fix):
        values: dict[str, Any] = unsealed(json.loads(content(path)), kind, path.stem)
    return values


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with their checksum."""
    return {**values, CHECKSUM: checksum(values)}


def unsealed(values: Any, kind: type, name: str) -> Any:
    """Values of a type without their checksum, which must be theirs."""
    bare = {key: value for key, value in typed(values, dict, name).items() if key != CHECKSUM}
    found = typed(bare, kind, name)
    if CHECKSUM in values:
        check(values[CHECKSUM], checksum(bare))
    return found


def checksum(values: Any) -> str:
    value = 0
    for piece in compact(_shared(values)):
        value = zlib.crc32(piece.encode(), value)
    return _hex(value)


def check(said: object, found: str) -> None:
    if said != found:
        raise InputError(f"its checksum is {said}, but that of its content is {found}")


def tensors_checksum(about: Any, tensors: Arrays) -> str:
    """Of named tensors and what is said of them."""
    kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
    value = zlib.crc32(json.dumps([about, kinds], sort_keys=True).encode())
    for _, tensor in sorted((name, tensor) for name, tensor in tensors.items() if tensor.numel()):
        value = zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), value)  # type: ignore[arg-type]
    return _hex(value)


def _hex(value: int) -> str:
    return f"{value:08x}"


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shared(each) for key, each in value.items() if key not in NOT_SHARED}
    return [_shared(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class About:
    """What a file of groups says of them in its metadata."""

    round: int
    kinds: dict[str, list[str]]
    """The names of the groups of each kind, since no tensor tells of an empty one."""
    kept: dict[str, int] | None = None
    """The round of what each client keeps beside it; None in files of earlier versions."""
    checksum: str | None = None
    run: str | None = None
    """Identity of the run that saved it; None in files of earlier versions, as the next."""
    record: str | None = None
    """Checksum of the record of its round."""


def pack(
    kinds: dict[str, Groups],
    round: int,
    kept: Mapping[int, int] | None = None,
    run: str | None = None,
    record: str | None = None,
) -> bytes:
    """Groups by kind as one safetensors file."""
    flat = unshared({
        f"{kind}/{quote(group, safe='')}/{name}": tensor  # so that a group's name may hold a slash
        for kind, groups in kinds.items()
        for group, bag in groups.items()
        for name, tensor in bag.items()
    })  # fmt: skip
    beside = None if kept is None else {str(client): each for client, each in kept.items()}
    about = asdict(About(round, {kind: list(groups) for kind, groups in kinds.items()}, beside, run=run, record=record))
    return save(flat, {"fedcir": json.dumps({**about, CHECKSUM: tensors_checksum(about, flat)})})


def unpack(path: Path, *expected: str) -> tuple[dict[str, Groups], About]:
    """The inverse, for a file of these kinds; one that is damaged is an error."""
    with reading(path, RESTORE), safe_open(regular(path), framework="pt") as file:
        metadata = json.loads(file.metadata()["fedcir"])
        about: About = typed(metadata, About, "metadata")
        if set(about.kinds) != set(expected):
            raise InputError(f"it holds {' and '.join(about.kinds)}, not {' and '.join(expected)}")
        flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if about.checksum is not None:
            check(about.checksum, tensors_checksum({**metadata, CHECKSUM: None}, flat))
        kinds: dict[str, Groups] = {kind: {g: {} for g in groups} for kind, groups in about.kinds.items()}
        for key, tensor in flat.items():
            kind, group, name = key.split("/", 2)
            kinds[kind][unquote(group)][name] = tensor
    return kinds, about


def unshared(arrays: Arrays) -> Arrays:
    """Contiguous tensors of which no two lie in the same memory: safetensors refuses those."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in arrays.items():
        fresh = tensor.contiguous()
        if fresh.numel() and fresh.data_ptr() in seen:
            fresh = fresh.clone()
        seen.add(fresh.data_ptr())
        apart[name] = fresh
    return apart
