"""SCAFFOLD: control variates correct each client's steps for what pulls it away from the others.

Algorithm 1 of the paper with option II: a client's control variate is the mean gradient of its last round, which is the
way it went over the number of its steps. The paper's steps are plain SGD; momentum goes further in a step, and the way
is divided by as much more. BatchNorm statistics are the clients' mean, as in FedAvg.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch
from fedcir.config import Rate
from fedcir.models.tensors import mean
from fedcir.types import Arrays, ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Karimireddy et al., ICML 2020. https://arxiv.org/abs/1910.06378"""

    server_lr: Rate = 1.0
    """The server's step towards the mean of the clients' models: eta_g."""

    sends: ClassVar[tuple[str, ...]] = ("change",)
    remembers: ClassVar[tuple[str, ...]] = ("control",)
    ranges: ClassVar[Mapping[str, str]] = {"server_lr": "0.3..1"}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        state = super().start(modules, ctx)
        zero = {name: torch.zeros_like(p, device="cpu") for name, p in modules["model"].named_parameters()}
        return ServerState(0, {**state.shared, "control": zero})

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
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
        for name in control:
            x, y = state.shared["model"][name], means["model"][name]
            y += (self.server_lr - 1) * (y - x)  # x + eta_g (y - x)
        return ServerState(ctx.round, {**means, "control": control})


def _own(ctx: LocalContext) -> Arrays:
    """c_i, zero before the client's first round."""
    return ctx.kept.get("control") or {name: torch.zeros_like(c) for name, c in ctx.received["control"].items()}


def _next(modules: Modules, ctx: LocalContext) -> Arrays:
    """c_i+ = c_i - c + (x - y_i) / (K eta)"""
    x, everyone, own = ctx.received["model"], ctx.received["control"], _own(ctx)
    way = plain_steps(ctx.steps, ctx.momentum) * ctx.lr
    return {
        name: own[name] - everyone[name] + (x[name] - y.detach()) / way
        for name, y in modules["model"].named_parameters()
    }


def plain_steps(steps: int, momentum: float) -> float:
    """How many steps of plain SGD go as far along one gradient as so many with momentum, which starts at zero."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
