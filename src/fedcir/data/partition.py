"""A partition of training samples: which rows of each domain every client holds."""

import heapq
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from fedcir.config import PartitionConfig
from fedcir.data.domains import Indices, Labels, rows_by_group, stratified_sample
from fedcir.data.sources.table import read_rows
from fedcir.errors import InputError, suggest_name
from fedcir.rng import numpy_rng

Item_co = TypeVar("Item_co", covariant=True)
Owners = NDArray[np.int32]  # client number of each row of a domain


class LazySequence(Sequence[Item_co]):
    """Sequence whose items are computed on access, so that 100,000 clients take little memory."""

    @abstractmethod
    def compute_item(self, index: int) -> Item_co:
        """Return the item at an index from 0 to the length."""

    @overload
    def __getitem__(self, index: int) -> Item_co: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item_co]: ...

    def __getitem__(self, index: int | slice) -> Item_co | list[Item_co]:
        numbers = range(len(self))[index]  # handles negative indices, and raises IndexError
        return self.compute_item(numbers) if isinstance(numbers, int) else [self.compute_item(n) for n in numbers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class ClientPartition:
    """A client's training rows by domain, and the domain whose test set it holds. Without rows it only evaluates."""

    domain: str
    rows: Mapping[str, Indices]
    name: str = ""  # name of the client in a partition file

    def counts(self, labels: Mapping[str, Labels], classes: int) -> NDArray[np.int64]:
        """Count the client's samples of each class."""
        parts = [labels[domain][rows] for domain, rows in self.rows.items()]
        return np.bincount(np.concatenate([np.empty(0, np.int64), *parts]), minlength=classes)


class DomainRows(NamedTuple):
    """Rows of one domain, sorted by client, and the end of each client's rows."""

    rows: NDArray[np.int32]
    ends: Indices

    @property
    def sizes(self) -> Indices:
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True, eq=False)
class Partition(LazySequence[ClientPartition]):
    """The rows of all clients in a few flat arrays: about four bytes per sample."""

    domains: tuple[str, ...]
    homes: NDArray[np.int32]  # number of the domain whose test set each client holds
    by_domain: Mapping[str, DomainRows]
    names: Sequence[str] = ()  # names of the clients in a partition file; empty without one
    absent: tuple[int, ...] = ()  # clients that take no part: they hold no rows and test nothing

    def __len__(self) -> int:
        return len(self.homes)

    def compute_item(self, index: int) -> ClientPartition:
        rows = {}
        for domain, part in self.by_domain.items():
            start, end = part.ends.item(index - 1) if index else 0, part.ends.item(index)
            if start < end:
                rows[domain] = part.rows[start:end].astype(np.int64)
        return ClientPartition(self.domains[self.homes.item(index)], rows, self.names[index] if self.names else "")

    @cached_property
    def sizes(self) -> Indices:
        """Number of training samples of each client."""
        return sum((part.sizes for part in self.by_domain.values()), np.zeros(len(self), dtype=np.int64))

    @property
    def first_clients(self) -> dict[str, int]:
        """The first client of each domain that has one."""
        present = np.setdiff1d(np.arange(len(self)), self.absent)
        homes, first = np.unique(self.homes[present], return_index=True)
        return {self.domains[home]: int(client) for home, client in zip(homes, present[first], strict=True)}

    def find_site(self, site: str) -> list[int]:
        """Find the clients of a site: of a name in a partition file, of a whole domain, or of a number."""
        if site in self.names:
            clients = [self.names.index(site)]
        elif site in self.domains:
            clients = np.flatnonzero(self.homes == self.domains.index(site)).tolist()
            rows = {domain: int(part.sizes[clients].sum()) for domain, part in self.by_domain.items()}
            if any(rows[name] != (len(part.rows) if name == site else 0) for name, part in self.by_domain.items()):
                raise InputError(f"images of domain {site!r} lie at clients with others: name clients by their number")
        elif site.isdecimal() and int(site) < len(self):
            clients = [int(site)]
        else:
            names = suggest_name(site, [*self.domains, *filter(None, self.names)])
            raise InputError(f"there is no site {site!r}; {names}, or give a client's number below {len(self)}")
        if not self.sizes[clients].any():
            raise InputError(f"site {site!r} holds no training images, so it takes no part already")
        return clients

    def exclude(self, sites: Iterable[str]) -> "Partition":
        """Empty the clients of these sites. The others keep their numbers, from which their seeds come.

        A domain that other clients train on, but none has for a home, gets a client at the end that only evaluates.
        """
        absent = sorted({client for site in sites for client in self.find_site(site)})
        is_absent = np.isin(np.arange(len(self)), absent)
        if not self.sizes[~is_absent].any():
            raise InputError("no other site has training images: leave one in")
        by_domain = {}
        for domain, (rows, ends) in self.by_domain.items():
            sizes = np.diff(ends, prepend=0)
            remaining = rows[~np.repeat(is_absent, sizes)]
            if len(remaining):
                by_domain[domain] = DomainRows(remaining, np.cumsum(np.where(is_absent, 0, sizes)))
        partition = replace(self, by_domain=by_domain, absent=tuple(sorted({*self.absent, *absent})))
        return partition.add_evaluators([name for name in by_domain if name not in partition.first_clients])

    @classmethod
    def from_clients(cls, clients: Iterable[ClientPartition], domains: Sequence[str]) -> "Partition":
        """Collect clients one by one, each with its rows in this order of domains."""
        if isinstance(clients, cls):
            return clients
        clients, by_domain = list(clients), {}
        for domain in domains:
            parts = [client.rows.get(domain, np.empty(0, dtype=np.int64)) for client in clients]
            ends = np.cumsum([len(part) for part in parts])
            by_domain[domain] = DomainRows(np.concatenate(parts).astype(np.int32), ends)
        names = [client.name for client in clients] if any(client.name for client in clients) else ()
        return cls(tuple(domains), _number_domains([client.domain for client in clients], domains), by_domain, names)

    @classmethod
    def from_owners(cls, owners: Mapping[str, Owners], homes: Sequence[str]) -> "Partition":
        """Build a partition from the client of each row, and the domain of each client."""
        by_domain = {
            domain: DomainRows(
                np.argsort(owner, kind="stable").astype(np.int32), np.cumsum(np.bincount(owner, minlength=len(homes)))
            )
            for domain, owner in owners.items()
        }
        return cls(tuple(owners), _number_domains(homes, tuple(owners)), by_domain)

    def add_evaluators(self, domains: Sequence[str]) -> "Partition":
        """Append a client without training rows for each of these domains."""
        all_domains = tuple(dict.fromkeys((*self.domains, *domains)))
        homes = np.concatenate([self.homes, _number_domains(domains, all_domains)])
        by_domain = {
            domain: DomainRows(rows, np.concatenate([ends, np.full(len(domains), len(rows))]))
            for domain, (rows, ends) in self.by_domain.items()
        }
        names = (*self.names, *("" for _ in domains)) if self.names else ()
        return replace(self, domains=all_domains, homes=homes, by_domain=by_domain, names=names)


