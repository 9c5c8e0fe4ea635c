"""What might keep FedCiR's generator where representations are, behind one switch each.

Only `benchmarks/generators.py` uses it. Sources: moments of z as in data-free distillation (Yin et al., 2020,
https://arxiv.org/abs/1912.08795), calibration of the head (Luo et al., 2021, https://arxiv.org/abs/2106.05001), the
correction by label shares (Ren et al., 2020, https://arxiv.org/abs/2007.10740), class means along the head's rows
(Papyan et al., 2020, https://arxiv.org/abs/2008.08186).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.algorithms.fedavg import FedAvg
from fedcir.algorithms.fedcir import FedCiR
from fedcir.losses import class_gaussians, gaussian_kl, mixture_nll
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Generator, apply_heads, make_balanced_labels, sample
from fedcir.models.optimizers import Adam
from fedcir.models.tensors import snapshot
from fedcir.types import ClientReply, Groups, LocalContext, Losses, Modules, ServerContext, ServerState, Tensors

Head = tuple[Tensor, Tensor]
SMALLEST_SPREAD = 0.05
TEMPERATURE = 0.1
ORACLE: dict[str, Tensor] = {}
"""What the oracle sees: real training images of all clients and classes, (C, S, ...)."""


def log_shares(ctx: LocalContext) -> Tensor:
    """The client's label shares, (C,), as logarithms; a class that it does not hold hardly counts."""
    return (ctx.class_counts / ctx.class_counts.sum()).clamp_min(1e-8).log()


class Corrected(FedAvg):
    """FedAvg with its cross-entropy corrected by the client's label shares."""

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        loss = F.cross_entropy(modules["model"](x) + log_shares(ctx), y)
        return Losses(loss, {"ce": loss})


