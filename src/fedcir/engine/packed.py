"""A large manifest as it is read: each client stays text until it is asked for, which takes a third of the memory."""

import json
from dataclasses import dataclass
from typing import Any

from fedcir.config import typed
from fedcir.data.collection import without_collection
from fedcir.data.partition.names import Made
from fedcir.engine.files import CHECKSUM, check, checksum
from fedcir.engine.formats import Manifest

LARGE = 16_000_000
"""Bytes of a manifest from which on it is."""


class Text(str):
    """A client of a manifest, as JSON."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Packed(Made[dict[str, Any]]):
    """Clients, decoded one by one when they are asked for."""

    texts: list[Text]

    def __len__(self) -> int:
        return len(self.texts)

    def make(self, position: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts[position])
        return found


def packed_manifest(content: bytes) -> dict[str, Any]:
    """The manifest of a file, checked as any other."""
    with without_collection():
        values = json.loads(content, object_hook=_packed)
        held = values.get("clients") if isinstance(values, dict) else None
        if not isinstance(held, list) or not all(isinstance(client, Text) for client in held):
            return typed(json.loads(content), Manifest, "manifest")  # type: ignore[no-any-return]  # which says why
        values["clients"] = []
        found: dict[str, Any] = {**typed(values, Manifest, "manifest"), "clients": Packed(held)}
        if (said := found.pop(CHECKSUM, None)) is not None:
            check(said, checksum(found))
    return found


def _packed(values: dict[str, Any]) -> dict[str, Any] | Text:
    right = type(values.get("id")) is int and type(values.get("domain")) is str and type(values.get("train")) is list
    return Text(json.dumps(values)) if right else values
