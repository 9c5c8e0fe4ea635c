"""The federation: the clients with their data, and the builder of their networks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from fedcir.config import BUILTIN_MODELS, Config
from fedcir.data.agreement import Agreement, DataSummary, agree, summarise_data
from fedcir.data.decoding import OnFile
from fedcir.data.domains import Domains, Split
from fedcir.data.encoding import TableEncoding, encode_domains, read_encoding
from fedcir.data.examples import ArrayExamples, Examples, ImageExamples, Normalisation, PooledExamples
from fedcir.data.features import DatasetFeatures, FeatureCache, FeatureExamples
from fedcir.data.manifest import build_manifest
from fedcir.data.opening import open_dataset, open_site
from fedcir.data.partition import (
    ClientPartition,
    LazySequence,
    Partition,
    limit_samples,
    partition_labels,
    read_owners,
)
from fedcir.data.splits import ImageHashes, hash_images_in_use
from fedcir.errors import InputError
from fedcir.machine import check_memory
from fedcir.models.builder import NetworkBuilder, make_array_builder, make_image_builder
from fedcir.models.networks import MIN_IMAGE_SIZE
from fedcir.tasks.classification import describe_task, read_task
from fedcir.tasks.task import Task
from fedcir.types import ClientReply, Groups

CACHED_CLIENTS = 256  # clients that stay in memory once they were accessed


class SampleCounts(NamedTuple):
    """Number of a client's images by purpose."""

    train: int
    test: int
    validation: int


@dataclass(frozen=True)
class Client:
    """A client's training data, and the test data of its domain. A client without training data only evaluates."""

    id: int
    domain: str
    train: Examples | None
    test: Examples | None  # None if it does not evaluate
    validation: Examples | None = None
    """Validation examples, on which the best round is selected; None if there are none."""
    tamper: Callable[[ClientReply, Groups, int], ClientReply] | None = None
    """Attack of an experiment: changes the reply, given the broadcast and the round."""

    @property
    def sizes(self) -> SampleCounts:
        return SampleCounts(len(self.train or ()), len(self.test or ()), len(self.validation or ()))


class LazyClients(LazySequence[Client]):
    """Clients that are built from their partition on access; the last ones are cached."""

    def __init__(self, partition: Partition, build: Callable[[int, ClientPartition], Client]) -> None:
        self.partition = partition
        self._build = lru_cache(CACHED_CLIENTS)(lambda number: build(number, partition[number]))

    def __len__(self) -> int:
        return len(self.partition)

    def compute_item(self, index: int) -> Client:
        return self._build(index)


class Roster(Protocol):
    """The clients and the builder of their networks as the server sees them, with or without access to their data."""

    @property
    def builder(self) -> NetworkBuilder: ...
    @property
    def card(self) -> dict[str, Any]: ...
    @property
    def manifest(self) -> dict[str, Any]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def trainers(self) -> Sequence[int]: ...
    @property
    def holders(self) -> int: ...  # clients with training data, also if it was pooled
    @property
    def absent(self) -> Sequence[int]: ...  # clients that partition.exclude leaves out
    @property
    def evaluators(self) -> dict[int, str]: ...
    @property
    def unseen(self) -> tuple[str, ...]: ...
    @property
    def sizes(self) -> dict[int, SampleCounts]: ...  # that remote clients announced, and their replies must repeat
    def images(self, client: int) -> int: ...  # training images
    def hash_images(self) -> ImageHashes | None: ...  # None if the server has no access to the images


@dataclass(frozen=True)
class SiteRoster:
    """Participants of a run across sites, from its manifest."""

    manifest: dict[str, Any]
    builder: NetworkBuilder
    card: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(client["id"] for client in self.manifest["clients"] if client["train"])

    @property
    def holders(self) -> int:
        return len(self.trainers)

    @property
    def absent(self) -> tuple[int, ...]:
        return ()

    @property
    def evaluators(self) -> dict[int, str]:
        first = {client["domain"]: client["id"] for client in reversed(self.manifest["clients"])}
        return {first[domain]: domain for domain in dict.fromkeys(c["domain"] for c in self.manifest["clients"])}

    @property
    def unseen(self) -> tuple[str, ...]:
        seen = {client["domain"] for client in self.manifest["clients"] if client["train"]}
        return tuple(domain for domain in self.evaluators.values() if domain not in seen)

    @property
    def sizes(self) -> dict[int, SampleCounts]:
        parts = SampleCounts._fields
        return {client["id"]: SampleCounts(*(client[part] for part in parts)) for client in self.manifest["clients"]}

    def images(self, client: int) -> int:
        return self.sizes[client].train

    def hash_images(self) -> None:
        """Return None: hashes of the sites' images would let a server confirm a guess."""


