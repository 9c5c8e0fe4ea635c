"""Ditto: beside the global model, each client trains a personal one that is drawn to it.

Algorithm 1 of the paper, with FedAvg as the method of the global model. On every batch of a round a client takes a step
of its personal model, from where its last round left it, and one of the received model, as the authors' code does.

T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021.
https://arxiv.org/abs/2012.04221
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcir.algorithms.algorithm import PERSONAL, Algorithm, Batch
from fedcir.losses import proximal
from fedcir.models.adapters import load_trained, snapshot_trained
from fedcir.models.builder import NetworkBuilder
from fedcir.models.optimizers import RoundOptimizer
from fedcir.models.tensors import trained_parameters
from fedcir.types import Groups, LocalContext, Modules
from fedcir.validation import Weight


@dataclass(frozen=True)
class Ditto(Algorithm):
    """Li et al., ICML 2021. https://arxiv.org/abs/2012.04221"""

    lambda_personal: Weight = 1.0
    """Weight of half the squared distance of the personal model to the received one: lambda; 0 is training alone."""

    remembers = (PERSONAL,)
    ranges = {"lambda_personal": "0.1,1,2"}

    def build(self, builder: NetworkBuilder) -> Modules:
        return {name: builder.classifier() for name in ("model", PERSONAL)}

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        load_trained(modules[PERSONAL], ctx.client_state.get(PERSONAL) or modules["model"].state_dict())

    def local_update(
        self, modules: Modules, batches: Iterable[Batch], optimizer: RoundOptimizer, ctx: LocalContext
    ) -> dict[str, float]:
        model, personal = modules["model"], modules[PERSONAL]
        for layer, like in zip(personal.modules(), model.modules(), strict=True):
            layer.training = like.training
        own = optimizer.with_parameters(personal.parameters())
        losses: list[Tensor] = []

        def train_personal() -> Iterator[Batch]:
            for x, y in batches:
                with ctx.autocast():
                    loss = self.personal_loss(personal, x, y, ctx)
                own.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                own.step()
                losses.append(loss.detach())
                yield x, y

        means = super().local_update(modules, train_personal(), optimizer, ctx)
        return {**means, PERSONAL: float(torch.stack(losses).mean())}

    def personal_loss(self, personal: nn.Module, x: Tensor, y: Tensor, ctx: LocalContext) -> Tensor:
        """F_k(v) + lambda / 2 ||v - w||^2, where w is the received model."""
        trained = trained_parameters(personal)
        distance = proximal(trained.values(), (ctx.broadcast["model"][name] for name in trained))
        return ctx.loss(personal(x), y) + self.lambda_personal * distance

    def local_finish(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        return {PERSONAL: snapshot_trained(modules[PERSONAL])}
