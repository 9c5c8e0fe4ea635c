"""Who takes part: the clients with their data, the task they share, and the manifest that names every sample."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fedcir.config import Config
from fedcir.data.decode import OnFile
from fedcir.data.domains import Domain, Domains
from fedcir.data.examples import Examples, ImageExamples, Normalisation, PooledExamples, examples_of
from fedcir.data.sources import open_dataset
from fedcir.models.cnn import SMALLEST
from fedcir.models.task import Task, image_task, module_task
from fedcir.partition import Share, partition, read_owners
from fedcir.types import InputError


@dataclass(frozen=True)
class Client:
    """A site: its training data, and the test data of its domain. Without training data it only evaluates."""

    id: int
    domain: str
    train: Examples | None
    test: Examples
    validation: Examples | None = None
    """What the best round is picked on, where images were set aside for it."""


class Roster(Protocol):
    """Who takes part and in what, as a server knows it, which need not hold any data."""

    @property
    def task(self) -> Task: ...

    @property
    def card(self) -> dict[str, Any]: ...

    @property
    def manifest(self) -> dict[str, Any]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def trainers(self) -> tuple[int, ...]: ...

    @property
    def evaluators(self) -> dict[int, str]: ...

    @property
    def unseen(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Federation:
    dataset: str
    clients: tuple[Client, ...]
    task: Task
    card: dict[str, Any]
    """What a user of the model must know: classes, size, normalisation. It goes into the model's file."""
    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What its user should know about the data."""
    unseen: tuple[str, ...] = ()
    """The domains that nobody trains on."""

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(client.id for client in self.clients if client.train is not None)

    @property
    def evaluators(self) -> dict[int, str]:
        """One client a domain, the first that holds its test set."""
        first: dict[str, int] = {}
        for client in self.clients:
            first.setdefault(client.domain, client.id)
        return {client: domain for domain, client in first.items()}


def deal(config: Config, on_file: OnFile | None = None) -> tuple[Domains, list[Share]]:
    """The configured dataset, and who holds what of it."""
    seed = config.run.seed
    domains = open_dataset(config.data, seed, on_file)
    held_out = config.partition.hold_out
    if held_out in domains.names:  # nothing is picked on it
        kept = tuple(replace(d, validation=None) if d.name == held_out else d for d in domains)
        domains = replace(domains, domains=kept)
    ids = {domain.name: domain.train.ids for domain in domains}
    shares = partition(config.partition, {domain.name: domain.train.labels for domain in domains}, seed, ids)
    if config.partition.file is not None:
        domains = replace(domains, notes=(*domains.notes, *_unmatched(config.partition.file, domains, held_out)))
    return domains, shares


def open_federation(config: Config, on_file: OnFile | None = None) -> Federation:
    """Open the configured dataset and deal it out."""
    return federation_from(config, *deal(config, on_file))


def federation_from(config: Config, domains: Domains, shares: Sequence[Share]) -> Federation:
    """The federation of a dataset that is dealt out already."""
    height, width, channels = domains.image_shape
    if config.model.name == "cnn" and min(height, width) < SMALLEST:
        raise InputError(
            f"cnn takes images from {SMALLEST} pixels on, {domains.name} has {height}x{width}: use resnet18"
        )
    normalisation = Normalisation.of_channels(channels)
    shared = {
        domain.name: (
            ImageExamples(domain.test, normalisation),
            None if domain.validation is None else ImageExamples(domain.validation, normalisation),
        )
        for domain in domains
    }
    clients = []
    for number, share in enumerate(shares):
        train = _examples(domains, share, normalisation) if share.rows else None
        clients.append(Client(number, share.domain, train, *shared[share.domain]))
    card = image_card(domains.classes, height, channels)
    task = image_task(config.model, len(domains.classes), channels, config.run.seed)
    manifest, unseen = manifest_of(domains, shares), unseen_of(domains, shares)
    return Federation(domains.name, tuple(clients), task, card, manifest, domains.notes, unseen)


def unseen_of(domains: Domains, shares: Sequence[Share]) -> tuple[str, ...]:
    """The domains that nobody trains on, such as a held-out one."""
    return tuple(name for name in domains.names if not any(name in share.rows for share in shares))


def image_card(classes: Sequence[str], image_size: int, channels: int) -> dict[str, Any]:
    """What a user of a model of images must know."""
    normalisation = Normalisation.of_channels(channels)
    return {
        "classes": list(classes),
        "image_size": image_size,
        "channels": channels,
        "mean": list(normalisation.mean),
        "std": list(normalisation.std),
    }


def federation_of(
    pairs: Sequence[tuple[Any, Any]], encoder: torch.nn.Module, num_classes: int, latent: int | None, seed: int
) -> Federation:
    """A federation of the caller's own (train, test) Datasets and encoder."""
    if not pairs:
        raise InputError("clients must hold at least one (train, test) pair, got none")
    clients = []
    for number, (train, test) in enumerate(pairs):
        for part, dataset in (("train", train), ("test", test)):
            if len(dataset) == 0:
                raise InputError(f"the {part} Dataset of client {number} is empty")
        data = (examples_of(dataset, num_classes) for dataset in (train, test))
        clients.append(Client(number, f"client-{number}", *data))
    example, _ = clients[0].test.batch(np.zeros(2, dtype=np.int64), torch.device("cpu"), torch.contiguous_format)
    task = module_task(encoder, example, num_classes, latent, seed)
    manifest = _hashed({"clients": [{"id": c.id, "domain": c.domain, "train": len(c.train or ())} for c in clients]})
    return Federation("own", tuple(clients), task, {"classes": [str(i) for i in range(num_classes)]}, manifest)


