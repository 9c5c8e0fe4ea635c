"""Who takes part: the clients with their data, and the task they share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fedcir.config import OWN_MODELS, Config, ModelConfig, check_memory
from fedcir.data.domains import Domains, Split
from fedcir.data.examples.datasets import examples_of
from fedcir.data.examples.features import DatasetFeatures, FeatureCache, FeatureExamples
from fedcir.data.examples.images import Examples, ImageExamples, Normalisation, PooledExamples
from fedcir.data.hashes import ImageHashes, image_hashes
from fedcir.data.opening import open_dataset
from fedcir.data.partition.manifest import hashed, manifest_of
from fedcir.data.partition.names import Made
from fedcir.data.partition.schemes import partition, read_owners
from fedcir.data.partition.shares import Share, Shares
from fedcir.data.pictures.decode import OnFile
from fedcir.models.cnn import SMALLEST
from fedcir.models.task import Task, check_features, image_task, module_task
from fedcir.types import ClientReply, Groups, InputError

Pairs = Mapping[str, tuple[Any, Any]] | Iterable[tuple[Any, Any]]
"""Clients of the caller: a (train, test) pair of Datasets each, either of which may be None, by name or one by one."""


KEPT = 256
"""Clients that stay made: most federations are smaller."""


class Sizes(NamedTuple):
    """How many images a client has, by what they are for."""

    train: int
    test: int
    validation: int


@dataclass(frozen=True)
class Client:
    """A client: its training data, and the test data of its domain. Without training data it only tests."""

    id: int
    domain: str
    train: Examples | None
    test: Examples | None
    """None if it does not test."""
    validation: Examples | None = None
    """What the best round is picked on, where images were set aside for it."""
    tamper: Callable[[ClientReply, Groups, int], ClientReply] | None = None
    """What a bad client of an experiment makes of its reply, from what it was sent, in a round."""

    @property
    def sizes(self) -> Sizes:
        return Sizes(len(self.train or ()), len(self.test or ()), len(self.validation or ()))


class Clients(Made[Client]):
    """Clients that are made of their shares when they are asked for; the last ones are kept for a while."""

    def __init__(self, shares: Shares, make: Callable[[int, Share], Client]) -> None:
        self.shares = shares
        self._made = lru_cache(KEPT)(lambda number: make(number, shares[number]))

    def __len__(self) -> int:
        return len(self.shares)

    def make(self, position: int) -> Client:
        return self._made(position)

    @property
    def trainers(self) -> Sequence[int]:
        found = np.flatnonzero(self.shares.sizes)
        every = range(len(found))
        return every if np.array_equal(found, every) else found.tolist()

    @property
    def evaluators(self) -> dict[int, str]:
        return {client: domain for domain, client in self.shares.firsts.items()}


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
    def trainers(self) -> Sequence[int]: ...

    @property
    def holders(self) -> int:
        """How many clients hold training data, or held some before it was pooled."""
        ...

    @property
    def evaluators(self) -> dict[int, str]: ...

    @property
    def unseen(self) -> tuple[str, ...]: ...

    def images(self, client: int) -> int:
        """How many images a client trains on."""
        ...

    @property
    def sizes(self) -> dict[int, Sizes]:
        """What each client has said it has, and its replies must tell; empty where clients are at hand themselves."""
        ...

    def hash_images(self) -> ImageHashes | None:
        """Hashes of the images to train and to choose on; None where the images are not at hand."""
        ...


@dataclass(frozen=True)
class Federation:
    dataset: str
    clients: Sequence[Client]
    """In the order of their numbers."""
    task: Task
    card: dict[str, Any]
    """What a user of the model must know: classes, size, normalisation. It goes into the model's file."""
    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()
    """What its user should know about the data."""
    unseen: tuple[str, ...] = ()
    """The domains that nobody trains on."""
    pooled: int = 0
    """How many clients' training data the first one holds, if they were pooled."""
    features: DatasetFeatures | None = None
    """Features of a frozen encoder, which clients train on in place of images."""
    dataset_and_shares: tuple[Domains, Shares] | None = None
    """What the clients' data were made from; None where a caller brings Datasets."""

    def load_features(self) -> None:
        """Compute the features of a frozen encoder that are not in the cache, before processes are forked."""
        if self.features is not None:
            _ = self.features.loaded

    @property
    def holders(self) -> int:
        return self.pooled or len(self.trainers)

    @cached_property
    def trainers(self) -> Sequence[int]:
        if isinstance(self.clients, Clients):
            return self.clients.trainers
        return tuple(client.id for client in self.clients if client.train is not None)

    @property
    def watchers(self) -> list[Client]:
        """Those that only test."""
        return [self.clients[n] for n in np.setdiff1d(np.arange(len(self.clients)), self.trainers).tolist()]

    @cached_property
    def evaluators(self) -> dict[int, str]:
        """One client a domain, the first that holds its test set."""
        if isinstance(self.clients, Clients):
            return self.clients.evaluators
        first: dict[str, int] = {}
        for client in self.clients:
            if client.test is not None:
                first.setdefault(client.domain, client.id)
        return {client: domain for domain, client in first.items()}

    def images(self, client: int) -> int:
        held = self.manifest["clients"][client]["train"]  # names, or their number where a caller brings Datasets
        return held if isinstance(held, int) else len(held)

    @property
    def sizes(self) -> dict[int, Sizes]:
        return {}

    def hash_images(self) -> ImageHashes | None:
        return None if self.dataset_and_shares is None else image_hashes(*self.dataset_and_shares)