@dataclass(frozen=True)
class Federation:
    dataset: str
    clients: Sequence[Client]  # ordered by client number
    builder: NetworkBuilder
    card: dict[str, Any]  # metadata of the model file: classes, image size, normalisation
    manifest: dict[str, Any]
    notes: tuple[str, ...] = ()  # sentences about the data for the user
    unseen: tuple[str, ...] = ()  # domains without training data
    pooled: int = 0  # number of clients whose training data were pooled at the first client
    features: DatasetFeatures | None = None  # features of a frozen encoder, on which clients train instead of on images
    summary: DataSummary | None = None
    """What other sites have to know of the data, to agree on task and encoding; None if they have agreed already."""
    dataset_and_partition: tuple[Domains, Partition] | None = None
    """Source of the clients' data; None if the caller passed Datasets."""

    def load_features(self) -> None:
        """Compute the features that are missing in the cache, before processes are forked."""
        if self.features is not None:
            _ = self.features.loaded

    @property
    def holders(self) -> int:
        return self.pooled or len(self.trainers)

    @property
    def absent(self) -> Sequence[int]:
        return () if self.dataset_and_partition is None else self.dataset_and_partition[1].absent

    @cached_property
    def trainers(self) -> Sequence[int]:
        if isinstance(self.clients, LazyClients):
            trainers = np.flatnonzero(self.clients.partition.sizes)
            everyone = range(len(trainers))
            return everyone if np.array_equal(trainers, everyone) else trainers.tolist()
        return tuple(client.id for client in self.clients if client.train is not None)

    @property
    def evaluation_only(self) -> list[Client]:
        """Clients without training data that take part."""
        others = np.setdiff1d(np.arange(len(self.clients)), [*self.trainers, *self.absent])
        return [self.clients[number] for number in others.tolist()]

    @cached_property
    def evaluators(self) -> dict[int, str]:
        """One client per domain, the first that holds its test set."""
        if isinstance(self.clients, LazyClients):
            return {client: domain for domain, client in self.clients.partition.first_clients.items()}
        first: dict[str, int] = {}
        for client in self.clients:
            if client.test is not None:
                first.setdefault(client.domain, client.id)
        return {client: domain for domain, client in first.items()}

    def images(self, client: int) -> int:
        train = self.manifest["clients"][client]["train"]  # names, or their number if the caller passed Datasets
        return train if isinstance(train, int) else len(train)

    @property
    def sizes(self) -> dict[int, SampleCounts]:
        return {}

    def hash_images(self) -> ImageHashes | None:
        return None if self.dataset_and_partition is None else hash_images_in_use(*self.dataset_and_partition)


def partition_dataset(
    config: Config, on_file: OnFile | None = None, test_seed: int | None = None
) -> tuple[Domains, Partition]:
    """Open the configured dataset and partition it. `test_seed` draws the test images instead of the run's seed."""
    seed, held_out = config.run.seed, config.partition.hold_out
    domains = open_dataset(config.data, seed, on_file, test_seed=test_seed, task=config.task.name)
    if held_out in domains.names:  # no round is selected on it
        without = tuple(replace(d, validation=None) if d.name == held_out else d for d in domains)
        domains = replace(domains, domains=without)
    labels = {domain.name: domain.train.labels for domain in domains}
    groups = {domain.name: domain.train.groups for domain in domains if domain.train.groups is not None}
    ids = None if config.partition.file is None else {domain.name: domain.train.ids for domain in domains}
    partition = partition_labels(config.partition, labels, seed, ids, groups)
    if config.partition.file is not None:
        domains = replace(domains, notes=(*domains.notes, *_find_unmatched(config.partition.file, domains, held_out)))
    if partition.absent:  # a domain whose clients are all absent is not tested either
        present = tuple(domain for domain in domains if domain.name in partition.first_clients)
        domains = replace(domains, domains=present)
    return domains, partition


