"""FedProto: clients exchange class prototypes and nothing else, and each keeps its own model.

There is no global model, only a mean feature of each class, to which all clients draw theirs. A client predicts by its
own encoder and the nearest prototype, or by its own classifier.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. FedProto: Federated Prototype Learning across Heterogeneous
Clients. AAAI 2022. https://arxiv.org/abs/2105.00243
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.losses import prototype_distance
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Classifier, Prototypes, mean_by_class, sum_by_class
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import Weight


@dataclass(frozen=True)
class FedProto(Algorithm):
    """Tan et al., AAAI 2022. https://arxiv.org/abs/2105.00243"""

    lambda_proto: Weight = 1.0
    """Weight of the distance to the prototypes: lambda; 0 is training alone."""
    inference: Literal["prototypes", "classifier"] = "prototypes"
    """Whether the nearest prototype predicts, as in the paper, or the client's own classifier."""

    trains = ("prototypes",)
    keeps = ("model",)
    needs_classes = True
    sends = ("prototypes",)
    ranges = {"lambda_proto": "0.1..4"}

    def build(self, builder: NetworkBuilder) -> Modules:
        return {"model": builder.classifier(), "prototypes": Prototypes(builder.num_classes, builder.features)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model: Classifier = modules["model"]
        prototypes: Prototypes = modules["prototypes"]
        features = model.encoder(x)  # (B, Z)
        ce = ctx.cross_entropy(model.head(features), y)
        if not self.lambda_proto or not prototypes.known.any():
            return Losses(ce, {"ce": ce})
        distance = prototype_distance(features, y, prototypes.mean, prototypes.known)
        return Losses(ce + self.lambda_proto * distance, {"ce": ce, "distance": distance})

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        model: Classifier = modules["model"]
        sums = sum_by_class(model.encoder, data, like=model.head.weight)
        return {"prototypes": {"mean": mean_by_class(sums), "count": sums["counts"]}}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        merged = merge_prototypes([reply.tensors["prototypes"] for reply in replies], ctx.weighting == "samples")
        anew, old = merged["count"] > 0, state.shared["prototypes"]
        shared = {
            name: torch.where(anew if t.ndim == 1 else anew.unsqueeze(-1), t, old[name]) for name, t in merged.items()
        }
        return ServerState(ctx.round, {"prototypes": shared})

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        model: Classifier = modules["model"]
        prototypes: Prototypes = modules["prototypes"]
        features: Tensor = model.encoder(x)
        logits: Tensor = model.head(features)
        if self.inference == "classifier":
            return logits
        mean, is_known = prototypes.mean, prototypes.known
        # Not by torch.cdist, which cannot be exported for batches of any size.
        squares = features.square().sum(-1, keepdim=True) - 2 * features @ mean.T + mean.square().sum(-1)  # (B, C)
        farthest = squares.where(is_known, 0.0).amax(-1, keepdim=True)  # of the known ones; an unknown one is farther
        return torch.where(is_known.any(), -squares.where(is_known, farthest + 1), logits)


def merge_prototypes(local: Iterable[Tensors], by_samples: bool) -> Tensors:
    """The mean over the clients that hold a class, plain or by their numbers of samples of it, and its total count."""
    collected = list(local)
    means, counts = (torch.stack([prototypes[name] for prototypes in collected]) for name in ("mean", "count"))
    weights = counts.clamp_min(0) if by_samples else (counts > 0).float()  # (K, C)
    shares = weights / weights.sum(0).clamp_min(1)
    return {"mean": (shares.unsqueeze(-1) * means).sum(0), "count": counts.clamp_min(0).sum(0)}
