"""The manifest: which client holds which samples by name, and a hash that is equal for equal data, settings and seed.

A run keeps it as manifest.json. With more than MAX_JSON_SAMPLES samples, rows and names are arrays in
manifest.safetensors, and the JSON file holds the rest.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from safetensors.torch import load_file, save

from fedcir import files
from fedcir.data.domains import Domain, Domains, Indices
from fedcir.data.partition import ClientPartition, DomainRows, LazySequence, Partition
from fedcir.tasks.classification import describe_task
from fedcir.tensor_files import compute_tensor_checksum
from fedcir.types import Tensors

MAX_JSON_SAMPLES = 100_000  # training samples up to which a manifest is plain JSON
ARRAYS_FILE = "manifest.safetensors"
_encode_sorted = json.JSONEncoder(sort_keys=True).encode


class ManifestClient(TypedDict):
    id: int
    domain: str
    train: object  # names of its samples, or their number if a site does not send the names


class Manifest(TypedDict):
    """Required content of a plain manifest.json."""

    clients: list[ManifestClient]
    hash: str
    test: NotRequired[dict[str, list[str]]]


class ArraysManifest(TypedDict):
    """Content of manifest.json beside the arrays of a large manifest."""

    dataset: str
    content: str
    hash: str
    domains: list[str]
    validation: bool
    names: list[str]  # of clients in a partition file
    arrays: str  # checksum


@dataclass(frozen=True, eq=False)
class ManifestClients(LazySequence[dict[str, Any]]):
    """Entries of a manifest's clients; the names of their samples exist only while an entry is in use."""

    partition: Partition
    select_names: Callable[[str, Indices], list[str]]  # of training samples, from a domain and its rows

    def __len__(self) -> int:
        return len(self.partition)

    def compute_item(self, index: int) -> dict[str, Any]:
        client = self.partition[index]
        name = {"name": client.name} if client.name else {}
        samples = [sample for domain, rows in client.rows.items() for sample in self.select_names(domain, rows)]
        return {"id": index, **name, "domain": client.domain, "train": samples}


def build_manifest(domains: Domains, clients: Sequence[ClientPartition]) -> dict[str, Any]:
    """Describe which client holds which samples."""
    partition = Partition.from_clients(clients, domains.names)
    train = {domain.name: domain.train for domain in domains}
    manifest: dict[str, Any] = {
        "dataset": domains.name,
        "content": domains.content or "-".join(_hash_pixels(domain) for domain in domains),
        "clients": ManifestClients(partition, lambda domain, rows: train[domain].select_names(rows)),
        "test": {domain.name: domain.test.ids for domain in domains},
        **{name: value for name, value in describe_task(domains.task).items() if name == "task"},
    }
    validation = {domain.name: domain.validation.ids for domain in domains if domain.validation is not None}
    return add_hash({**manifest, "validation": validation} if validation else manifest)


def count_names(samples: object) -> int:
    """Number of samples of a manifest's entry: of their names, or the number that a site gave in their place."""
    return samples if isinstance(samples, int) else len(cast(list[str], samples))


def add_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add the hash of a manifest's JSON with sorted keys, which is encoded client by client to save memory."""
    digest = hashlib.blake2b(b'{"clients": [', digest_size=16)
    separator = ""
    for client in manifest["clients"]:  # "clients" is the first of the sorted keys
        digest.update(f"{separator}{_encode_sorted(client)}".encode())
        separator = ", "
    rest = {key: value for key, value in manifest.items() if key != "clients"}
    digest.update((f"], {_encode_sorted(rest)[1:]}" if rest else "]}").encode())
    return {**manifest, "hash": digest.hexdigest()}


def to_json(manifest: dict[str, Any]) -> str:
    """Encode a manifest, with a line per value."""
    return json.dumps({**manifest, "clients": list(manifest["clients"])}, indent=1, ensure_ascii=False)