def _number_domains(names: Sequence[str], order: Sequence[str]) -> NDArray[np.int32]:
    number = {name: i for i, name in enumerate(order)}
    return np.array([number[name] for name in names], dtype=np.int32)


SampleGroups = Mapping[str, Indices]  # group of each sample, by domain, for the domains whose samples come in groups


def partition_labels(
    config: PartitionConfig,
    labels: Mapping[str, Labels],
    seed: int,
    ids: Mapping[str, Sequence[str]] | None = None,
    groups: SampleGroups = MappingProxyType({}),
) -> Partition:
    """Partition the samples by the configured scheme.

    Domains without a client, such as a held-out one, get a client at the end that only evaluates. `ids` are the names
    of the samples, which a partition file needs. A group goes to one client as a whole, unless a file divides it.
    """
    held_out = config.hold_out
    if held_out is not None and held_out not in labels:
        raise InputError(f"partition.hold_out: there is no domain {held_out!r}; choose from {', '.join(labels)}")
    train = {name: values for name, values in labels.items() if name != held_out}
    if not train:
        raise InputError(f"partition.hold_out: {held_out!r} is the only domain, so nothing is left to train on")
    if config.file is not None:
        assert ids is not None
        path, unused = Path(config.file), set(ids.get(held_out or "", ()))
        owners = {name: owner for name, owner in read_owners(path).items() if name not in unused}
        partition = partition_by_file(owners, {name: ids[name] for name in train}, path)
    else:
        partition = _apply_scheme(config, train, seed, groups)
    if config.max_samples is not None:
        clients = [limit_samples(client, labels, config.max_samples, seed) for client in partition]
        partition = Partition.from_clients(clients, list(labels))
    if len(small := np.flatnonzero(partition.sizes < config.min_samples)):
        number = int(small[0])
        raise InputError(
            f"client {partition[number].name or number} would hold {partition.sizes[number]} images, "
            f"below partition.min_samples={config.min_samples}: "
            + (f"give it more rows in {config.file}" if config.file else "lower partition.clients")
        )
    with_client = partition.first_clients
    partition = partition.add_evaluators([name for name in labels if name not in with_client])
    return partition.exclude(config.exclude) if config.exclude else partition


