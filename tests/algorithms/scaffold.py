"""SCAFFOLD: control variates that take out of each client's steps what pulls it away from the others.

Option II of the paper, with a server step of 1. The paper's local steps are plain SGD: set local.momentum and
local.weight_decay to 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcir import Algorithm, Losses
from fedcir.algorithms.algorithm import Batch
from fedcir.models.tensors import mean
from fedcir.types import Arrays, ClientReply, Groups, LocalContext, Modules, ServerContext, ServerState


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Karimireddy et al., 2020. https://arxiv.org/abs/1910.06378"""

    sends: ClassVar[tuple[str, ...]] = ("change",)
    remembers: ClassVar[tuple[str, ...]] = ("control",)

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        state = super().start(modules, ctx)
        zero = {name: torch.zeros_like(p, device="cpu") for name, p in modules["model"].named_parameters()}
        return ServerState(0, {**state.shared, "control": zero})

    def local_loss(self, modules: Modules, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> Losses:
        losses = super().local_loss(modules, x, y, ctx)
        everyone, own = ctx.received["control"], _own(ctx)
        correction = sum(  # its gradient is c - c_i
            ((everyone[name] - own[name]) * p).sum() for name, p in modules["model"].named_parameters()
        )
        return Losses(losses.total + correction, losses.terms)

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        own = _own(ctx)
        return {"change": {name: (new - own[name]).cpu() for name, new in _next(modules, ctx).items()}}

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {"control": _next(modules, ctx)}

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        means, changes = self.merge(replies, ctx, keep=lambda reply: reply.arrays["change"])
        share, change = len(changes) / ctx.clients, mean(changes)
        control = {name: old + share * change[name] for name, old in state.shared["control"].items()}
        return ServerState(ctx.round, {**means, "control": control})


def _own(ctx: LocalContext) -> Arrays:
    """c_i, zero before the client's first round."""
    return ctx.kept.get("control") or {name: torch.zeros_like(c) for name, c in ctx.received["control"].items()}


def _next(modules: Modules, ctx: LocalContext) -> Arrays:
    """c_i+ = c_i - c + (x - y_i) / (K eta)"""
    x, everyone, own = ctx.received["model"], ctx.received["control"], _own(ctx)
    return {
        name: own[name] - everyone[name] + (x[name] - y.detach()) / (ctx.steps * ctx.lr)
        for name, y in modules["model"].named_parameters()
    }
