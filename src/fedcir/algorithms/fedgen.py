"""FedGen: a generator that the clients' heads teach distils their knowledge back into each client.

The server weighs each client's head by its share of the class, for which clients upload label counts. Defaults are
those of FedCiR's paper, which compares with FedGen; fields give what the authors' code does instead.

Z. Zhu, J. Hong, J. Zhou. Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021.
https://arxiv.org/abs/2105.10056
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Batch, Replies, get_head
from fedcir.losses import class_shares, decay_value, distillation_kl, diversity, teacher_loss
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Classifier, Generator, LabelCounter, apply_heads
from fedcir.models.optimizers import Adam
from fedcir.models.tensors import snapshot
from fedcir.types import Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import Count, Decay, LearningRate, Weight, Width


@dataclass(frozen=True)
class FedGen(Algorithm):
    """Zhu et al., 2021. https://arxiv.org/abs/2105.10056"""

    lambda_kd: Weight = 1.0
    """Weight of the KL of the prediction to that on a generated feature of the same class."""
    lambda_reg: Weight = 0.5
    """Weight of the cross-entropy on generated features."""
    diversity_weight: Weight = 1.0
    """Weight of the server's term against a generator that ignores its noise: eta."""
    noise: Width = 64
    """Dimensions of the generator's noise."""
    noise_kind: Literal["gaussian", "uniform"] = "gaussian"
    """The noise: as in FedCiR's generator, or uniform in [0, 1] as in the authors' code."""
    hidden: Width = 256
    """Width of the generator's hidden layer."""
    generator_steps: Count = 5
    """The server's steps on the generator in a round, as many as FedCiR's; the authors' code takes 50."""
    generator_lr: LearningRate = 1e-2
    """Learning rate of the generator's Adam, whose state lives across rounds."""
    generator_statistics: Literal["batch", "running"] = "running"
    """How the generator's BatchNorm works on clients: with statistics of the batch, or with those of the server."""
    generator_lr_decay: Decay = 1.0
    """Factor of the generator's learning rate from round to round; the authors' code has 0.98."""
    generator_weight_decay: Weight = 0.0
    """Weight decay of the generator's Adam; the authors' code has 0.01."""
    generator_labels: Literal["all", "active"] = "all"
    """Labels that the server trains the generator on: all, or those that clients of the round count, as the authors'
    code does."""
    lambda_decay: Decay = 1.0
    """Factor of lambda_kd and lambda_reg from round to round; the authors' code has 0.98."""
    label_counts: Literal["dataset", "batches"] = "dataset"
    """What clients count labels in: all their training data, or the batches of the round, as the authors' code does."""

    needs_classes = True
    sends = ("label_counts",)
    ranges = {"lambda_kd": "0.5,1", "lambda_reg": "0.5,1"}

    def build(self, builder: NetworkBuilder) -> Modules:
        generator = builder.generator(builder.features, self.noise, self.hidden)
        counter = {"counter": LabelCounter(builder.num_classes)} if self.label_counts == "batches" else {}
        return {"model": builder.classifier(), "generator": generator, **counter}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        private = {"generator": snapshot(modules["generator"]), "optimizer": Tensors()}
        return ServerState(round=0, shared={"model": snapshot(modules["model"])}, private=private)

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        if "counter" in modules:
            modules["counter"].counts.zero_()

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model: Classifier = modules["model"]
        generator: Generator = modules["generator"]
        if "counter" in modules:
            modules["counter"].add(y)
        logits = model(x)
        ce = ctx.cross_entropy(logits, y)
        if "generator" not in ctx.broadcast:
            return Losses(ce, {"ce": ce})
        labels = torch.randint(ctx.num_classes, y.shape, generator=ctx.rng).to(y.device)
        with torch.no_grad():
            any_class = generator(generator.draw(len(y), ctx.rng, self.noise_kind), labels, self.generator_statistics)
            same_class = generator(generator.draw(len(y), ctx.rng, self.noise_kind), y, self.generator_statistics)
        reg = F.cross_entropy(model.head(any_class), labels)
        kd = distillation_kl(logits, model.head(same_class))
        lambda_reg = decay_value(self.lambda_reg, self.lambda_decay, ctx.round)
        lambda_kd = decay_value(self.lambda_kd, self.lambda_decay, ctx.round)
        return Losses(ce + lambda_reg * reg + lambda_kd * kd, {"ce": ce, "reg": reg, "kd": kd})

    def local_summary(self, modules: Modules, data: Iterable[Batch], ctx: LocalContext) -> Groups:
        if "counter" in modules:
            return {"label_counts": {"counts": modules["counter"].counts.cpu().clone()}}
        counts = torch.zeros(ctx.num_classes)
        for _, y in data:
            counts += torch.bincount(y.cpu(), minlength=ctx.num_classes)
        return {"label_counts": {"counts": counts}}

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, collected = self.merge(replies, ctx, lambda r: (get_head(r), r.tensors["label_counts"]["counts"]))
        counts = torch.stack([count for _, count in collected])  # (K, C)
        share = class_shares(counts, extra=1 if self.label_counts == "batches" else 0)  # as the authors' code counts
        classes = torch.arange(ctx.num_classes)
        if self.generator_labels == "active" and (counts > 0).any():
            classes = classes[(counts > 0).any(0)]
        heads = [head for head, _ in collected]
        generator: Generator = modules["generator"]
        generator.load_state_dict(state.private["generator"])
        lr = decay_value(self.generator_lr, self.generator_lr_decay, ctx.round)
        optimizer = Adam(generator.parameters(), lr, state.private["optimizer"], self.generator_weight_decay)
        for _ in range(self.generator_steps):
            labels = classes[torch.randint(len(classes), (ctx.batch_size,), generator=ctx.rng)]
            noise = generator.draw(ctx.batch_size, ctx.rng, self.noise_kind)
            z = generator(noise, labels, "update")  # (B, Z)
            loss = teacher_loss(apply_heads(z, heads), labels, share) + self.diversity_weight * diversity(noise, z)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        private = {"generator": snapshot(generator), "optimizer": optimizer.state}
        return ServerState(ctx.round, {**means, "generator": private["generator"]}, private)
