"""FedProc: features are drawn to class prototypes that the server merges from all clients.

The paper ramps from prototypes to cross-entropy over the rounds; its first round, before any prototype, is
cross-entropy alone. Features are compared after L2 normalisation with temperature 1. The features are the encoder's, so
that the network is that of all other methods; fields give the network of FedProc's paper.

X. Mu, Y. Shen, K. Cheng, X. Geng, J. Fu, T. Zhang, Z. Zhang. FedProc: Prototypical Contrastive Federated Learning on
Non-IID data. 2021. https://arxiv.org/abs/2109.12273
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.losses import prototype_contrast
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Classifier, sum_by_class
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import Between, Fraction


@dataclass(frozen=True)
class FedProc(Algorithm):
    """Mu et al., 2021. https://arxiv.org/abs/2109.12273"""

    ramp: Literal["linear", "constant"] = "linear"
    """The weight of cross-entropy: t/T, as in the paper, or `ce_weight` throughout."""
    ce_weight: Fraction = 0.5
    """Weight of cross-entropy where the ramp is constant."""
    projection: Annotated[int, Between(0, 16_384)] = 0
    """Width of the features after a projection head of two layers, which the paper has; 0 leaves it out."""
    normalised_head: bool = False
    """Whether the classifier gets L2-normalised features, as in the paper."""

    needs_classes = True
    sends = ("prototype_sums",)
    ranges = {"ramp": "linear,constant"}

    @property
    def uses_total_rounds(self) -> bool:  # type: ignore[override]
        return self.ramp == "linear"

    def build(self, builder: NetworkBuilder) -> Modules:
        return {"model": builder.classifier(self.projection, self.normalised_head)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model: Classifier = modules["model"]
        features = model.encoder(x)  # (B, Z)
        ce = ctx.cross_entropy(model.head(features), y)
        if "prototypes" not in ctx.broadcast:
            return Losses(ce, {"ce": ce})
        contrast = prototype_contrast(features, y, ctx.broadcast["prototypes"]["mean"])
        weight = ctx.round / ctx.total_rounds if self.ramp == "linear" else self.ce_weight
        return Losses(weight * ce + (1 - weight) * contrast, {"ce": ce, "contrast": contrast})

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        model: Classifier = modules["model"]
        sums = sum_by_class(lambda x: F.normalize(model.encoder(x), dim=-1), data, like=model.head.weight)
        return {"prototype_sums": sums}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, summaries = self.merge(replies, ctx, keep=lambda reply: reply.tensors["prototype_sums"])
        old = state.shared.get("prototypes", {}).get("mean")
        return ServerState(ctx.round, {**means, "prototypes": {"mean": merge_prototype_sums(summaries, old)}})


def merge_prototype_sums(summaries: Iterable[Tensors], old: Tensor | None) -> Tensor:
    """Total sums over total counts (C, Z); a class that nobody has keeps its old prototype, or is zero without one."""
    collected = list(summaries)
    sums = torch.stack([summary["sums"] for summary in collected]).sum(0)
    counts = torch.stack([summary["counts"] for summary in collected]).clamp_min(0).sum(0).unsqueeze(-1)
    return torch.where(counts > 0, sums / counts.clamp_min(1), torch.zeros_like(sums) if old is None else old)
