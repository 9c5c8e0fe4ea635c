"""Named groups of tensors as one checksummed safetensors file: checkpoints, client states and saved replies."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import safe_open
from safetensors.torch import save

from fedcir.errors import InputError
from fedcir.files import CHECKSUM_KEY, RESTORE_HINT, check_regular_file, compare_checksums, explain_read_errors
from fedcir.types import Groups, Tensors
from fedcir.validation import check_type


@dataclass(frozen=True)
class GroupsMetadata:
    """Metadata of a file of groups."""

    round: int
    kinds: dict[str, list[str]]
    """Names of the groups of each kind, since an empty group has no tensor."""
    kept: dict[str, int] | None = None
    """Round of each client's state beside this file; None in files of earlier versions."""
    checksum: str | None = None
    run: str | None = None
    """Identity of the run that saved the file; None in files of earlier versions, as is `record`."""
    record: str | None = None
    """Checksum of the record of its round."""


def pack_groups(
    kinds: dict[str, Groups], round: int, state_rounds: Mapping[int, int] | None = None, **origin: str | None
) -> bytes:
    """Encode groups by kind as a safetensors file; `origin` holds the `run` and `record` of GroupsMetadata."""
    tensors = copy_shared_tensors({
        f"{kind}/{quote(group, safe='')}/{name}": tensor  # quoted, since a group's name may contain a slash
        for kind, groups in kinds.items()
        for group, bag in groups.items()
        for name, tensor in bag.items()
    })  # fmt: skip
    rounds = None if state_rounds is None else {str(client): number for client, number in state_rounds.items()}
    names = {kind: list(groups) for kind, groups in kinds.items()}
    metadata = asdict(GroupsMetadata(round, names, rounds, **origin))
    metadata[CHECKSUM_KEY] = compute_tensor_checksum(metadata, tensors)
    return save(tensors, {"fedcir": json.dumps(metadata)})


def unpack_groups(path: Path, *expected: str) -> tuple[dict[str, Groups], GroupsMetadata]:
    """Read a file that `pack_groups` encoded and that holds these kinds; a damaged one is an InputError."""
    with explain_read_errors(path, RESTORE_HINT), safe_open(check_regular_file(path), framework="pt") as file:
        values = json.loads(file.metadata()["fedcir"])
        metadata: GroupsMetadata = check_type(values, GroupsMetadata, "metadata")
        if set(metadata.kinds) != set(expected):
            raise InputError(f"it holds {' and '.join(metadata.kinds)}, not {' and '.join(expected)}")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.checksum is not None:
            compare_checksums(metadata.checksum, compute_tensor_checksum({**values, CHECKSUM_KEY: None}, tensors))
        kinds: dict[str, Groups] = {kind: {name: {} for name in names} for kind, names in metadata.kinds.items()}
        for key, tensor in tensors.items():
            kind, group, name = key.split("/", 2)
            kinds[kind][unquote(group)][name] = tensor
    return kinds, metadata


def compute_tensor_checksum(metadata: Any, tensors: Tensors) -> str:
    """Compute the CRC-32 of named tensors and their metadata."""
    kinds = {name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in tensors.items()}
    crc = zlib.crc32(json.dumps([metadata, kinds], sort_keys=True).encode())
    for _, tensor in sorted((name, tensor) for name, tensor in tensors.items() if tensor.numel()):
        crc = zlib.crc32(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()), crc)  # type: ignore[arg-type]
    return f"{crc:08x}"


def copy_shared_tensors(tensors: Tensors) -> Tensors:
    """Return contiguous tensors of which no two share memory: safetensors refuses those."""
    pointers: set[int] = set()
    copies = {name: tensor.contiguous() for name, tensor in tensors.items()}
    for name, tensor in copies.items():
        if tensor.numel() and tensor.data_ptr() in pointers:
            copies[name] = tensor.clone()
        pointers.add(tensor.data_ptr())
    return copies
