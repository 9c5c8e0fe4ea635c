"""Who holds what: pure functions from labels to the rows of each client."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fedcir.config import PartitionConfig
from fedcir.config.reading import TABLE, read_text
from fedcir.config.spreadsheet import plain_cell
from fedcir.data.domains import Indices, Labels, rows_by_group, stratified_sample
from fedcir.rng import numpy_rng
from fedcir.types import InputError


@dataclass(frozen=True)
class Share:
    """A client's training rows by domain, and the domain whose test set it holds. No rows: it only evaluates."""

    domain: str
    rows: Mapping[str, Indices]
    name: str = ""
    """What its owner calls it, where a file says who holds what."""

    def counts(self, labels: Mapping[str, Labels], classes: int) -> NDArray[np.int64]:
        """How many samples of each class it holds."""
        held = [labels[domain][rows] for domain, rows in self.rows.items()]
        return np.bincount(np.concatenate([np.empty(0, np.int64), *held]), minlength=classes)


Groups = Mapping[str, Indices]
"""The group of each sample, by domain, for the domains whose samples come in groups."""


def partition(
    config: PartitionConfig,
    labels: Mapping[str, Labels],
    seed: int,
    ids: Mapping[str, Sequence[str]] | None = None,
    groups: Groups = MappingProxyType({}),
) -> list[Share]:
    """The shares of a configured scheme, in the order of client numbers.

    Domains that no client stands for, such as a held-out one, come last. `ids` name the samples, as a file needs. All
    samples of one of the `groups` go to one client, unless a file says otherwise.
    """
    held_out = config.hold_out
    if held_out is not None and held_out not in labels:
        raise InputError(f"partition.hold_out: there is no domain {held_out!r}; choose from {', '.join(labels)}")
    kept = {name: values for name, values in labels.items() if name != held_out}
    if not kept:
        raise InputError(f"partition.hold_out: {held_out!r} is the only domain, so nothing is left to train on")
    shares = [capped(share, labels, config.max_samples, seed) for share in _shares(config, kept, seed, ids, groups)]
    for number, share in enumerate(shares):
        size = sum(len(rows) for rows in share.rows.values())
        if size < config.min_samples:
            raise InputError(
                f"client {share.name or number} would hold {size} images, "
                f"below partition.min_samples={config.min_samples}: "
                + (f"give it more rows in {config.file}" if config.file else "lower partition.clients")
            )
    spoken_for = {share.domain for share in shares}
    return [*shares, *(Share(name, {}) for name in labels if name not in spoken_for)]


def capped(share: Share, labels: Mapping[str, Labels], most: int | None, seed: int) -> Share:
    """A client's share with at most so many samples: a seeded sample that keeps the shares of domains and classes."""
    if most is None or sum(map(len, share.rows.values())) <= most:
        return share
    strata = [position * 10**6 + labels[name][rows] for position, (name, rows) in enumerate(share.rows.items())]
    rng = numpy_rng(seed, "max_samples", share.domain)
    kept = stratified_sample(np.concatenate(strata), most, rng)
    ends = np.cumsum([0, *map(len, share.rows.values())])
    rows = {
        name: held[kept[(kept >= start) & (kept < end)] - start]
        for (name, held), start, end in zip(share.rows.items(), ends[:-1], ends[1:], strict=True)
    }
    return replace(share, rows={name: some for name, some in rows.items() if len(some)})


def _shares(
    config: PartitionConfig,
    labels: Mapping[str, Labels],
    seed: int,
    ids: Mapping[str, Sequence[str]] | None,
    groups: Groups,
) -> list[Share]:
    if config.file is not None:
        assert ids is not None
        path = Path(config.file)
        owners = read_owners(path)
        aside = set(ids.get(config.hold_out or "", ()))
        return by_owner({name: o for name, o in owners.items() if name not in aside}, {n: ids[n] for n in labels}, path)
    clients = len(labels) if config.clients is None else config.clients
    if clients < len(labels):
        raise InputError(f"partition.clients must be at least the number of domains, {len(labels)}, got {clients}")
    if config.scheme == "dirichlet":
        what = "groups of training images" if groups else "training images"
        return _whole_groups(
            labels,
            groups,
            lambda given: dirichlet_within_domain(given, clients, config.beta, config.min_samples, seed, what),
        )
    if config.scheme == "iid":
        return _whole_groups(labels, groups, lambda given: iid(given, clients, seed))
    if clients != len(labels):
        raise InputError(
            f"partition.clients is {clients} for {len(labels)} domains: "
            "use partition.scheme=dirichlet to split a domain between clients"
        )
    return by_domain(labels)


def _whole_groups(
    labels: Mapping[str, Labels], groups: Groups, divide: Callable[[Mapping[str, Labels]], list[Share]]
) -> list[Share]:
    """Shares that hold a group whole or not at all: it is dealt out like one sample, of the class of its first."""
    if not groups:
        return divide(labels)
    together = {name: _rows_together(groups.get(name), len(values)) for name, values in labels.items()}
    shares = divide({name: labels[name][[rows[0] for rows in together[name]]] for name in labels})
    return [
        replace(share, rows={name: _rows_in([together[name][k] for k in held]) for name, held in share.rows.items()})
        for share in shares
    ]


