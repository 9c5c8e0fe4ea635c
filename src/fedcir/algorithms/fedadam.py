"""FedAdam: Adam at the server; its gradient is the mean change that the clients of a round made.

Algorithm 2 of the paper: there is no bias correction, and the second moment starts at tau^2. BatchNorm statistics are
the clients' mean, as in FedAvg.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan. Adaptive Federated
Optimization. ICLR 2021. https://arxiv.org/abs/2003.00295
"""

from dataclasses import dataclass

import torch

from fedcir.algorithms.algorithm import Algorithm, Replies
from fedcir.models.tensors import trained_parameters
from fedcir.types import Modules, ServerContext, ServerState
from fedcir.validation import Fraction, LearningRate, Positive


@dataclass(frozen=True)
class FedAdam(Algorithm):
    """Reddi et al., ICLR 2021. https://arxiv.org/abs/2003.00295"""

    server_lr: LearningRate = 0.01
    """The server's learning rate: eta. The paper tunes it for each task."""
    beta1: Fraction = 0.9
    """Decay of the mean of the rounds' changes."""
    beta2: Fraction = 0.99
    """Decay of the mean of their squares."""
    tau: Positive = 1e-3
    """Added to the root of the second moment: larger values adapt less."""

    ranges = {"server_lr": "1e-3..1e-1", "tau": "1e-4,1e-3,1e-2"}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        state = super().start(modules, ctx)
        first = {name: torch.zeros_like(state.shared["model"][name]) for name in trained_parameters(modules["model"])}
        second = {name: torch.full_like(x, self.tau**2) for name, x in first.items()}
        return ServerState(0, state.shared, {"first": first, "second": second})

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, _ = self.merge(replies, ctx)
        first, second = state.private["first"], state.private["second"]
        for name, m in first.items():
            x, v = state.shared["model"][name], second[name]
            change = means["model"][name] - x
            m.lerp_(change, 1 - self.beta1)
            v.lerp_(change.square(), 1 - self.beta2)
            means["model"][name] = x + self.server_lr * m / (v.sqrt() + self.tau)
        return ServerState(ctx.round, means, {"first": first, "second": second})