def pooled(federation: Federation) -> Federation:
    """The same with all training data at the first client; the others only evaluate."""
    everything = PooledExamples([client.train for client in federation.clients if client.train is not None])
    clients = [replace(client, train=everything if client.id == 0 else None) for client in federation.clients]
    return replace(federation, clients=tuple(clients))


def _examples(domains: Domains, share: Share, normalisation: Normalisation) -> Examples:
    parts = [ImageExamples(domains[name].train.take(rows), normalisation) for name, rows in share.rows.items()]
    return parts[0] if len(parts) == 1 else PooledExamples(parts)


def manifest_of(domains: Domains, shares: Sequence[Share]) -> dict[str, Any]:
    """Every client's samples by name, and a hash of it all: the same for the same data, settings and seed anywhere."""
    clients = []
    for number, share in enumerate(shares):
        ids = [domains[name].train.ids[i] for name, rows in share.rows.items() for i in rows]
        name = {"name": share.name} if share.name else {}
        clients.append({"id": number, **name, "domain": share.domain, "train": ids})
    manifest: dict[str, Any] = {
        "dataset": domains.name,
        "content": domains.content or "-".join(_content_hash(domain) for domain in domains),
        "clients": clients,
        "test": {domain.name: list(domain.test.ids) for domain in domains},
    }
    aside = {domain.name: list(domain.validation.ids) for domain in domains if domain.validation is not None}
    return _hashed({**manifest, "validation": aside} if aside else manifest)


def _unmatched(file: str, domains: Domains, held_out: str | None) -> list[str]:
    """What a file of owners leaves open."""
    owners = read_owners(Path(file))
    known = {
        name for d in domains for split in (d.train, d.test, d.validation) if split is not None for name in split.ids
    }
    notes = []
    if unknown := [name for name in owners if name not in known]:
        notes.append(f"paths in {file} that are not there or left out: {len(unknown)}, the first is {unknown[0]!r}")
    trained = {name for domain in domains if domain.name != held_out for name in domain.train.ids}
    if unowned := sorted(trained - owners.keys()):
        notes.append(f"training images in no row of {file}: {len(unowned)}, the first is {unowned[0]!r}")
    return notes


def _content_hash(domain: Domain) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for split in (domain.train, domain.test, *([domain.validation] if domain.validation is not None else [])):
        for start in range(0, len(split), 1024):  # a little at a time, since it may be large
            some = np.arange(start, min(start + 1024, len(split)))
            digest.update(np.ascontiguousarray(split.pixels(some)).data)
        digest.update(np.ascontiguousarray(split.labels).data)
    return digest.hexdigest()


def _hashed(manifest: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(manifest, sort_keys=True)
    return {**manifest, "hash": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}
