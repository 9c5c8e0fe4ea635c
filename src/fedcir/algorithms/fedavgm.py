"""FedAvgM: the server takes a step with momentum, instead of moving to the mean of the clients' models.

BatchNorm statistics have no momentum: they are the clients' mean, as in FedAvg.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Rate, Share
from fedcir.types import Arrays, ClientReply, Modules, ServerContext, ServerState


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Hsu et al., 2019. https://arxiv.org/abs/1909.06335"""

    momentum: Share = 0.9
    """How much of the last rounds' step is kept; 0 is FedAvg, where `server_lr` is 1."""
    server_lr: Rate = 1.0
    """The server's learning rate."""
    nesterov: bool = False
    """Nesterov's form of momentum: the step looks one round ahead."""

    ranges: ClassVar[Mapping[str, str]] = {"momentum": "0,0.7,0.9,0.97"}

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        means, _ = self.merge(replies, ctx, keep=lambda reply: None)
        before, after = state.shared["model"], means["model"]
        past: Arrays = state.private.get("velocity", {})
        velocity: Arrays = {}
        for name, _ in modules["model"].named_parameters():
            change = after[name] - before[name]
            velocity[name] = v = change + self.momentum * past[name] if past else change
            step = change + self.momentum * v if self.nesterov else v
            after[name] += self.server_lr * step - change  # from the mean, which FedAvg's settings leave as it is
        return ServerState(ctx.round, means, {"velocity": velocity})
