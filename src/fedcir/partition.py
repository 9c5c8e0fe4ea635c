"""Who holds what: pure functions from labels to the rows of each client."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcir.config import PartitionConfig
from fedcir.data.domains import Labels
from fedcir.rng import numpy_rng
from fedcir.types import InputError

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """A client's training rows by domain, and the domain whose test set it holds. No rows: it only evaluates."""

    domain: str
    rows: Mapping[str, Rows]


def partition(config: PartitionConfig, labels: Mapping[str, Labels], seed: int) -> list[Share]:
    """The shares of a configured scheme, in the order of client numbers; a held-out domain comes last."""
    held_out = config.hold_out
    if held_out is not None and held_out not in labels:
        raise InputError(f"partition.hold_out: no domain {held_out!r}; there are {', '.join(labels)}")
    kept = {name: values for name, values in labels.items() if name != held_out}
    if not kept:
        raise InputError(f"partition.hold_out: {held_out!r} is the only domain, nothing is left to train on")
    clients = len(kept) if config.clients is None else config.clients
    if clients < len(kept):
        raise InputError(f"partition.clients must be at least the number of domains, {len(kept)}, got {clients}")
    if config.scheme == "domain":
        if clients != len(kept):
            raise InputError(
                f"partition.clients is {clients} for {len(kept)} domains: "
                "use --set partition.scheme=dirichlet to split a domain between clients"
            )
        shares = by_domain(kept)
    elif config.scheme == "dirichlet":
        shares = dirichlet_within_domain(kept, clients, config.beta, config.min_samples, seed)
    else:
        shares = iid(kept, clients, seed)
    for number, share in enumerate(shares):
        size = sum(len(rows) for rows in share.rows.values())
        if size < config.min_samples:
            raise InputError(
                f"client {number} would hold {size} images, below partition.min_samples={config.min_samples}: "
                "lower --clients"
            )
    return shares if held_out is None else [*shares, Share(held_out, {})]


def by_domain(labels: Mapping[str, Labels]) -> list[Share]:
    """One client a domain, which holds all of it."""
    return [Share(name, {name: np.arange(len(values))}) for name, values in labels.items()]


def dirichlet_within_domain(
    labels: Mapping[str, Labels], clients: int, beta: float, min_samples: int, seed: int
) -> list[Share]:
    """Each domain is spread over its clients, every class in proportions drawn from Dirichlet(beta)."""
    shares = []
    for position, (name, values) in enumerate(labels.items()):
        count = clients // len(labels) + (position < clients % len(labels))
        if len(values) < count * min_samples:
            raise InputError(
                f"domain {name!r} has {len(values)} training images, too few for {count} clients "
                f"with at least {min_samples} each: lower --clients or partition.min_samples"
            )
        rng = numpy_rng(seed, "partition", name)
        parts: list[list[Rows]] = [[] for _ in range(count)]
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


def _top_up(parts: list[Rows], least: int, rng: np.random.Generator) -> list[Rows]:
    """Move single rows from the client that holds most until each holds the least that is asked for."""
    while min(len(part) for part in parts) < least:
        sizes = [len(part) for part in parts]
        poor, rich = int(np.argmin(sizes)), int(np.argmax(sizes))
        pick = rng.integers(sizes[rich])
        parts[poor] = np.append(parts[poor], parts[rich][pick])
        parts[rich] = np.delete(parts[rich], pick)
    return parts
