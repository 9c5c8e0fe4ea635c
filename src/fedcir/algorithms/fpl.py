"""FPL: features are drawn to several prototypes of their class, one for each cluster of clients.

The server clusters the clients' prototypes of a class by FINCH. A client contrasts its features with the prototypes of
all clusters, and draws them to the plain mean over the clusters of their class, which no frequent domain dominates.

W. Huang, M. Ye, Z. Shi, H. Li, B. Du. Rethinking Federated Learning with Domain Shift: A Prototype View. CVPR 2023.
https://github.com/WenkeHuang/RethinkFL
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.losses import cluster_contrast, first_neighbours, prototype_distance
from fedcir.models.classifier import Classifier, mean_by_class, mean_by_label, sum_by_class
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import Positive, Weight


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

    needs_classes = True
    sends = ("prototypes",)
    ranges = {"temperature": "0.02,0.05,0.1"}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model: Classifier = modules["model"]
        features = model.encoder(x)  # (B, Z)
        total = ce = ctx.cross_entropy(model.head(features), y)
        terms = {"ce": ce}
        if "clusters" not in ctx.broadcast:
            return Losses(total, terms)
        prototypes, classes = (ctx.broadcast["clusters"][name] for name in ("prototypes", "classes"))
        if self.contrast_weight:
            terms["contrast"] = cluster_contrast(features, y, prototypes, classes, self.temperature)
            total = total + self.contrast_weight * terms["contrast"]
        if self.consistency_weight:
            unbiased = mean_by_label(classes, prototypes, ctx.num_classes)
            distance = prototype_distance(features, y, unbiased, classes.bincount(minlength=ctx.num_classes) > 0)
            terms["consistency"] = distance * features.shape[-1] if self.summed else distance
            total = total + self.consistency_weight * terms["consistency"]
        return Losses(total, terms)

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        model = modules["model"]
        sums = sum_by_class(model.encoder, data, like=model.head.weight)
        return {"prototypes": {"means": mean_by_class(sums), "held": sums["counts"] > 0}}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, local = self.merge(replies, ctx, keep=lambda reply: reply.tensors["prototypes"])
        return ServerState(ctx.round, {**means, "clusters": cluster_prototypes(local)})


def cluster_prototypes(local: Iterable[Tensors]) -> Tensors:
    """The mean of every cluster of the clients' prototypes of a class (J, Z), and their classes (J,)."""
    collected = list(local)
    means, is_present = (torch.stack([summary[name] for summary in collected]) for name in ("means", "held"))
    prototypes, classes = [], []
    for label in range(means.shape[1]):
        if is_present[:, label].any():
            class_means = means[is_present[:, label], label]  # (K', Z)
            clusters = first_neighbours(class_means)
            prototypes.append(mean_by_label(clusters, class_means, int(clusters.max()) + 1))
            classes += [label] * len(prototypes[-1])
    return {"prototypes": torch.cat(prototypes), "classes": torch.tensor(classes)}
