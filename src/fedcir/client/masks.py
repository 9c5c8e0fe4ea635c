"""Pairwise masks: a server that adds up masked sums learns their total, and nothing else of them.

K. Bonawitz et al. Practical Secure Aggregation for Privacy-Preserving Machine Learning. CCS 2017. Each two clients
agree on a key by X25519 and expand it to a mask by ChaCha20. One adds it to its sums and the other subtracts it, modulo
2^128, so that all masks cancel in the total. If a client is lost, the server asks the others again, with fresh masks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcir.algorithms.algorithm import Algorithm
from fedcir.errors import InputError, RunError
from fedcir.rng import numpy_rng
from fedcir.types import ClientReply, DroppedReply, Groups, ServerContext, Tensors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

MASKS = "masks"
"""Group of the broadcast: the public keys of the clients that mask together."""
MASK_KEY = "mask_key"
"""Field of a client in the manifest of a deployment: its public key in hexadecimal digits."""
FEWEST = 2
"""Clients that can mask together."""
LOW_BITS = 42
"""Bits of the low part of an exact sum."""

Words = NDArray[np.uint64]
"""Integers modulo 2^128, as high and low words, (2, N)."""


def make_mask_key(secret: bytes) -> "X25519PrivateKey":
    """Make a client's private key from 32 secret bytes."""
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    except ImportError:
        raise InputError("server.masked needs cryptography: pip install 'fedcir[flower]'") from None
    return X25519PrivateKey.from_private_bytes(secret)


def simulated_key(seed: int, client: int) -> "X25519PrivateKey":
    """The key of a client of a run on one machine, where nothing is hidden."""
    return make_mask_key(numpy_rng(seed, "mask", client).bytes(32))


def pack_keys(keys: Mapping[int, bytes]) -> Tensors:
    """Pack public keys by client as the tensors of a group."""
    values = [list(key) for key in keys.values()]
    return {"clients": torch.tensor(list(keys)), "keys": torch.tensor(values, dtype=torch.uint8)}


def unpack_keys(group: Tensors) -> dict[int, bytes]:
    return dict(zip(group["clients"].tolist(), map(bytes, group["keys"].tolist()), strict=True))


def mask_sums(groups: Groups, client: int, private: "X25519PrivateKey", keys: Tensors, context: bytes) -> Groups:
    """Mask the exact sums of a reply. `context` is what the request depends on: other requests get other masks."""
    others = unpack_keys(keys)
    if others.pop(client, b"") != private.public_key().public_bytes_raw() or len(others) < FEWEST - 1:
        message = f"the run's keys do not hold this client's own and {FEWEST - 1} more, so its sums cannot be masked"
        raise InputError(message, public=message)
    words = to_words(groups)
    for other, public in others.items():
        mask = draw_mask(private, public, context, words.shape[1])
        words = add_words(words, mask if client < other else negate_words(mask))
    return from_words(words, groups)


def draw_mask(private: "X25519PrivateKey", public: bytes, context: bytes, count: int) -> Words:
    """Draw the mask that two clients share: the same from either private key with the other's public key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    seed = HKDF(SHA256(), 32, salt=None, info=b"fedcir masks " + context).derive(shared)
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(16 * count))
    return np.frombuffer(stream, "<u8").reshape(2, count).astype(np.uint64)


def add_masked(replies: Iterable[Groups]) -> Groups:
    """Add up masked sums modulo 2^128: the total of the sums, in the form of each."""
    first, *others = replies
    words = _view_words(first)
    for other in others:
        words = add_words(words, _view_words(other))
    return from_words(words, first, masked=False)


def to_words(groups: Groups) -> Words:
    """Join the parts of all exact sums, high * 2^42 + low, to integers modulo 2^128."""
    high, low = (np.concatenate(parts) for parts in zip(*_list_parts(groups), strict=True))
    return np.stack([high >> (64 - LOW_BITS), high << LOW_BITS | low]).view(np.uint64)


def from_words(words: Words, like: Groups, masked: bool = True) -> Groups:
    """Split integers into tensors with the names and shapes of `like`: words if masked, otherwise parts of sums."""
    high, low = words.view(np.int64)
    if not masked:
        high = high << (64 - LOW_BITS) | (words[1] >> np.uint64(LOW_BITS)).view(np.int64)
        low = low & ((1 << LOW_BITS) - 1)
    groups: Groups = {}
    start = 0
    for group, name, part in _list_names(like):
        end = start + len(like[group][f"{name}_high"])
        groups.setdefault(group, {})[f"{name}_{part}"] = torch.from_numpy((high if part == "high" else low)[start:end])
        start = end if part == "low" else start
    return groups


def add_words(first: Words, second: Words) -> Words:
    low = first[1] + second[1]
    return np.stack([first[0] + second[0] + (low < first[1]), low])


def negate_words(words: Words) -> Words:
    return np.stack([~words[0] + (words[1] == 0), ~words[1] + np.uint64(1)])


def _view_words(groups: Groups) -> Words:
    """The words of masked sums."""
    high, low = (np.concatenate(parts) for parts in zip(*_list_parts(groups), strict=True))
    return np.stack([high, low]).view(np.uint64)


def _list_parts(groups: Groups) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    names = [(group, name) for group, name, part in _list_names(groups) if part == "high"]
    return [(groups[g][f"{name}_high"].numpy(), groups[g][f"{name}_low"].numpy()) for g, name in names]


def _list_names(groups: Groups) -> list[tuple[str, str, str]]:
    """Group, name and part of each tensor, the high part of a sum before its low part."""
    names = [(group, name.removesuffix("_high")) for group in sorted(groups) for name in sorted(groups[group])]
    return [(group, name, part) for group, name in names if not name.endswith("_low") for part in ("high", "low")]


class LostClients(RunError):
    """Replies of a masked round are missing, so that the masks of the others do not cancel."""

    def __init__(self, round: int, dropped: Mapping[str, str]) -> None:
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in dropped.items())
        super().__init__(f"round {round}: too few clients are left to mask their sums ({reasons})")
        self.dropped = dict(dropped)


def sum_masked(
    algorithm: Algorithm, replies: Sequence[ClientReply], dropped: Mapping[str, str], context: ServerContext
) -> tuple[list[ClientReply], ServerContext]:
    """Return the total of masked sums as one reply, and the context with the noise of the total."""
    if dropped:
        raise LostClients(context.round, dropped)
    examples = sum(reply.num_examples for reply in replies)
    total = replace(replies[0], num_examples=examples, tensors=add_masked(reply.tensors for reply in replies))
    if context.noise is not None:
        multiplier = context.noise.multiplier * math.sqrt(len(replies))
        context = replace(context, noise=replace(context.noise, multiplier=multiplier))
    if (fault := algorithm.find_reply_fault(total, context)) is not None:
        raise RunError(f"round {context.round}: the total of the masked sums cannot be used: {fault}")
    return [total], context


def simulate_masks(
    replies: Iterable[ClientReply | DroppedReply], keys: Tensors, seed: int
) -> Iterator[ClientReply | DroppedReply]:
    """Mask the replies of a run on one machine as sites do."""
    for reply in replies:
        if isinstance(reply, ClientReply):
            key = simulated_key(seed, reply.client_id)
            yield replace(reply, tensors=mask_sums(reply.tensors, reply.client_id, key, keys, b"simulated"))
        else:
            yield reply
