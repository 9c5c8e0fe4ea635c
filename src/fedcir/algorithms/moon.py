"""MOON: a client's features stay near the global model's and away from those of its own last model.

The features are the encoder's, so that the network is that of all other methods; `projection=256` puts the paper's
projection head between encoder and classifier. A client's first round has no last model, and so no contrast, as in
round 1 of the authors' code.

Q. Li, B. He, D. Song. Model-Contrastive Federated Learning. CVPR 2021. https://arxiv.org/abs/2103.16257
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch
from fedcir.models.adapters import load_trained, snapshot_trained
from fedcir.models.builder import NetworkBuilder
from fedcir.types import Groups, LocalContext, Losses, Modules
from fedcir.validation import Between, Positive, Weight


@dataclass(frozen=True)
class Moon(Algorithm):
    """Li et al., CVPR 2021. https://arxiv.org/abs/2103.16257"""

    mu: Weight = 1.0
    """Weight of the contrast; 0 is FedAvg."""
    temperature: Positive = 0.5
    """Divides the similarities: tau in the paper."""
    projection: Annotated[int, Between(0, 16_384)] = 0
    """Width of the features after a projection head, 256 in the paper; 0 leaves it out."""

    remembers = ("last",)
    ranges = {"mu": "0.1,1,5,10"}

    def build(self, builder: NetworkBuilder) -> Modules:
        return {name: builder.classifier(self.projection) for name in ("model", "global", "last")}

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        modules["global"].load_state_dict(modules["model"].state_dict())
        if "last" in ctx.client_state:
            load_trained(modules["last"], ctx.client_state["last"])

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        z = modules["model"].encoder(x)  # (B, Z), or maps of features
        loss = ctx.loss(modules["model"].head(z), y)
        if not self.mu or "last" not in ctx.client_state:
            return Losses(loss, {ctx.loss_name: loss})
        with torch.no_grad():
            near, away = modules["global"].encoder(x), modules["last"].encoder(x)
        z, near, away = (features.flatten(1) for features in (z, near, away))
        similar = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, away)], 1)  # (B, 2)
        contrast = F.cross_entropy(similar / self.temperature, torch.zeros(len(z), dtype=torch.int64, device=z.device))
        return Losses(loss + self.mu * contrast, {ctx.loss_name: loss, "contrast": contrast})

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {"last": snapshot_trained(modules["model"])}
