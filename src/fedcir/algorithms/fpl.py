"""FPL: features are drawn to several prototypes of their class, one for each kind of client that the server finds.

The server clusters the clients' prototypes of a class by FINCH. A client contrasts its features with the prototypes of
all clusters, and draws them to the plain mean over the clusters of their class, which no frequent domain dominates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch
from fedcir.config import Positive, Weight
from fedcir.losses import cluster_contrast, first_neighbours, prototype_distance
from fedcir.models.encoder import Classifier
from fedcir.models.prototypes import class_means, class_sums, means_by
from fedcir.types import Arrays, ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState


@dataclass(frozen=True)
class FPL(Algorithm):
    """Huang et al., CVPR 2023. https://github.com/WenkeHuang/RethinkFL"""

    temperature: Positive = 0.02
    """Divides the cosines of the contrast: tau."""
    contrast_weight: Weight = 1.0
    """Weight of the contrast with the prototypes of all clusters (CPCL); 1 in the paper."""
    consistency_weight: Weight = 1.0
    """Weight of the distance to the mean of the class's prototypes (UPCR); 1 in the paper."""
    summed: bool = False
    """Sum that squared distance over dimensions, as the paper's text does, instead of the authors' code's mean."""

    sends: ClassVar[tuple[str, ...]] = ("prototypes",)
    ranges: ClassVar[Mapping[str, str]] = {"temperature": "0.02,0.05,0.1"}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model = modules["model"]
        assert isinstance(model, Classifier)
        features = model.encoder(x)  # (B, Z)
        total = ce = ctx.cross_entropy(model.head(features), y)
        terms = {"ce": ce}
        if "clusters" not in ctx.received:
            return Losses(total, terms)
        prototypes, classes = ctx.received["clusters"]["prototypes"], ctx.received["clusters"]["classes"]
        if self.contrast_weight:
            terms["contrast"] = cluster_contrast(features, y, prototypes, classes, self.temperature)
            total = total + self.contrast_weight * terms["contrast"]
        if self.consistency_weight:
            unbiased, known = (
                means_by(classes, prototypes, ctx.num_classes),
                classes.bincount(minlength=ctx.num_classes),
            )
            distance = prototype_distance(features, y, unbiased, known > 0)
            terms["consistency"] = distance * features.shape[-1] if self.summed else distance
            total = total + self.consistency_weight * terms["consistency"]
        return Losses(total, terms)

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        model = modules["model"]
        assert isinstance(model, Classifier)
        sums = class_sums(model.encoder, data, like=model.head.weight)
        return {"prototypes": {"means": class_means(sums), "held": sums["counts"] > 0}}

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        means, local = self.merge(replies, ctx, keep=lambda reply: reply.arrays["prototypes"])
        return ServerState(ctx.round, {**means, "clusters": clustered(local)})


def clustered(local: Iterable[Arrays]) -> Arrays:
    """The mean of every cluster of the clients' prototypes of a class (J, Z), and their classes (J,)."""
    kept = list(local)
    means, held = torch.stack([each["means"] for each in kept]), torch.stack([each["held"] for each in kept])
    prototypes, classes = [], []
    for label in range(means.shape[1]):
        if held[:, label].any():
            own = means[held[:, label], label]  # (K', Z)
            clusters = first_neighbours(own)
            prototypes.append(means_by(clusters, own, int(clusters.max()) + 1))
            classes += [label] * len(prototypes[-1])
    return {"prototypes": torch.cat(prototypes), "classes": torch.tensor(classes)}
