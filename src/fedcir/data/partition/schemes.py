"""Who holds what: pure functions from labels to the rows of each client."""

import csv
import heapq
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from fedcir.config import PartitionConfig
from fedcir.config.reading import TABLE, read_text
from fedcir.config.spreadsheet import plain_cell
from fedcir.data.domains import Indices, Labels, rows_by_group, stratified_sample
from fedcir.data.partition.shares import Owners, Share, Shares
from fedcir.rng import numpy_rng
from fedcir.types import InputError

Groups = Mapping[str, Indices]
"""The group of each sample, by domain, for the domains whose samples come in groups."""


def partition(
    config: PartitionConfig,
    labels: Mapping[str, Labels],
    seed: int,
    ids: Mapping[str, Sequence[str]] | None = None,
    groups: Groups = MappingProxyType({}),
) -> Shares:
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
    shares = _shares(config, kept, seed, ids, groups)
    if config.max_samples is not None:
        shares = Shares.of([capped(share, labels, config.max_samples, seed) for share in shares], list(labels))
    if len(few := np.flatnonzero(shares.sizes < config.min_samples)):
        number = int(few[0])
        raise InputError(
            f"client {shares[number].name or number} would hold {shares.sizes[number]} images, "
            f"below partition.min_samples={config.min_samples}: "
            + (f"give it more rows in {config.file}" if config.file else "lower partition.clients")
        )
    spoken_for = shares.firsts
    return shares.and_test([name for name in labels if name not in spoken_for])


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
) -> Shares:
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
    labels: Mapping[str, Labels], groups: Groups, divide: Callable[[Mapping[str, Labels]], Shares]
) -> Shares:
    """Shares that hold a group whole or not at all: it is dealt out like one sample, of the class of its first."""
    if not groups:
        return divide(labels)
    together = {name: _rows_together(groups.get(name), len(values)) for name, values in labels.items()}
    shares = divide({name: labels[name][[rows[0] for rows in together[name]]] for name in labels})
    whole = [
        replace(share, rows={name: _rows_in([together[name][k] for k in held]) for name, held in share.rows.items()})
        for share in shares
    ]
    return Shares.of(whole, list(labels))


def _rows_in(groups: Sequence[Indices]) -> Indices:
    return np.sort(np.concatenate(groups))


def _rows_together(groups: Indices | None, count: int) -> list[Indices]:
    return np.split(np.arange(count), count) if groups is None else rows_by_group(groups)


def by_domain(labels: Mapping[str, Labels]) -> Shares:
    """One client a domain, which holds all of it."""
    return Shares.of([Share(name, {name: np.arange(len(values))}) for name, values in labels.items()], list(labels))


def dirichlet_within_domain(
    labels: Mapping[str, Labels], clients: int, beta: float, min_samples: int, seed: int, what: str = "training images"
) -> Shares:
    """Each domain is spread over its clients, every class in proportions drawn from Dirichlet(beta)."""
    owners: dict[str, Owners] = {}
    homes: list[str] = []
    for position, (name, values) in enumerate(labels.items()):
        count = clients // len(labels) + (position < clients % len(labels))
        if len(values) < count * min_samples:
            raise InputError(
                f"domain {name!r} has {len(values)} {what}, too few for {count} clients "
                f"with at least {min_samples} each: lower partition.clients or partition.min_samples"
            )
        rng = numpy_rng(seed, "partition", name)
        owner, order = np.empty(len(values), dtype=np.int32), []
        for label in np.unique(values):
            rows = rng.permutation(np.flatnonzero(values == label))
            cuts = np.round(np.cumsum(rng.dirichlet(np.full(count, beta)))[:-1] * len(rows)).astype(int)
            owner[rows] = np.repeat(np.arange(count), np.diff(cuts, prepend=0, append=len(rows)))
            order.append(rows)
        owners[name] = len(homes) + _top_up(owner, np.concatenate(order), count, min_samples, rng)
        homes += [name] * count
    return Shares.dealt(owners, homes)


def iid(labels: Mapping[str, Labels], clients: int, seed: int) -> Shares:
    """All domains mixed and spread evenly: the control without any shift. Test sets go round the clients."""
    sizes = [len(values) for values in labels.values()]
    order = numpy_rng(seed, "partition", "iid").permutation(sum(sizes))
    owner = np.empty(len(order), dtype=np.int32)
    least, more = divmod(len(order), clients)  # the first ones hold one more
    owner[order] = np.repeat(np.arange(clients), least + (np.arange(clients) < more))
    owners = dict(zip(labels, np.split(owner, np.cumsum(sizes)[:-1]), strict=True))
    names = list(labels)
    return Shares.dealt(owners, [names[client % len(names)] for client in range(clients)])


def by_owner(owners: Mapping[str, str], ids: Mapping[str, Sequence[str]], path: Path) -> Shares:
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
    return Shares.of(shares, list(ids))


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


def _top_up(owner: Owners, order: Indices, count: int, least: int, rng: np.random.Generator) -> Owners:
    """Move single rows from the client that holds most until each holds the least that is asked for.

    `order` is that in which clients were given their rows.
    """
    sizes = np.bincount(owner, minlength=count)
    if sizes.min() >= least:
        return owner
    given = order[np.argsort(owner[order], kind="stable")]
    ends = np.cumsum(sizes)
    poorest = [(size, client) for client, size in enumerate(sizes.tolist()) if size < least]
    richest = [(-size, client) for client, size in enumerate(sizes.tolist()) if size > least]
    heapq.heapify(poorest)
    heapq.heapify(richest)
    left: dict[int, list[int]] = {}  # to those that gave something
    while poorest:  # and so somebody has more than the least
        (few, poor), (many, rich) = poorest[0], richest[0]
        if rich not in left:
            left[rich] = given[ends[rich] + many : ends[rich]].tolist()
        owner[left[rich].pop(int(rng.integers(-many)))] = poor
        heapq.heapreplace(richest, (many + 1, rich))
        if few + 1 < least:
            heapq.heapreplace(poorest, (few + 1, poor))
        else:
            heapq.heappop(poorest)
    return owner
