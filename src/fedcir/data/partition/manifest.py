"""The manifest: which client holds which sample by name, and a hash that tells whether two runs had the same."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

import numpy as np

from fedcir.data.domains import Domain, Domains
from fedcir.data.partition.pieces import Written, compact, written_names
from fedcir.data.partition.shares import Share, Shares


@dataclass(frozen=True, eq=False)
class Holdings(Written[dict[str, Any]]):
    """The clients of a manifest. Their names of samples exist only while one of them is looked at."""

    domains: Domains
    shares: Shares

    def __len__(self) -> int:
        return len(self.shares)

    def make(self, position: int) -> dict[str, Any]:
        share = self.shares[position]
        held = [(self.domains[domain].train.ids, rows.tolist()) for domain, rows in share.rows.items()]
        name = {"name": share.name} if share.name else {}
        names = [ids[row] for ids, rows in held for row in rows]
        return {"id": position, **name, "domain": share.domain, "train": names}

    def texts(self, inside: str | None) -> Iterator[str]:
        encode, between = (encode_basestring_ascii, ", ") if inside is None else (encode_basestring, f",{inside} ")
        ids = {domain.name: domain.train.ids for domain in self.domains}
        told = self.shares.told(lambda domain, rows: written_names(ids[domain], rows, between, encode))
        for number, share in enumerate(told):
            held, domain = between.join(share.rows.values()), encode(share.domain)  # type: ignore[arg-type]
            name = f'"name": {encode(share.name)}' if share.name else ""
            if inside is None:
                yield f'{{"domain": {domain}, "id": {number}, {name and name + ", "}"train": [{held}]}}'
            else:
                train = f"[{inside} {held}{inside}]" if held else "[]"
                parts = [f'"id": {number}', *([name] if name else []), f'"domain": {domain}', f'"train": {train}']
                yield f"{{{inside}{f',{inside}'.join(parts)}{inside[:-1]}}}"


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
