"""Who holds which rows: a share for each client, and all shares as a few flat arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcir.data.domains import Indices, Labels
from fedcir.data.partition.names import Made

Owners = NDArray[np.int32]
"""The client of each row of a domain."""

AT_A_TIME = 1024
"""Shares that are made together, since numpy takes as long for one as for many."""


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


class Held(NamedTuple):
    """The rows of one domain, those of the first client before those of the second, and where each client's end."""

    rows: NDArray[np.int32]
    ends: Indices

    @property
    def sizes(self) -> Indices:
        return np.diff(self.ends, prepend=0)

    def of(self, begin: int, end: int, told: Callable[[Indices], Any]) -> list[Any]:
        """What is told of the rows of each client from `begin` up to `end`."""
        cuts = [int(self.ends[begin - 1]) if begin else 0, *self.ends[begin:end].tolist()]
        rows = told(self.rows[cuts[0] : cuts[-1]].astype(np.int64))
        return [rows[a - cuts[0] : b - cuts[0]] for a, b in pairwise(cuts)]


@dataclass(frozen=True, eq=False)
class Shares(Made[Share]):
    """The shares of all clients, which take a few bytes a row until one of them is asked for."""

    domains: tuple[str, ...]
    homes: NDArray[np.int32]
    """The domain that each client stands for, as a number."""
    held: Mapping[str, Held]
    names: Sequence[str] = ()
    """What owners call their clients, if they do."""

    def __len__(self) -> int:
        return len(self.homes)

    def make(self, position: int) -> Share:
        return next(iter(self.told(lambda domain, rows: rows, position, position + 1)))

    def __iter__(self) -> Iterator[Share]:
        return self.told(lambda domain, rows: rows)

    def told(self, tell: Callable[[str, Indices], Any], begin: int = 0, end: int | None = None) -> Iterator[Share]:
        """The shares of clients from `begin` on, with what is told of the rows of a domain in the place of rows."""
        end = len(self) if end is None else end
        for first in range(begin, end, AT_A_TIME):
            last = min(first + AT_A_TIME, end)
            held = [
                [(domain, some) for some in held.of(first, last, partial(tell, domain))]
                for domain, held in self.held.items()
            ]
            names = self.names[first:last] if self.names else repeat("")
            for home, name, *parts in zip(self.homes[first:last].tolist(), names, *held, strict=False):
                yield Share(self.domains[home], {domain: some for domain, some in parts if len(some)}, name)

    @cached_property
    def sizes(self) -> Indices:
        """How many rows each client holds."""
        return sum((held.sizes for held in self.held.values()), np.zeros(len(self), dtype=np.int64))

    @property
    def firsts(self) -> dict[str, int]:
        """The first client of each domain that somebody stands for."""
        found, first = np.unique(self.homes, return_index=True)
        return {self.domains[home]: int(client) for home, client in zip(found, first, strict=True)}

    @classmethod
    def of(cls, shares: Iterable[Share], domains: Sequence[str]) -> "Shares":
        """The same from shares one by one, each with its rows in this order of domains."""
        if isinstance(shares, cls):
            return shares
        each, held = list(shares), {}
        for domain in domains:
            parts = [share.rows.get(domain, np.empty(0, dtype=np.int64)) for share in each]
            held[domain] = Held(np.concatenate(parts).astype(np.int32), np.cumsum([len(part) for part in parts]))
        names = [share.name for share in each] if any(share.name for share in each) else ()
        return cls(tuple(domains), _numbers([share.domain for share in each], domains), held, names)

    @classmethod
    def dealt(cls, owners: Mapping[str, Owners], homes: Sequence[str]) -> "Shares":
        """Of rows that are given to one client each, who stands for the domain that `homes` names."""
        held = {
            domain: Held(
                np.argsort(owner, kind="stable").astype(np.int32),
                np.cumsum(np.bincount(owner, minlength=len(homes))),
            )
            for domain, owner in owners.items()
        }
        return cls(tuple(owners), _numbers(homes, tuple(owners)), held)

    def and_test(self, domains: Sequence[str]) -> "Shares":
        """With a client more for each of these domains, who trains on nothing."""
        known = tuple(dict.fromkeys((*self.domains, *domains)))
        homes = np.concatenate([self.homes, _numbers(domains, known)])
        held = {
            domain: Held(rows, np.concatenate([ends, np.full(len(domains), len(rows))]))
            for domain, (rows, ends) in self.held.items()
        }
        return Shares(known, homes, held, (*self.names, *("" for _ in domains)) if self.names else ())


def _numbers(names: Sequence[str], order: Sequence[str]) -> NDArray[np.int32]:
    number = {name: i for i, name in enumerate(order)}
    return np.array([number[name] for name in names], dtype=np.int32)