@dataclass(frozen=True)
class Variant(FedCiR):
    """FedCiR with what might keep its generator where representations are. All off, it is FedCiR."""

    prior: float = 0.0
    """Strength of the correction of the client's cross-entropy by its own label shares."""
    source: Literal["generator", "oracle", "dual"] = "generator"
    """Who makes representations: the generator, real images, or class directions of the mean head."""
    ground: float = 0.0
    """Weight of the KL of the generated batch's mean and spread to those of real z."""
    sphere: bool = False
    """Whether real and generated z are scaled to one length."""
    align_share: float = 0.0
    """The alignment's weight is set so that it is this share of the cross-entropy; 0 leaves `lambda_align`."""
    calibrate: int = 0
    """Steps of the server on the mean head, on generated representations."""
    between: float = 0.5
    """The share of the spread of z that lies between classes (dual)."""
    anchor: float = 0.0
    """Weight of the cross-entropy of the client's z under the head that it received: it reaches the encoder only."""
    contrast: float = 0.0
    """Weight of the cross-entropy of cosines of z to generated class means, over all classes."""
    rows: bool = False
    """Whether the mean of the heads weighs each client's row of a class by how far the client moved it."""
    generator_batch: int = 32
    """Generated representations of a step of the generator."""

    def build(self, builder: NetworkBuilder) -> Modules:
        modules = super().build(builder)
        modules["model"].statistics = nn.BatchNorm1d(builder.latent, affine=False)
        return modules

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model = modules["model"]
        mu, sigma = self.encode(model, x)
        z = sample(mu, sigma, ctx.rng)
        with torch.no_grad():
            model.statistics(z)
        logits = model.head(z)
        total = loss = F.cross_entropy(logits + self.prior * log_shares(ctx) if self.prior else logits, y)
        terms = {"ce": loss}
        if self.lambda_reg and ("generator" in ctx.broadcast or "pool" in ctx.broadcast):
            labels = torch.randint(ctx.num_classes, y.shape, generator=ctx.rng)
            with torch.no_grad():
                generated = self.generated(modules, labels, ctx.broadcast, ctx.rng)
            terms["reg"] = F.cross_entropy(model.head(generated), labels)
            total = total + self.lambda_reg * terms["reg"]
        if (self.lambda_align or self.align_share) and "gaussians" in ctx.broadcast:
            gaussians = ctx.broadcast["gaussians"]
            terms["align"] = gaussian_kl(mu, sigma, gaussians["mean"][y], gaussians["std"][y]).mean()
            weight: float | Tensor = self.lambda_align
            if self.align_share:
                weight = self.align_share * loss.detach() / terms["align"].detach()
            total = total + weight * terms["align"]
        if self.anchor:
            head = ctx.broadcast["model"]
            terms["anchor"] = F.cross_entropy(F.linear(z, head["head.weight"], head["head.bias"]), y)
            total = total + self.anchor * terms["anchor"]
        if self.contrast and "gaussians" in ctx.broadcast:
            means = ctx.broadcast["gaussians"]["mean"]  # (C, Z)
            about, towards = F.normalize(z - means.mean(0), dim=-1), F.normalize(means - means.mean(0), dim=-1)
            terms["contrast"] = F.cross_entropy(about @ towards.T / TEMPERATURE, y)
            total = total + self.contrast * terms["contrast"]
        return Losses(total, terms)

    def encode(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, sigma = model.encoder(x)
        return (self.on_sphere(mu) if self.sphere else mu), sigma

    def on_sphere(self, z: Tensor) -> Tensor:
        return F.normalize(z, dim=-1) * z.shape[-1] ** 0.5

    def generated(self, modules: Modules, labels: Tensor, received: Groups, rng: torch.Generator) -> Tensor:
        if "pool" in received:
            pool = received["pool"]["z"]  # (C, S, Z)
            return pool[labels, torch.randint(pool.shape[1], labels.shape, generator=rng)]
        generator = modules["generator"]
        z = generator(generator.draw(len(labels), rng), labels, self.generator_statistics)
        return self.on_sphere(z) if self.sphere else z

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        means, models = self.merge(
            replies, ctx, keep=lambda reply: {n: t for n, t in reply.tensors["model"].items() if "encoder" not in n}
        )
        heads = [(model["head.weight"], model["head.bias"]) for model in models]
        centre = torch.stack([model["statistics.running_mean"] for model in models])
        spread = torch.stack([model["statistics.running_var"] for model in models])
        mean = centre.mean(0)
        std = (spread + centre.square()).mean(0).sub(mean.square()).clamp_min(SMALLEST_SPREAD**2).sqrt()
        generator = modules["generator"]
        generator.load_state_dict(state.private["generator"])
        optimizer = state.private["optimizer"]
        if self.rows:
            means["model"] |= moved_rows(state.shared["model"], models)
        shared = dict(means)
        labels = make_balanced_labels(ctx.num_classes, self.gaussian_samples)
        if self.source == "generator":
            optimizer = self.teach(generator, heads, mean, std, optimizer, ctx)
            with torch.no_grad():
                z = generator(generator.draw(len(labels), ctx.rng), labels, "batch")
                z = self.on_sphere(z) if self.sphere else z
            z = z.view(ctx.num_classes, self.gaussian_samples, -1)
            shared["generator"] = snapshot(generator)
        else:
            real = self.source == "oracle"
            z = self.real(modules["model"], means["model"], ctx) if real else self.dual(means, mean, std, ctx)
            shared["pool"] = {"z": z}
        shared["gaussians"] = dict(zip(("mean", "std"), class_gaussians(z, self.gaussian_floor), strict=True))
        if self.calibrate:
            shared["model"] = self.calibrated(means["model"], modules, shared, ctx)
        private = {"generator": snapshot(generator), "optimizer": optimizer}
        return ServerState(ctx.round, shared, private)

    def teach(
        self,
        generator: Generator,
        heads: list[tuple[Tensor, Tensor]],
        mean: Tensor,
        std: Tensor,
        state: Tensors,
        ctx: ServerContext,
    ) -> Tensors:
        optimizer = Adam(generator.parameters(), self.generator_lr, state)
        for _ in range(self.generator_steps):
            labels = torch.randint(ctx.num_classes, (self.generator_batch,), generator=ctx.rng)
            z = generator(generator.draw(self.generator_batch, ctx.rng), labels, "update")
            z = self.on_sphere(z) if self.sphere else z
            loss = mixture_nll(apply_heads(z, heads), labels)
            if self.ground:
                own = z.std(0, correction=0).clamp_min(SMALLEST_SPREAD)
                loss = loss + self.ground * gaussian_kl(z.mean(0), own, mean, std) / len(mean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return optimizer.state

    def real(self, model: nn.Module, arrays: Tensors, ctx: ServerContext) -> Tensor:
        """Representations of real images of every class, by the mean model: (C, S, Z)."""
        model.load_state_dict(arrays)
        images = ORACLE["images"]  # (C, S, ...)
        with torch.no_grad():
            mu, sigma = self.encode(model.eval(), images.flatten(0, 1))
        return sample(mu, sigma, ctx.rng).view(*images.shape[:2], -1)

    def dual(self, means: Groups, mean: Tensor, std: Tensor, ctx: ServerContext) -> Tensor:
        """Class means along the mean head's rows, as neural collapse has them, within the spread of real z."""
        rows = means["model"]["head.weight"]
        towards = F.normalize(rows - rows.mean(0), dim=-1) * (self.between * std.square().sum()).sqrt()  # (C, Z)
        noise = torch.randn(len(rows), self.gaussian_samples, len(mean), generator=ctx.rng)
        return mean + towards.unsqueeze(1) + (1 - self.between) ** 0.5 * std * noise

    def calibrated(self, model: Tensors, modules: Modules, shared: Groups, ctx: ServerContext) -> Tensors:
        """The mean model with its head trained on generated representations of all classes."""
        head = [model["head.weight"].clone().requires_grad_(), model["head.bias"].clone().requires_grad_()]
        optimizer = Adam(head, 1e-3, {})
        for _ in range(self.calibrate):
            labels = torch.randint(ctx.num_classes, (128,), generator=ctx.rng)
            with torch.no_grad():
                z = self.generated(modules, labels, shared, ctx.rng)
            optimizer.zero_grad()
            F.cross_entropy(F.linear(z, *head), labels).backward()
            optimizer.step()
        return {**model, "head.weight": head[0].detach(), "head.bias": head[1].detach()}

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        model = modules["model"]
        logits: Tensor = model.head(self.encode(model, x)[0])
        return logits


def moved_rows(before: Tensors, models: list[Tensors]) -> Tensors:
    """The head that clients came to from the one before, each row weighted by its way: absent classes do not move."""
    names = ("head.weight", "head.bias")
    ways = [torch.stack([model[name] - before[name] for model in models]) for name in names]  # (K, C, Z), (K, C)
    weights = ways[0].norm(dim=-1)
    weights = weights / weights.sum(0).clamp_min(1e-12)  # (K, C)
    return {
        "head.weight": before["head.weight"] + (weights.unsqueeze(-1) * ways[0]).sum(0),
        "head.bias": before["head.bias"] + (weights * ways[1]).sum(0),
    }
