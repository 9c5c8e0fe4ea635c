"""The manifest: which client holds which sample by name, and a hash that tells whether two runs had the same."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcir.data.collection import without_collection
from fedcir.data.domains import Domain, Domains
from fedcir.data.names import Made, names_at
from fedcir.data.pieces import compact
from fedcir.data.shares import Share, Shares


@dataclass(frozen=True, eq=False)
class Holdings(Made[dict[str, Any]]):
    """The clients of a manifest. Their names of samples exist only while one of them is looked at."""

    domains: Domains
    shares: Shares

    def __len__(self) -> int:
        return len(self.shares)

    def make(self, position: int) -> dict[str, Any]:
        return next(self._told(position, position + 1))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with without_collection():
            yield from self._told(0, len(self))

    def _told(self, begin: int, end: int) -> Iterator[dict[str, Any]]:
        named = self.shares.told(lambda domain, rows: names_at(self.domains[domain].train.ids, rows), begin, end)
        for number, share in enumerate(named, begin):
            name = {"name": share.name} if share.name else {}
            train = [each for names in share.rows.values() for each in names]
            yield {"id": number, **name, "domain": share.domain, "train": train}


def manifest_of(domains: Domains, shares: Sequence[Share]) -> dict[str, Any]:
    """Every client's samples by name, and a hash of it all: the same for the same data, settings and seed anywhere."""
    manifest: dict[str, Any] = {
        "dataset": domains.name,
        "content": domains.content or "-".join(_content_hash(domain) for domain in domains),
        "clients": Holdings(domains, Shares.of(shares, domains.names)),
        "test": {domain.name: domain.test.ids for domain in domains},
    }
    aside = {domain.name: domain.validation.ids for domain in domains if domain.validation is not None}
    return hashed({**manifest, "validation": aside} if aside else manifest)


def hashed(manifest: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for piece in compact(manifest):
        digest.update(piece.encode())
    return {**manifest, "hash": digest.hexdigest()}


def _content_hash(domain: Domain) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for split in (domain.train, domain.test, *([domain.validation] if domain.validation is not None else [])):
        for start in range(0, len(split), 1024):  # a little at a time, since it may be large
            some = np.arange(start, min(start + 1024, len(split)))
            digest.update(np.ascontiguousarray(split.pixels(some)).data)
        digest.update(np.ascontiguousarray(split.labels).data)
    return digest.hexdigest()
