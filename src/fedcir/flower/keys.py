"""Which key a node has, as the SuperLink tells it, and whose name goes with it.

A SuperLink with `--enable-supernode-auth` lets in nodes with registered keys only and knows which node has which. It
tells the ServerApp, so a name can be bound to the key of the node that first used it. Without it a SuperNode makes a
new key at every start.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

KEY = "node_key"
"""The field of a manifest's client."""
EVERY = "all"
"""The word for every site, where names of some are asked for."""


@lru_cache(maxsize=10_000)
def fingerprint(public_key: bytes) -> str:
    """As `ssh-keygen -lf KEY.pub` shows it; empty for the random bytes that a simulated node has."""
    try:
        key = load_pem_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return ""
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


def name_of(client: dict[str, Any]) -> str:
    """What a client of the manifest is known by from one connection to the next."""
    return str(client.get("partition", client["domain"]))


def forget_keys(clients: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Unbind the names of sites that have a new key."""
    for client in clients:
        if EVERY in names or name_of(client) in names:
            client.pop(KEY, None)


def claim_fault(client: dict[str, Any], key: str) -> str | None:
    """Why a node with this key may not speak for a client; None if it may, or if nobody knows."""
    bound, name = client.get(KEY, ""), name_of(client)
    if not bound or not key or bound == key:
        return None
    return f"it claims the name {name!r} with the key {key}, but the name belongs to {bound} (see new-keys)"