def _rows_in(groups: Sequence[Indices]) -> Indices:
    return np.sort(np.concatenate(groups))


def _rows_together(groups: Indices | None, count: int) -> list[Indices]:
    return np.split(np.arange(count), count) if groups is None else rows_by_group(groups)


def by_domain(labels: Mapping[str, Labels]) -> list[Share]:
    """One client a domain, which holds all of it."""
    return [Share(name, {name: np.arange(len(values))}) for name, values in labels.items()]


def dirichlet_within_domain(
    labels: Mapping[str, Labels], clients: int, beta: float, min_samples: int, seed: int, what: str = "training images"
) -> list[Share]:
    """Each domain is spread over its clients, every class in proportions drawn from Dirichlet(beta)."""
    shares = []
    for position, (name, values) in enumerate(labels.items()):
        count = clients // len(labels) + (position < clients % len(labels))
        if len(values) < count * min_samples:
            raise InputError(
                f"domain {name!r} has {len(values)} {what}, too few for {count} clients "
                f"with at least {min_samples} each: lower partition.clients or partition.min_samples"
            )
        rng = numpy_rng(seed, "partition", name)
        parts: list[list[Indices]] = [[] for _ in range(count)]
        for label in np.unique(values):
            rows = rng.permutation(np.flatnonzero(values == label))
            cuts = np.round(np.cumsum(rng.dirichlet(np.full(count, beta)))[:-1] * len(rows)).astype(int)
            for part, piece in zip(parts, np.split(rows, cuts), strict=True):
                part.append(piece)
        held = _top_up([np.concatenate(part) for part in parts], min_samples, rng)
        shares += [Share(name, {name: np.sort(rows)}) for rows in held]
    return shares


def iid(labels: Mapping[str, Labels], clients: int, seed: int) -> list[Share]:
    """All domains mixed and spread evenly: the control without any shift. Test sets go round the clients."""
    owners = np.concatenate([np.full(len(values), i) for i, values in enumerate(labels.values())])
    rows = np.concatenate([np.arange(len(values)) for values in labels.values()])
    names = list(labels)
    order = numpy_rng(seed, "partition", "iid").permutation(len(rows))
    shares = []
    for client, piece in enumerate(np.array_split(order, clients)):
        held = {name: np.sort(rows[piece[owners[piece] == i]]) for i, name in enumerate(names)}
        shares.append(Share(names[client % len(names)], {name: part for name, part in held.items() if len(part)}))
    return shares


def by_owner(owners: Mapping[str, str], ids: Mapping[str, Sequence[str]], path: Path) -> list[Share]:
    """A client for each owner, in the order of their first mention. It stands for the domain it holds most of."""
    held: dict[str, dict[str, list[int]]] = {owner: {} for owner in owners.values()}
    for domain, names in ids.items():
        for row, name in enumerate(names):
            if name in owners:
                held[owners[name]].setdefault(domain, []).append(row)
    shares = []
    for owner, rows in held.items():
        if not rows:
            mine = next(name for name, other in owners.items() if other == owner)
            there = next(name for names in ids.values() for name in names)
            raise InputError(
                f"partition.file: {path} gives client {owner!r} no training image: {mine!r} is not one, "
                f"they have paths like {there!r}"
            )
        most = max(rows, key=lambda domain: len(rows[domain]))
        shares.append(Share(most, {domain: np.array(some) for domain, some in rows.items()}, owner))
    return shares


def read_owners(path: Path) -> dict[str, str]:
    """Client by path, from a CSV file with columns of these names."""
    owners: dict[str, str] = {}
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, TABLE), newline=""), strict=True)
        if not {"path", "client"} <= set(reader.fieldnames or ()):
            raise InputError(
                f"partition.file: {path} has the columns {', '.join(map(repr, reader.fieldnames or ('none',)))}; "
                "it needs path and client"
            )
        for row in reader:
            name, client = plain_cell(row["path"] or ""), plain_cell(row["client"] or "")
            if not name.strip() or not client.strip():
                raise InputError(f"partition.file: {path}, line {reader.line_num} lacks a path or a client")
            if owners.setdefault(name, client) != client:
                raise InputError(f"partition.file: {path} gives {name!r} to {owners[name]!r} and to {client!r}")
    except InputError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"partition.file: cannot read {path}: {error}") from error
    if not owners:
        raise InputError(f"partition.file: {path} has no rows")
    return owners


def _top_up(parts: list[Indices], least: int, rng: np.random.Generator) -> list[Indices]:
    """Move single rows from the client that holds most until each holds the least that is asked for."""
    while min(len(part) for part in parts) < least:
        sizes = [len(part) for part in parts]
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        pick = rng.integers(sizes[rich])
        parts[poor] = np.append(parts[poor], parts[rich][pick])
        parts[rich] = np.delete(parts[rich], pick)
    return parts
