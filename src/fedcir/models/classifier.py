"""Networks of an encoder, deterministic or Gaussian, under the task's head; generators and class prototypes.

Both are `encoder.*` plus `head.weight` and `head.bias`, so that a server finds every client's head by name.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.losses import log_mean_probability
from fedcir.tasks.task import Head
from fedcir.types import Tensors


class Classifier(nn.Module):
    """Features, then the task's head: one linear layer, or a 1x1 convolution of maps."""

    def __init__(self, encoder: nn.Module, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.encoder(x)))


class ProjectedEncoder(nn.Module):
    """A backbone under the projection head of MOON and FedProc: two linear layers with a ReLU between them."""

    def __init__(self, backbone: nn.Module, features: int, width: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, width))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.projection(self.backbone(x)))


class NormalisedEncoder(nn.Module):
    """An encoder whose features have length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.encoder(x), dim=-1)


class GaussianEncoder(nn.Module):
    """p(z|x) = N(mu(x), diag sigma(x)^2): a linear layer on a backbone's features gives mu and the raw sigma."""

    def __init__(self, backbone: nn.Module, gaussian: nn.Linear, sigma_init: float, sigma_floor: float) -> None:
        super().__init__()
        self.backbone = backbone
        self.gaussian = gaussian
        self.sigma_floor = sigma_floor
        latent = gaussian.out_features // 2
        with torch.no_grad():
            # Initially mu equals the features, if widths agree, and sigma is sigma_init for every input, so that all
            # methods start from the same function.
            if latent == gaussian.in_features:
                nn.init.eye_(gaussian.weight[:latent])
                nn.init.zeros_(gaussian.bias[:latent])
            nn.init.zeros_(gaussian.weight[latent:])
            nn.init.constant_(gaussian.bias[latent:], math.log(math.expm1(sigma_init - sigma_floor)))  # softplus^-1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, raw = self.gaussian(self.backbone(x)).chunk(2, dim=-1)
        return mu, F.softplus(raw) + self.sigma_floor  # each (B, Z)


def sample(mu: Tensor, sigma: Tensor, rng: torch.Generator) -> Tensor:
    """Draw one z from each Gaussian, by reparameterisation."""
    return mu + sigma * torch.randn(mu.shape, generator=rng).to(mu.device)


class GaussianClassifier(nn.Module):
    """A Gaussian encoder under a linear head. Its forward pass is inference: the head on z = mu."""

    def __init__(self, encoder: GaussianEncoder, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor) -> Tensor:
        mu, _ = self.encoder(x)
        return cast(Tensor, self.head(mu))

    def predict(self, x: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """Return logits of z = mu, or the log of the mean probability over `count` samples of z.

        All images share the noise, so that the prediction for one does not depend on the others of its batch.
        """
        if not count:
            return self.forward(x)
        mu, sigma = self.encoder(x)
        noise = torch.randn(count, 1, mu.shape[-1], generator=rng).to(mu.device)
        return log_mean_probability(self.head(mu + sigma * noise))  # of z (S, B, Z)


class Reference(nn.Module):
    """r(z|y): a learned Gaussian per class, and the authors' scalar C that z may be scaled by."""

    def __init__(self, num_classes: int, latent: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(num_classes, latent))
        self.raw_sigma = nn.Parameter(torch.ones(num_classes, latent))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean[y], F.softplus(self.raw_sigma[y])  # each (B, Z)


class Generator(nn.Module):
    """[noise, onehot(y)] -> Linear -> BatchNorm -> ReLU -> Linear -> z."""

    def __init__(self, num_classes: int, latent: int, noise: int, hidden: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.noise = noise
        # No bias: BatchNorm subtracts it, so its gradient is rounding noise, which Adam would scale up to full steps.
        self.inner = nn.Linear(noise + num_classes, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden)
        self.outer = nn.Linear(hidden, latent)

    def forward(
        self, noise: Tensor, labels: Tensor, statistics: Literal["update", "batch", "running"] = "running"
    ) -> Tensor:
        """BatchNorm uses and stores the statistics of the batch, only uses them, or uses the stored ones."""
        hidden = self.inner(torch.cat([noise, F.one_hot(labels, self.num_classes).to(noise.dtype)], dim=1))
        norm = self.norm
        if statistics == "running":
            hidden = F.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias, False)
        elif statistics == "batch":
            hidden = F.batch_norm(hidden, None, None, norm.weight, norm.bias, True)
        else:
            hidden = norm.train()(hidden)
        return cast(Tensor, self.outer(F.relu(hidden)))  # (B, Z)

    def draw(self, count: int, rng: torch.Generator, kind: Literal["gaussian", "uniform"] = "gaussian") -> Tensor:
        """Draw noise for `count` samples on the CPU, and move it to the generator's device."""
        noise = (torch.randn if kind == "gaussian" else torch.rand)(count, self.noise, generator=rng)
        return noise.to(self.outer.weight.device)


def apply_heads(z: Tensor, heads: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the logits (K, B, C) of every client's head, a weight and a bias, on the same representations (B, Z)."""
    weights = torch.stack([weight for weight, _ in heads])  # (K, C, Z)
    biases = torch.stack([bias for _, bias in heads])  # (K, C)
    return torch.baddbmm(biases.unsqueeze(1), z.expand(len(heads), -1, -1), weights.mT)


def make_balanced_labels(num_classes: int, per_class: int) -> Tensor:
    """Return labels of a batch with `per_class` samples of each class, in order, (C * S,)."""
    return torch.arange(num_classes).repeat_interleave(per_class)


class Prototypes(nn.Module):
    """The mean feature of each class, and the number of samples that it is the mean of."""

    mean: Tensor
    count: Tensor

    def __init__(self, num_classes: int, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_classes, features))
        self.register_buffer("count", torch.zeros(num_classes))

    @property
    def known(self) -> Tensor:
        """Whether each class has a prototype, (C,)."""
        return self.count > 0


class LabelCounter(nn.Module):
    """Number of samples of each class that a client trained on in this round."""

    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(num_classes))

    def add(self, labels: Tensor) -> None:
        self.counts += labels.bincount(minlength=len(self.counts))


def sum_by_class(features: Callable[[Tensor], Tensor], data: Iterable[tuple[Tensor, Tensor]], like: Tensor) -> Tensors:
    """Sum features (C, Z) and count samples (C,) by class, on the CPU; `like` is a head's weight (C, Z)."""
    sums, counts = torch.zeros(like.shape), torch.zeros(len(like))
    for x, y in data:
        sums.index_add_(0, y.cpu(), features(x).cpu())
        counts += torch.bincount(y.cpu(), minlength=len(like))
    return {"sums": sums, "counts": counts}


def mean_by_class(summary: Tensors) -> Tensor:
    """Return the prototypes (C, Z) of a client; those of classes without samples are zero."""
    return summary["sums"] / summary["counts"].clamp_min(1).unsqueeze(-1)


def mean_by_label(labels: Tensor, points: Tensor, count: int) -> Tensor:
    """Return the mean of the points (N, Z) of each label below `count`, (count, Z); zero without points."""
    sums = points.new_zeros(count, points.shape[-1]).index_add_(0, labels, points)
    return sums / labels.bincount(minlength=count).clamp_min(1).unsqueeze(-1)
