"""MOON: a client's features stay near the global model's and away from those of its own last model.

The paper's projection head is left out: the features are the encoder's. A client's first round has no last model, and
so no contrast.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedcir import Algorithm, Losses
from fedcir.algorithms.algorithm import Batch
from fedcir.models.encoder import Classifier
from fedcir.models.task import Task
from fedcir.models.tensors import snapshot
from fedcir.types import Groups, LocalContext, Modules


@dataclass(frozen=True)
class Moon(Algorithm):
    """Li et al., CVPR 2021. https://arxiv.org/abs/2103.16257"""

    mu: float = 1.0
    """Weight of the contrast; 0 is FedAvg."""
    temperature: float = 0.5
    """Divides the similarities: tau in the paper."""

    remembers: ClassVar[tuple[str, ...]] = ("last",)

    def build(self, task: Task) -> Modules:
        return {name: task.classifier() for name in ("model", "global", "last")}

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        modules["global"].load_state_dict(modules["model"].state_dict())
        if "last" in ctx.kept:
            modules["last"].load_state_dict(ctx.kept["last"])

    def local_loss(self, modules: Modules, x: torch.Tensor, y: torch.Tensor, ctx: LocalContext) -> Losses:
        model, everyone, last = modules["model"], modules["global"], modules["last"]
        assert isinstance(model, Classifier)
        z = model.encoder(x)  # (B, Z)
        ce = ctx.cross_entropy(model.head(z), y)
        if "last" not in ctx.kept:
            return Losses(ce, {"ce": ce})
        with torch.no_grad():
            near, away = everyone.encoder(x), last.encoder(x)
        similar = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, away)], 1)  # (B, 2)
        contrast = F.cross_entropy(similar / self.temperature, torch.zeros_like(y))
        return Losses(ce + self.mu * contrast, {"ce": ce, "contrast": contrast})

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {"last": snapshot(modules["model"])}
