"""Results of the last test image by image: one bit for each test image, in the order of the manifest.

They stay in the process or on the machine that trains. A site of a deployment sends counts only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcir.types import Groups, InputError

GROUP = "hits"
"""Group of an evaluation reply that holds the packed bits and the label counts."""


class SavedDomain(TypedDict):
    """One domain in hits.json."""

    images: int
    hits: str
    """Packed bits as hexadecimal digits."""
    labels: list[int]


class SavedHits(TypedDict):
    """What is relied on in hits.json."""

    round: int
    domains: dict[str, SavedDomain]


@dataclass(frozen=True)
class DomainHits:
    """Which test images of a domain were classified correctly, and how many there are of each class."""

    correct: NDArray[np.bool_]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Hits:
    """Results of a round's test, image by image."""

    round: int
    domains: Mapping[str, DomainHits]

    @classmethod
    def from_replies(cls, arrays: Mapping[str, Groups], round: int) -> Self | None:
        """Unpack what the clients that test replied, by domain; None unless every reply holds bits."""
        if not arrays or not all(GROUP in groups for groups in arrays.values()):
            return None
        return cls(round, {domain: _unpack_reply(groups) for domain, groups in arrays.items()})

    @classmethod
    def from_json(cls, values: SavedHits) -> Self:
        return cls(values["round"], {domain: _from_json(saved) for domain, saved in values["domains"].items()})

    def to_json(self) -> dict[str, Any]:
        domains = {
            domain: {
                "images": len(found.correct),
                "hits": np.packbits(found.correct).tobytes().hex(),
                "labels": list(found.labels),
            }
            for domain, found in self.domains.items()
        }
        return {"round": self.round, "domains": domains}


def pack_hits(correct: Tensor, labels: Tensor, classes: int) -> Groups:
    """Arrays of an evaluation reply: the bits (N,), packed, and the test images of each class (C,)."""
    bits = np.packbits(correct.cpu().numpy())
    return {GROUP: {"bits": torch.from_numpy(bits), "labels": labels.cpu().bincount(minlength=classes)}}


def _unpack_reply(groups: Groups) -> DomainHits:
    labels = groups[GROUP]["labels"]
    correct = np.unpackbits(groups[GROUP]["bits"].numpy(), count=int(labels.sum()))
    return DomainHits(correct.astype(bool), tuple(labels.tolist()))


def _from_json(saved: SavedDomain) -> DomainHits:
    try:
        packed = np.frombuffer(bytes.fromhex(saved["hits"]), np.uint8)
    except ValueError as error:
        raise InputError("hits are not hexadecimal digits") from error
    images, labels = saved["images"], saved["labels"]
    if images < 1 or len(packed) != -(-images // 8) or min(labels, default=-1) < 0 or sum(labels) != images:
        raise InputError(f"hits and labels are not those of {images} images")
    return DomainHits(np.unpackbits(packed, count=images).astype(bool), tuple(labels))