def deal(config: Config, on_file: OnFile | None = None, test_seed: int | None = None) -> tuple[Domains, Shares]:
    """The configured dataset, and who holds what of it. `test_seed` draws the test images instead of the run's seed."""
    seed = config.run.seed
    domains = open_dataset(config.data, seed, on_file, test_seed=test_seed)
    held_out = config.partition.hold_out
    if held_out in domains.names:  # nothing is picked on it
        kept = tuple(replace(d, validation=None) if d.name == held_out else d for d in domains)
        domains = replace(domains, domains=kept)
    ids = {domain.name: domain.train.ids for domain in domains}
    labels = {domain.name: domain.train.labels for domain in domains}
    groups = {domain.name: domain.train.groups for domain in domains if domain.train.groups is not None}
    shares = partition(config.partition, labels, seed, ids, groups)
    if config.partition.file is not None:
        domains = replace(domains, notes=(*domains.notes, *_unmatched(config.partition.file, domains, held_out)))
    return domains, shares


def open_federation(config: Config, on_file: OnFile | None = None) -> Federation:
    """Open the configured dataset and deal it out."""
    return federation_from(config, *deal(config, on_file), on_file)


def federation_from(
    config: Config, domains: Domains, shares: Sequence[Share], on_file: OnFile | None = None
) -> Federation:
    """Make the federation of a dataset that is dealt out already.

    Features of a frozen encoder are computed when they are first needed; `on_file` shows their progress.
    """
    height, width, channels = domains.image_shape
    if config.model.name == "cnn" and min(height, width) < SMALLEST:
        raise InputError(
            f"cnn needs images of at least {SMALLEST} pixels, but {domains.name} has {height}x{width}: use resnet18"
        )
    pixels = config.local.batch_size * height * width * channels
    check_memory(3 * 4 * pixels, f"local.batch_size={config.local.batch_size} of {height}x{width} pixels")  # at least
    normalisation = Normalisation.of(config.model, channels)
    task = image_task(config.model, len(domains.classes), channels, config.run.seed, height)
    examples: Callable[[Split], Examples] = partial(ImageExamples, normalisation=normalisation)
    features = None
    if task.frozen is not None:
        cache = FeatureCache(config.model, task.frozen, normalisation, domains.image_shape, config.run.workers)
        features = DatasetFeatures(domains, cache, on_file)
        examples = partial(FeatureExamples, features=features)
    shared = {
        domain.name: (examples(domain.test), None if domain.validation is None else examples(domain.validation))
        for domain in domains
    }

    def client(number: int, share: Share) -> Client:
        train = _examples(domains, share, examples) if share.rows else None
        return Client(number, share.domain, train, *shared[share.domain])

    dealt = Shares.of(shares, domains.names)
    card = image_card(domains.classes, height, channels, normalisation)
    manifest, unseen = manifest_of(domains, dealt), unseen_of(domains, dealt)
    notes = (*domains.notes, *_notes_on_model(config.model))
    made_from = (domains, dealt)
    clients = Clients(dealt, client)
    return Federation(
        domains.name, clients, task, card, manifest, notes, unseen, features=features, dataset_and_shares=made_from
    )


def _notes_on_model(model: ModelConfig) -> list[str]:
    if model.freeze and model.name in OWN_MODELS and model.weights is None:
        return [f"{model.name} is frozen at random weights: set model.weights to those of a trained one"]
    return []


def unseen_of(domains: Domains, shares: Sequence[Share]) -> tuple[str, ...]:
    """The domains that nobody trains on, such as a held-out one."""
    held = Shares.of(shares, domains.names).held
    return tuple(name for name in domains.names if name not in held or not len(held[name].rows))