def limit_samples(
    client: ClientPartition, labels: Mapping[str, Labels], limit: int | None, seed: int
) -> ClientPartition:
    """Keep at most `limit` samples of a client, a seeded sample stratified by domain and class."""
    if limit is None or sum(map(len, client.rows.values())) <= limit:
        return client
    strata = [position * 10**6 + labels[name][rows] for position, (name, rows) in enumerate(client.rows.items())]
    rng = numpy_rng(seed, "max_samples", client.domain)
    sample = stratified_sample(np.concatenate(strata), limit, rng)
    ends = np.cumsum([0, *map(len, client.rows.values())])
    rows = {
        name: owned_rows[sample[(sample >= start) & (sample < end)] - start]
        for (name, owned_rows), (start, end) in zip(client.rows.items(), pairwise(ends), strict=True)
    }
    return replace(client, rows={name: owned_rows for name, owned_rows in rows.items() if len(owned_rows)})


def _apply_scheme(config: PartitionConfig, labels: Mapping[str, Labels], seed: int, groups: SampleGroups) -> Partition:
    """Divide samples, or groups like samples with the class of their first one, so that no client holds part of one."""
    clients = len(labels) if config.clients is None else config.clients
    if clients < len(labels):
        raise InputError(f"partition.clients must be at least the number of domains, {len(labels)}, got {clients}")
    if config.scheme not in ("dirichlet", "iid"):
        if clients != len(labels):
            fix = "use partition.scheme=dirichlet to split a domain between clients"
            raise InputError(f"partition.clients is {clients} for {len(labels)} domains: {fix}")
        whole = [ClientPartition(name, {name: np.arange(len(values))}) for name, values in labels.items()]
        return Partition.from_clients(whole, list(labels))
    rows_of = {
        name: rows_by_group(groups[name]) if name in groups else np.split(np.arange(len(values)), len(values))
        for name, values in (labels.items() if groups else ())
    }
    units = {name: labels[name][[rows[0] for rows in members_of]] for name, members_of in rows_of.items()} or labels
    if config.scheme == "iid":
        partition = partition_iid(units, clients, seed)
    else:
        unit = "groups of training images" if groups else "training images"
        partition = partition_dirichlet(units, clients, config.beta, config.min_samples, seed, unit)
    if not groups:
        return partition
    merged = []
    for client in partition:
        rows = {name: np.sort(np.concatenate([rows_of[name][g] for g in owned])) for name, owned in client.rows.items()}
        merged.append(replace(client, rows=rows))
    return Partition.from_clients(merged, list(labels))


def partition_dirichlet(
    labels: Mapping[str, Labels], clients: int, beta: float, min_samples: int, seed: int, unit: str = "training images"
) -> Partition:
    """Divide each domain among its clients, every class in proportions drawn from Dirichlet(beta)."""
    owners: dict[str, Owners] = {}
    homes: list[str] = []
    for position, (name, values) in enumerate(labels.items()):
        count = clients // len(labels) + (position < clients % len(labels))
        if len(values) < count * min_samples:
            few = f"has {len(values)} {unit}, too few for {count} clients with at least {min_samples} each"
            raise InputError(f"domain {name!r} {few}: lower partition.clients or partition.min_samples")
        rng = numpy_rng(seed, "partition", name)
        owner, order = np.empty(len(values), dtype=np.int32), []
        for label in np.unique(values):
            rows = rng.permutation(np.flatnonzero(values == label))
            cuts = np.round(np.cumsum(rng.dirichlet(np.full(count, beta)))[:-1] * len(rows)).astype(int)
            owner[rows] = np.repeat(np.arange(count), np.diff(cuts, prepend=0, append=len(rows)))
            order.append(rows)
        owners[name] = len(homes) + _move_to_small_clients(owner, np.concatenate(order), count, min_samples, rng)
        homes += [name] * count
    return Partition.from_owners(owners, homes)


