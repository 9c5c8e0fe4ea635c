"""Files that are written whole or not at all, and that are named when they cannot be read. Nothing is pickled."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedcir.config import typed
from fedcir.types import Arrays, Groups, InputError

RESTORE = "restore the file, or repeat the run in another folder"


def write(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, even when the disk is full or the process is killed."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path), open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


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
    except (OSError, ValueError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or ("No such file" if isinstance(error, FileNotFoundError) else error)
        raise InputError(f"cannot read {what}: {why}; {fix}") from error


def read_json(path: Path, kind: type, fix: str) -> dict[str, Any]:
    with reading(path, fix):
        values: dict[str, Any] = typed(json.loads(path.read_text(encoding="utf-8")), kind, path.stem)
    return values


def pack(kinds: dict[str, Groups], round: int) -> bytes:
    """Groups by kind as one safetensors file; its metadata names them, since no tensor tells of an empty bag."""
    flat = {
        f"{kind}/{quote(group, safe='')}/{name}": tensor  # so that a group's name may hold a slash
        for kind, groups in kinds.items()
        for group, bag in groups.items()
        for name, tensor in bag.items()
    }
    names = {kind: list(groups) for kind, groups in kinds.items()}
    return save(unshared(flat), {"fedcir": json.dumps({"round": round, "kinds": names})})


def unpack(path: Path) -> tuple[dict[str, Groups], int]:
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["fedcir"])
        kinds: dict[str, Groups] = {kind: {g: {} for g in groups} for kind, groups in about["kinds"].items()}
        for key in file.keys():  # noqa: SIM118 (not a dict)
            kind, group, name = key.split("/", 2)
            kinds[kind][unquote(group)][name] = file.get_tensor(key)
    return kinds, about["round"]


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