def image_card(classes: Sequence[str], image_size: int, channels: int, normalisation: Normalisation) -> dict[str, Any]:
    """What a user of a model of images must know."""
    return {
        "classes": list(classes),
        "image_size": image_size,
        "channels": channels,
        "mean": list(normalisation.mean),
        "std": list(normalisation.std),
    }


def federation_of(
    pairs: Pairs, encoder: torch.nn.Module, num_classes: int, latent: int | None, seed: int
) -> Federation:
    """A federation of the caller's own (train, test) Datasets and encoder."""
    named = _named(pairs)
    clients = [_own_client(number, name, named[name], num_classes) for number, name in enumerate(named)]
    if all(client.train is None for client in clients):
        raise InputError("clients must hold at least one (train, test) pair with a train Dataset, got none")
    (first, example), *others = _first_batches(clients).items()
    task = module_task(encoder, example, num_classes, latent, seed, first)
    for whose, other in others:
        check_features(task, other, whose)
    manifest = hashed({"clients": [{"id": c.id, "domain": c.domain, "train": len(c.train or ())} for c in clients]})
    card = {"classes": [str(i) for i in range(num_classes)]}
    unseen = tuple(client.domain for client in clients if client.train is None)
    return Federation("own", tuple(clients), task, card, manifest, unseen=unseen)


def pooled(federation: Federation) -> Federation:
    """The same with all training data at the first client; the others only evaluate."""
    everything = PooledExamples([client.train for client in federation.clients if client.train is not None])
    clients = [replace(client, train=everything if client.id == 0 else None) for client in federation.clients]
    return replace(federation, clients=tuple(clients), pooled=federation.holders)


def _examples(domains: Domains, share: Share, examples: Callable[[Split], Examples]) -> Examples:
    parts = [examples(domains[name].train.take(rows)) for name, rows in share.rows.items()]
    return parts[0] if len(parts) == 1 else PooledExamples(parts)


def _named(pairs: Pairs) -> dict[str, Any]:
    """Clients by name: those of a list are numbered."""
    if isinstance(pairs, Mapping):
        if (wrong := next((name for name in pairs if not isinstance(name, str) or not name), None)) is not None:
            raise InputError(f"clients must be named by strings, got {wrong!r}")
        return dict(pairs)
    if not isinstance(pairs, Iterable):
        raise InputError(
            f"clients must be a list of (train, test) pairs, or a dict of them by name, got {type(pairs).__name__}"
        )
    return {f"client-{number}": pair for number, pair in enumerate(pairs)}


def _own_client(number: int, name: str, pair: Any, num_classes: int) -> Client:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        what = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InputError(
            f"client {name!r} is of type {what}: give (train, test), or (train, None) if there is no test set"
        )
    train, test = (
        None if dataset is None else examples_of(dataset, num_classes, f"the {part} Dataset of {name!r}")
        for part, dataset in zip(("train", "test"), pair, strict=True)
    )
    if train is None and test is None:
        raise InputError(f"client {name!r} has neither a train nor a test Dataset: leave it out")
    return Client(number, name, train, test)


def _first_batches(clients: Sequence[Client]) -> dict[str, torch.Tensor]:
    """Two inputs of each shape and type that there is, by what gives them: the first of each Dataset is looked at."""
    found: dict[tuple[torch.Size, torch.dtype], tuple[str, torch.Tensor]] = {}
    for client in clients:
        for part, examples in (("train", client.train), ("test", client.test)):
            if examples is not None:
                x, _ = examples.batch(np.zeros(1, dtype=np.int64), torch.device("cpu"), torch.contiguous_format)
                found.setdefault((x.shape, x.dtype), (f"the {part} Dataset of {client.domain!r}", x[[0, 0]]))
    return dict(found.values())


def _unmatched(file: str, domains: Domains, held_out: str | None) -> list[str]:
    """Notes on paths that match no image, and on images that no client gets."""
    owners = read_owners(Path(file))
    known = {
        name for d in domains for split in (d.train, d.test, d.validation) if split is not None for name in split.ids
    }
    notes = []
    if unknown := [name for name in owners if name not in known]:
        notes.append(f"paths in {file} that name no image in use: {len(unknown)}, the first is {unknown[0]!r}")
    trained = {name for domain in domains if domain.name != held_out for name in domain.train.ids}
    if unowned := sorted(trained - owners.keys()):
        notes.append(f"training images that {file} gives to no client: {len(unowned)}, the first is {unowned[0]!r}")
    return notes
