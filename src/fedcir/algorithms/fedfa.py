"""FedFA: training varies the statistics of features at random, as widely as they differ within and between clients.

At the end of each of the encoder's stages, mean and standard deviation of a channel within an image become those of a
Gaussian around them. Its variance is that over the batch at hand, more for channels in which clients differ.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch
from fedcir.config import Between, Share
from fedcir.losses import channel_statistics, restyled, widened
from fedcir.models.encoder import Classifier
from fedcir.models.stages import FeatureStatistics, Running, changed_at, stage_ends
from fedcir.models.task import Task
from fedcir.models.tensors import snapshot
from fedcir.types import ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState


@dataclass(frozen=True)
class FedFA(Algorithm):
    """Zhou and Konukoglu, ICLR 2023. https://arxiv.org/abs/2301.12995"""

    probability: Annotated[float, Between(0, 1)] = 0.5
    """How likely a stage changes the features of a batch; 0 is FedAvg."""
    momentum: Share = 0.99
    """Share of the old value in each update of a client's running statistics: alpha."""

    keeps: ClassVar[tuple[str, ...]] = ("statistics",)
    sends: ClassVar[tuple[str, ...]] = ("feature_statistics",)
    ranges: ClassVar[Mapping[str, str]] = {"probability": "0.25,0.5,0.75", "momentum": "0.9,0.99"}

    def build(self, task: Task) -> Modules:
        model = task.classifier()
        ends = {} if task.example is None else stage_ends(model.encoder, task.example)
        return {"model": model, "statistics": FeatureStatistics(ends)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model, statistics = modules["model"], modules["statistics"]
        assert isinstance(model, Classifier)
        assert isinstance(statistics, FeatureStatistics)
        over_clients = ctx.received.get("feature_variances", {})

        def augmented(stage: int, features: Tensor) -> Tensor:
            if float(torch.rand((), generator=ctx.rng)) >= self.probability:
                return features
            mean, std = channel_statistics(features)  # each (B, C)
            running = statistics[stage]
            assert isinstance(running, Running)
            running.update(mean, std, self.momentum)
            drawn = []
            for name, value in (("mean", mean), ("std", std)):
                noise = torch.randn(value.shape, generator=ctx.rng).to(value.device)
                drawn.append(value + noise * widened(value, over_clients.get(f"{stage}.{name}")).sqrt())
            return restyled(features, mean, std, *drawn)

        with changed_at(model.encoder, statistics.places, augmented):
            return super().local_loss(modules, x, y, ctx)

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {"feature_statistics": snapshot(modules["statistics"])}

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        means, kept = self.merge(replies, ctx, keep=lambda reply: reply.arrays["feature_statistics"])
        variances = {name: torch.stack([each[name] for each in kept]).var(0, correction=0) for name in kept[0]}
        return ServerState(ctx.round, {**means, "feature_variances": variances})