def open_federation(config: Config, on_file: OnFile | None = None) -> Federation:
    """Open the configured dataset, partition it and build its federation."""
    return build_federation(config, *partition_dataset(config, on_file), on_file)


def build_federation(
    config: Config,
    domains: Domains,
    clients: Sequence[ClientPartition],
    on_file: OnFile | None = None,
    agreed: Agreement | None = None,
) -> Federation:
    """Build the federation of a partitioned dataset.

    Features of a frozen encoder are computed when they are first needed; `on_file` receives their progress. The task
    and the encoding of tables are those that a run has `agreed` on, or fitted to the sums of these clients.
    """
    partition = Partition.from_clients(clients, domains.names)
    manifest = build_manifest(domains, partition)
    summary: DataSummary | None = None
    if agreed is None:
        shares = {name: part.rows.astype(np.int64) for name, part in partition.by_domain.items() if len(part.rows)}
        summary = summarise_data(config, domains, shares)
        agreed = agree({domains.name: summary}, config.data.scale)
    encoding = agreed.encoding
    domains = replace(domains, task=agreed.task)
    if encoding is not None:
        domains = encode_domains(domains, encoding)
    features, make_split = None, cast(Callable[[Split], Examples], ArrayExamples)
    if domains.has_images:
        height, _, channels = domains.image_shape
        _check_image_size(config, domains)
        if moved := {"flip", "crop"}.intersection(config.local.augment if domains.task.name == "segmentation" else ()):
            names = ",".join(sorted(moved))
            raise InputError(
                f"local.augment={names} would move pixels away from their masks: leave it out, or use colour"
            )
        normalisation = Normalisation.from_model(config.model, channels)
        builder = make_image_builder(config.model, domains.task, channels, config.run.seed, height)
        card = make_image_card(domains.task, height, channels, normalisation)
        make_split = partial(ImageExamples, normalisation=normalisation)
        if builder.frozen is not None:
            cache = FeatureCache(config.model, builder.frozen, normalisation, domains.image_shape, config.run.workers)
            features = DatasetFeatures(domains, cache, on_file)
            make_split = partial(FeatureExamples, features=features)
    else:
        check_array_settings(config, "tables" if encoding is not None else "arrays of floats")
        builder = make_array_builder(config.model, domains.task, domains.input_shape, config.run.seed)
        card = make_array_card(domains.task, domains.input_shape, encoding)
    shared = {
        domain.name: (make_split(domain.test), None if domain.validation is None else make_split(domain.validation))
        for domain in domains
    }

    def build_client(number: int, client: ClientPartition) -> Client:
        parts = [make_split(domains[name].train.take(rows)) for name, rows in client.rows.items()]
        train = PooledExamples(parts) if len(parts) > 1 else parts[0] if parts else None
        return Client(number, client.domain, train, *((None, None) if number in absent else shared[client.domain]))

    absent = set(partition.absent)
    trained = {name for name, part in partition.by_domain.items() if len(part.rows)}
    unseen = tuple(name for name in domains.names if name not in trained)  # such as a held-out one
    notes = list(domains.notes)
    model = config.model
    if (model.freeze or model.partial) and model.name in BUILTIN_MODELS and model.weights is None:
        share = "is" if model.freeze else "is partly"
        notes.append(f"{model.name} {share} frozen at random weights: set model.weights to those of a trained one")
    return Federation(
        domains.name,
        LazyClients(partition, build_client),
        builder,
        card,
        manifest,
        tuple(notes),
        unseen,
        features=features,
        summary=summary,
        dataset_and_partition=(domains, partition),
    )


def _check_image_size(config: Config, domains: Domains) -> None:
    height, width, channels = domains.image_shape
    if config.model.name == "cnn" and min(height, width) < MIN_IMAGE_SIZE:
        images = f"images of at least {MIN_IMAGE_SIZE} pixels, but {domains.name} has {height}x{width}"
        raise InputError(f"cnn needs {images}: use resnet18")
    pixels = config.local.batch_size * height * width * channels
    check_memory(3 * 4 * pixels, f"local.batch_size={config.local.batch_size} of {height}x{width} pixels")  # at least


