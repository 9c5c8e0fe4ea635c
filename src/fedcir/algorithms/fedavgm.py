"""FedAvgM: the server takes a step with momentum, instead of moving to the mean of the clients' models.

BatchNorm statistics have no momentum: they are the clients' mean, as in FedAvg.

T.-M. H. Hsu, H. Qi, M. Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. 2019. https://arxiv.org/abs/1909.06335
"""

from dataclasses import dataclass

from fedcir.algorithms.algorithm import Algorithm, Replies
from fedcir.models.tensors import trained_parameters
from fedcir.types import Modules, ServerContext, ServerState
from fedcir.validation import Fraction, LearningRate


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """Hsu et al., 2019. https://arxiv.org/abs/1909.06335"""

    momentum: Fraction = 0.9
    """How much of the last rounds' step is kept; 0 is FedAvg, where `server_lr` is 1."""
    server_lr: LearningRate = 1.0
    """The server's learning rate."""
    nesterov: bool = False
    """Nesterov's form of momentum: the step looks one round ahead."""

    ranges = {"momentum": "0,0.7,0.9,0.97"}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, _ = self.merge(replies, ctx)
        after, velocity, past = means["model"], {}, state.private.get("velocity", {})
        for name in trained_parameters(modules["model"]):
            change = after[name] - state.shared["model"][name]
            velocity[name] = v = change + self.momentum * past[name] if past else change
            step = change + self.momentum * v if self.nesterov else v
            after[name] += self.server_lr * step - change  # from the mean, which FedAvg's settings leave as it is
        return ServerState(ctx.round, means, {"velocity": velocity})
