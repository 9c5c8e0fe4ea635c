"""FedLC: logits get a margin that is larger for the classes that a client holds few samples of.

Its paper prints the loss with a sum over the other classes only, which has no lower bound; all implementations that we
know take the usual softmax over all classes, and so it is here by default.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu. Federated Learning with Label Distribution Skew via Logits
Calibration. ICML 2022. https://arxiv.org/abs/2209.00189
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm
from fedcir.losses import cross_entropy_to_others, label_margins
from fedcir.types import LocalContext, Losses, Modules
from fedcir.validation import Weight


@dataclass(frozen=True)
class FedLC(Algorithm):
    """Zhang et al., ICML 2022. https://arxiv.org/abs/2209.00189"""

    tau: Weight = 1.0
    """Weight of the margins n_y^(-1/4) that are subtracted from the logits in training; 0 is FedAvg."""
    against: Literal["all", "others"] = "all"
    """The classes in the softmax's denominator: all, or all but the true one, as the paper prints it."""

    needs_classes = True
    ranges = {"tau": "0.3,1,3"}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        logits = modules["model"](x) - label_margins(ctx.class_counts, self.tau)  # (B, C)
        ce = ctx.cross_entropy(logits, y) if self.against == "all" else cross_entropy_to_others(logits, y)
        return Losses(ce, {"ce": ce})
