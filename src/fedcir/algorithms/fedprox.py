"""FedProx: clients are held near the model that they received.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous Networks.
MLSys 2020. https://arxiv.org/abs/1812.06127
"""

from dataclasses import dataclass

from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm
from fedcir.losses import proximal
from fedcir.models.tensors import trained_parameters
from fedcir.types import LocalContext, Losses, Modules
from fedcir.validation import Weight


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Li et al., 2020. https://arxiv.org/abs/1812.06127"""

    mu: Weight = 0.1
    """Weight of half the squared distance to the received weights; 0 is FedAvg."""

    ranges = {"mu": "0.1,0.5,0.9"}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        losses = super().local_loss(modules, x, y, ctx)
        if not self.mu:
            return losses
        trained = trained_parameters(modules["model"])
        distance = proximal(trained.values(), (ctx.broadcast["model"][name] for name in trained))
        return Losses(losses.total + self.mu * distance, {**losses.terms, "proximal": distance})
