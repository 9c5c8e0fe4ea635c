"""FedDyn: each client's loss is changed from round to round, until all clients agree on where it is lowest.

Algorithm 1 of the paper. A client keeps an estimate of its own gradient. The server keeps -h / alpha, which is how far
clients have moved in all rounds, so nothing is divided by alpha. BatchNorm statistics are the clients' mean, as in
FedAvg.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama. Federated Learning Based on Dynamic
Regularization. ICLR 2021. https://arxiv.org/abs/2111.04263
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.losses import proximal
from fedcir.models.tensors import trained_parameters
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState
from fedcir.validation import Positive


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Acar et al., ICLR 2021. https://arxiv.org/abs/2111.04263"""

    alpha: Positive = 0.01
    """Weight of half the squared distance to the received weights, and of each round in the gradient that is kept."""

    remembers = ("gradient",)
    counts_clients = True
    ranges = {"alpha": "0.001,0.01,0.1"}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        losses = super().local_loss(modules, x, y, ctx)
        trained = trained_parameters(modules["model"])
        distance = proximal(trained.values(), (ctx.broadcast["model"][name] for name in trained))
        total = losses.total + self.alpha * distance
        if gradient := ctx.client_state.get("gradient"):  # not in the client's first round
            total = total - torch.stack([(gradient[name] * p).sum() for name, p in trained.items()]).sum()
        return Losses(total, {**losses.terms, "proximal": distance})

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        gradient, old = {}, ctx.client_state.get("gradient", {})
        for name, p in trained_parameters(modules["model"]).items():
            moved = self.alpha * (p - ctx.broadcast["model"][name])
            gradient[name] = old[name] - moved if old else -moved
        return {"gradient": gradient}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, replied = self.merge(replies, ctx)
        after, share = means["model"], len(replied) / ctx.clients
        drift, past = {}, state.private.get("drift", {})
        for name in trained_parameters(modules["model"]):
            moved = share * (after[name] - state.shared["model"][name])
            drift[name] = past[name] + moved if past else moved
            after[name] += drift[name]
        return ServerState(ctx.round, means, {"drift": drift})