def save_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest into a run folder."""
    clients = manifest["clients"]
    if not isinstance(clients, ManifestClients) or clients.partition.sizes.sum() <= MAX_JSON_SAMPLES:
        files.write_file(folder / "manifest.json", to_json(files.add_checksum({**manifest, "clients": list(clients)})))
        return
    partition = clients.partition
    arrays = {"homes": torch.from_numpy(partition.homes)}
    for domain, (rows, ends) in partition.by_domain.items():
        order = np.sort(rows)
        arrays[f"rows/{domain}"] = torch.from_numpy(np.searchsorted(order, rows).astype(np.int32))
        arrays[f"ends/{domain}"] = torch.from_numpy(ends)
        arrays[f"train/{domain}"] = _pack_names(clients.select_names(domain, order.astype(np.int64)))
    for part in ("test", "validation"):
        arrays |= {f"{part}/{domain}": _pack_names(names) for domain, names in manifest.get(part, {}).items()}
    about: dict[str, Any] = {key: manifest[key] for key in ("dataset", "content", "hash")}
    about |= {"task": manifest["task"]} if "task" in manifest else {}
    about |= {"domains": list(partition.domains), "validation": "validation" in manifest}
    about |= {"names": list(partition.names), "arrays": compute_tensor_checksum(None, arrays)}
    files.write_file(folder / ARRAYS_FILE, save(arrays))
    files.write_file(folder / "manifest.json", json.dumps(files.add_checksum(about), indent=1, ensure_ascii=False))


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run folder; the entries of a large one are computed on access."""
    path = folder / "manifest.json"
    # Arrays may be left from a kill between two files, or from a manifest that was large before the run was resumed.
    if not (folder / ARRAYS_FILE).exists() or "arrays" not in files.read_json(path, dict, files.RESTORE_HINT):
        return files.read_json(path, Manifest, files.RESTORE_HINT)
    about = files.read_json(path, ArraysManifest, files.RESTORE_HINT)
    with files.explain_read_errors(folder / ARRAYS_FILE, files.RESTORE_HINT):
        arrays = load_file(files.check_regular_file(folder / ARRAYS_FILE))
        files.compare_checksums(about["arrays"], compute_tensor_checksum(None, arrays))
        return _unpack_manifest(about, arrays)


def _unpack_manifest(about: dict[str, Any], arrays: Tensors) -> dict[str, Any]:
    names_of = cache(lambda domain: _unpack_names(arrays[f"train/{domain}"]))
    by_domain = {
        domain: DomainRows(arrays[f"rows/{domain}"].numpy(), arrays[f"ends/{domain}"].numpy())
        for domain in about["domains"]
        if f"rows/{domain}" in arrays
    }
    partition = Partition(tuple(about["domains"]), arrays["homes"].numpy(), by_domain, about["names"])

    def select_names(domain: str, rows: Indices) -> list[str]:
        names = names_of(domain)
        return [names[row] for row in rows.tolist()]

    manifest: dict[str, Any] = {key: about[key] for key in ("dataset", "content", "task") if key in about}
    manifest["clients"] = ManifestClients(partition, select_names)
    for part in ("test", "validation") if about["validation"] else ("test",):
        keys = {domain: f"{part}/{domain}" for domain in about["domains"] if f"{part}/{domain}" in arrays}
        manifest[part] = {domain: _unpack_names(arrays[key]) for domain, key in keys.items()}
    return {**manifest, "hash": about["hash"]}


def _pack_names(names: Sequence[str]) -> torch.Tensor:
    joined = "".join([f"{name}\0" for name in names])  # no file name holds this character
    return torch.from_numpy(np.frombuffer(joined.encode(), dtype=np.uint8).copy())


def _unpack_names(packed: torch.Tensor) -> list[str]:
    return packed.numpy().tobytes().decode().split("\0")[:-1]


def _hash_pixels(domain: Domain) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for split in domain.splits:
        for chunk in split.chunks():
            digest.update(chunk.data)
        digest.update(np.ascontiguousarray(split.labels).data)
        if split.targets is not None:
            digest.update(np.ascontiguousarray(split.select_targets(np.arange(len(split)))).data)
    return digest.hexdigest()