def partition_iid(labels: Mapping[str, Labels], clients: int, seed: int) -> Partition:
    """Mix all domains and divide them evenly, as a control without feature shift; test sets rotate over clients."""
    sizes = [len(values) for values in labels.values()]
    order = numpy_rng(seed, "partition", "iid").permutation(sum(sizes))
    owner = np.empty(len(order), dtype=np.int32)
    least, remainder = divmod(len(order), clients)  # the first clients hold one sample more
    owner[order] = np.repeat(np.arange(clients), least + (np.arange(clients) < remainder))
    owners = dict(zip(labels, np.split(owner, np.cumsum(sizes)[:-1]), strict=True))
    names = list(labels)
    return Partition.from_owners(owners, [names[client % len(names)] for client in range(clients)])


def partition_by_file(owners: Mapping[str, str], ids: Mapping[str, Sequence[str]], path: Path) -> Partition:
    """Build a client per owner, in the order of their first rows. Its domain is the one that it holds most of."""
    rows_of: dict[str, dict[str, list[int]]] = {owner: {} for owner in owners.values()}
    for domain, names in ids.items():
        for row, name in enumerate(names):
            if name in owners:
                rows_of[owners[name]].setdefault(domain, []).append(row)
    clients = []
    for owner, rows in rows_of.items():
        if not rows:
            listed = next(name for name, other in owners.items() if other == owner)
            example = next(name for names in ids.values() for name in names)
            paths = f"{listed!r} is not one, they have paths like {example!r}"
            raise InputError(f"partition.file: {path} gives client {owner!r} no training image: {paths}")
        home = max(rows, key=lambda domain: len(rows[domain]))
        clients.append(ClientPartition(home, {domain: np.array(own) for domain, own in rows.items()}, owner))
    return Partition.from_clients(clients, list(ids))


def read_owners(path: Path) -> dict[str, str]:
    """Read the client of each path from a CSV file with the columns path and client."""
    owners: dict[str, str] = {}
    for _, row in read_rows(path, ("path", "client")):
        if owners.setdefault(row["path"], row["client"]) != row["client"]:
            owner = owners[row["path"]]
            raise InputError(f"partition.file: {path} gives {row['path']!r} to {owner!r} and to {row['client']!r}")
    return owners


def _move_to_small_clients(
    owner: Owners, order: Indices, count: int, min_samples: int, rng: np.random.Generator
) -> Owners:
    """Move single rows from the largest client to the smallest until each holds `min_samples`.

    `order` is the order in which rows were assigned.
    """
    sizes = np.bincount(owner, minlength=count)
    if sizes.min() >= min_samples:
        return owner
    by_client = order[np.argsort(owner[order], kind="stable")]
    ends = np.cumsum(sizes)
    small = [(size, client) for client, size in enumerate(sizes.tolist()) if size < min_samples]
    large = [(-size, client) for client, size in enumerate(sizes.tolist()) if size > min_samples]
    heapq.heapify(small)
    heapq.heapify(large)
    remaining: dict[int, list[int]] = {}  # rows of clients that gave some away
    while small:  # and so some client holds more than the minimum
        (size, receiver), (negative_size, giver) = small[0], large[0]
        if giver not in remaining:
            remaining[giver] = by_client[ends[giver] + negative_size : ends[giver]].tolist()
        owner[remaining[giver].pop(int(rng.integers(-negative_size)))] = receiver
        heapq.heapreplace(large, (negative_size + 1, giver))
        if size + 1 < min_samples:
            heapq.heapreplace(small, (size + 1, receiver))
        else:
            heapq.heappop(small)
    return owner
