"""SCAFFOLD: control variates correct each client's steps for what pulls it away from the others.

Algorithm 1 of the paper with option II: a client's control variate is the mean gradient of its last round, which is the
way it went over the number of its steps. The paper's steps are plain SGD; momentum goes further in a step, and the way
is divided by as much more. Control variates have the weights of the clients' models, so that corrections cancel out
under `server.weighting` too. BatchNorm statistics are the clients' mean, as in FedAvg.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020. https://arxiv.org/abs/1910.06378
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.models.tensors import average, trained_parameters
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import LearningRate


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Karimireddy et al., ICML 2020. https://arxiv.org/abs/1910.06378"""

    server_lr: LearningRate = 1.0
    """The server's step towards the mean of the clients' models: eta_g."""

    sends = ("change",)
    remembers = ("control",)
    needs_sgd = True
    counts_clients = True
    ranges = {"server_lr": "0.3..1"}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        state = super().start(modules, ctx)
        zero = {name: torch.zeros_like(p, device="cpu") for name, p in trained_parameters(modules["model"]).items()}
        return ServerState(0, {**state.shared, "control": zero})

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        losses = super().local_loss(modules, x, y, ctx)
        server_control, control = ctx.broadcast["control"], _load_control(ctx)
        correction = sum(  # its gradient is c - c_i
            ((server_control[name] - control[name]) * p).sum()
            for name, p in trained_parameters(modules["model"]).items()
        )
        return Losses(losses.total + correction, losses.terms)

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        control, new = _load_control(ctx), _compute_next_control(modules, ctx)
        return {"change": {name: (new[name] - control[name]).cpu() for name in new}}

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {"control": _compute_next_control(modules, ctx)}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, weighed = self.merge(replies, ctx, keep=lambda reply: (reply.tensors["change"], ctx.weigh_reply(reply)))
        changes, weights = zip(*weighed, strict=True)
        share, change = len(changes) / ctx.clients, average(changes, weights)
        control = {name: old + share * change[name] for name, old in state.shared["control"].items()}
        for name in control:
            x, y = state.shared["model"][name], means["model"][name]
            y += (self.server_lr - 1) * (y - x)  # x + eta_g (y - x)
        return ServerState(ctx.round, {**means, "control": control})


def _load_control(ctx: LocalContext) -> Tensors:
    """c_i, zero before the client's first round."""
    if "control" in ctx.client_state:
        return ctx.client_state["control"]
    return {name: torch.zeros_like(c) for name, c in ctx.broadcast["control"].items()}


def _compute_next_control(modules: Modules, ctx: LocalContext) -> Tensors:
    """c_i+ = c_i - c + (x - y_i) / (K eta)"""
    x, server_control, control = ctx.broadcast["model"], ctx.broadcast["control"], _load_control(ctx)
    way = count_plain_steps(ctx.steps, ctx.momentum) * ctx.lr
    return {
        name: control[name] - server_control[name] + (x[name] - y.detach()) / way
        for name, y in trained_parameters(modules["model"]).items()
    }


def count_plain_steps(steps: int, momentum: float) -> float:
    """Count the plain SGD steps that move as far along a constant gradient as these steps with momentum."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
