"""Rounds of masked sums: the total of the replies, and what happens if a client is lost."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedcir.client.masks import add_masked, mask_sums, simulated_key
from fedcir.errors import RunError
from fedcir.runtime.session import Session
from fedcir.types import ClientReply, DroppedReply, ServerContext, Tensors


class LostClients(RunError):
    """Replies of a masked round are missing, so that the masks of the others do not cancel."""

    def __init__(self, round: int, dropped: Mapping[str, str]) -> None:
        reasons = "; ".join(f"client {client}: {reason}" for client, reason in dropped.items())
        super().__init__(f"round {round}: too few clients are left to mask their sums ({reasons})")
        self.dropped = dict(dropped)


def sum_masked(
    session: Session, replies: Sequence[ClientReply], dropped: Mapping[str, str], context: ServerContext
) -> tuple[list[ClientReply], ServerContext]:
    """Return the total of masked sums as one reply, and the context with the noise of the total."""
    if dropped:
        raise LostClients(context.round, dropped)
    examples = sum(reply.num_examples for reply in replies)
    total = replace(replies[0], num_examples=examples, tensors=add_masked(reply.tensors for reply in replies))
    if context.noise is not None:
        multiplier = context.noise.multiplier * math.sqrt(len(replies))
        context = replace(context, noise=replace(context.noise, multiplier=multiplier))
    if (fault := session.algorithm.find_reply_fault(total, context)) is not None:
        raise RunError(f"round {context.round}: the total of the masked sums cannot be used: {fault}")
    return [total], context


def simulate_masks(
    session: Session, replies: Iterable[ClientReply | DroppedReply], keys: Tensors
) -> Iterator[ClientReply | DroppedReply]:
    """Mask the replies of a run on one machine as sites do."""
    for reply in replies:
        if isinstance(reply, ClientReply):
            key = simulated_key(session.config.run.seed, reply.client_id)
            masked = mask_sums(reply.tensors, reply.client_id, key, keys, b"simulated")
            yield replace(reply, tensors=masked)
        else:
            yield reply
