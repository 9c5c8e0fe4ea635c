"""FedFA: training varies the statistics of features at random, as widely as they differ within and between clients.

At the end of each of the encoder's stages, mean and standard deviation of a channel within an image become those of a
Gaussian around them. Its variance is that over the batch at hand, more for channels in which clients differ.

T. Zhou, E. Konukoglu. FedFA: Federated Feature Augmentation. ICLR 2023. https://arxiv.org/abs/2301.12995
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies
from fedcir.losses import channel_statistics, replace_statistics, widen_variance
from fedcir.models.builder import NetworkBuilder
from fedcir.models.networks import FeatureStatistics, find_stage_ends, transform_stages
from fedcir.models.tensors import snapshot
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState
from fedcir.validation import Between, Fraction


@dataclass(frozen=True)
class FedFA(Algorithm):
    """Zhou and Konukoglu, ICLR 2023. https://arxiv.org/abs/2301.12995"""

    probability: Annotated[float, Between(0, 1)] = 0.5
    """How likely a stage changes the features of a batch; 0 is FedAvg."""
    momentum: Fraction = 0.99
    """Share of the old value in each update of a client's running statistics: alpha."""

    keeps = ("statistics",)
    sends = ("feature_statistics",)
    ranges = {"probability": "0.25,0.5,0.75", "momentum": "0.9,0.99"}

    def build(self, builder: NetworkBuilder) -> Modules:
        model = builder.classifier()
        ends = {} if builder.example is None else find_stage_ends(model.encoder, builder.example)
        return {"model": model, "statistics": FeatureStatistics(ends)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        over_clients = ctx.broadcast.get("feature_variances", {})

        def augment_features(stage: int, features: Tensor) -> Tensor:
            if float(torch.rand((), generator=ctx.rng)) >= self.probability:
                return features
            mean, std = channel_statistics(features)  # each (B, C)
            modules["statistics"][stage].update(mean, std, self.momentum)
            drawn = []
            for name, value in (("mean", mean), ("std", std)):
                noise = torch.randn(value.shape, generator=ctx.rng).to(value.device)
                drawn.append(value + noise * widen_variance(value, over_clients.get(f"{stage}.{name}")).sqrt())
            return replace_statistics(features, mean, std, *drawn)

        with transform_stages(modules["model"].encoder, modules["statistics"].places, augment_features):
            return super().local_loss(modules, x, y, ctx)

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {"feature_statistics": snapshot(modules["statistics"])}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, collected = self.merge(replies, ctx, keep=lambda reply: reply.tensors["feature_statistics"])
        stacked = {name: torch.stack([statistics[name] for statistics in collected]) for name in collected[0]}
        variances = {name: values.var(0, correction=0) for name, values in stacked.items()}
        return ServerState(ctx.round, {**means, "feature_variances": variances})
