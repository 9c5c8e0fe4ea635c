"""Algorithm files written for the version before still find what they read."""

import torch

from fedcir.types import ClientReply, LocalContext, ServerContext


def test_former_names_of_contexts_and_replies_give_the_same_values() -> None:
    groups = {"model": {"w": torch.ones(1)}}
    local = LocalContext(1, 1, 2, 4, broadcast=groups, rng=torch.Generator(), client_state=groups)
    assert local.received is local.broadcast
    assert local.kept is local.client_state
    server = ServerContext(1, 1, 2, 4, "samples", "average", torch.Generator(), broadcast=groups)
    assert server.sent is server.broadcast
    reply = ClientReply(0, 1, groups, {})
    assert reply.arrays is reply.tensors