def check_array_settings(config: Config, kind: str) -> None:
    """Refuse settings of images for tables and arrays of floats."""
    model = config.model
    for setting, is_set in (
        (f"local.augment={','.join(config.local.augment)}", bool(config.local.augment)),
        ("attack.kind=backdoor", config.attack.kind == "backdoor"),
        ("model.freeze=true", model.freeze),
        ("model.mean", model.mean is not None),
        (f"model.native_size={str(model.native_size).lower()}", model.native_size is not None),
    ):
        if is_set:
            raise InputError(f"{setting} is for images, and {config.data.name} holds {kind}: leave it out")


def make_image_card(task: Task, image_size: int, channels: int, normalisation: Normalisation) -> dict[str, Any]:
    """Describe the images that a model takes and what it predicts, for its file."""
    images = {**describe_task(task), "image_size": image_size, "channels": channels}
    return {**images, "mean": list(normalisation.mean), "std": list(normalisation.std)}


def make_array_card(task: Task, shape: Sequence[int], encoding: TableEncoding | None = None) -> dict[str, Any]:
    """Describe the inputs that a model takes, with the encoding of tables, and what it predicts, for its file."""
    table = {} if encoding is None else {"table": encoding.to_card()}
    return {**describe_task(task), "shape": list(shape), **table}


def build_roster(manifest: dict[str, Any], config: Config, notes: Iterable[str] = ()) -> SiteRoster:
    """Build the roster of a manifest, new or saved."""
    task, channels = read_task(manifest), manifest["channels"]
    if "shape" in manifest:
        encoding = read_encoding(manifest["table"]) if "table" in manifest else None
        array_builder = make_array_builder(config.model, task, manifest["shape"], config.run.seed)
        return SiteRoster(manifest, array_builder, make_array_card(task, manifest["shape"], encoding), tuple(notes))
    size, normalisation = manifest["image_size"], Normalisation.from_model(config.model, channels)
    builder = make_image_builder(config.model, task, channels, config.run.seed, size)
    return SiteRoster(manifest, builder, make_image_card(task, size, channels, normalisation), tuple(notes))


def open_site_federation(
    config: Config,
    root: Path,
    domain: str,
    classes: Sequence[str] = (),
    on_file: OnFile | None = None,
    agreed: Agreement | None = None,
) -> Federation:
    """Open a site's own data, as the only client of a federation with these classes."""
    task = config.task.name if agreed is None or agreed.task.has_classes else agreed.task
    domains = open_site(root, domain, config.data, config.run.seed, classes, on_file, task)
    train = domains.domains[0].train
    rows = {} if domain == config.partition.hold_out else {domain: np.arange(len(train))}
    share = limit_samples(
        ClientPartition(domain, rows), {domain: train.labels}, config.partition.max_samples, config.run.seed
    )
    return build_federation(config, domains, [share], on_file, agreed)


def pool_clients(federation: Federation) -> Federation:
    """Move all training data to the first client; the others only evaluate."""
    everything = PooledExamples([client.train for client in federation.clients if client.train is not None])
    clients = [replace(client, train=everything if client.id == 0 else None) for client in federation.clients]
    return replace(federation, clients=tuple(clients), pooled=federation.holders)


def _find_unmatched(file: str, domains: Domains, held_out: str | None) -> list[str]:
    """Describe paths of a partition file that match no image, and training images without a client."""
    owners = read_owners(Path(file))
    names = {name for domain in domains for split in domain.splits for name in split.ids}
    notes = []
    if unknown := [name for name in owners if name not in names]:
        notes.append(f"paths in {file} that name no image in use: {len(unknown)}, the first is {unknown[0]!r}")
    trained = {name for domain in domains if domain.name != held_out for name in domain.train.ids}
    if unowned := sorted(trained - owners.keys()):
        notes.append(f"training images that {file} gives to no client: {len(unowned)}, the first is {unowned[0]!r}")
    return notes
