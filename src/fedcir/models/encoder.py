"""The two classifiers: a deterministic encoder, or a Gaussian one, each under one linear head.

Both are `encoder.*` plus `head.weight` and `head.bias`, so that a server finds every client's head by name.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.losses import log_mean_probability


class Classifier(nn.Module):
    """Features, then one linear layer."""

    def __init__(self, encoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

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
            # At the start mu is the features themselves, where it can be, and sigma is sigma_init whatever the input:
            # all methods start from the same function.
            if latent == gaussian.in_features:
                nn.init.eye_(gaussian.weight[:latent])
                nn.init.zeros_(gaussian.bias[:latent])
            nn.init.zeros_(gaussian.weight[latent:])
            nn.init.constant_(gaussian.bias[latent:], math.log(math.expm1(sigma_init - sigma_floor)))  # softplus^-1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, raw = self.gaussian(self.backbone(x)).chunk(2, dim=-1)
        return mu, F.softplus(raw) + self.sigma_floor  # each (B, Z)


def sample(mu: Tensor, sigma: Tensor, rng: torch.Generator) -> Tensor:
    """One z for each Gaussian, by reparameterisation."""
    return mu + sigma * torch.randn(mu.shape, generator=rng).to(mu.device)


def samples(mu: Tensor, sigma: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Several z of each Gaussian (S, B, Z), for inference.

    All images share the noise, so that what is predicted of one does not depend on the others of its batch.
    """
    noise = torch.randn(count, 1, mu.shape[-1], generator=rng).to(mu.device)
    return mu + sigma * noise


class GaussianClassifier(nn.Module):
    """A Gaussian encoder under a linear head. Its forward pass is inference: the head on z = mu."""

    def __init__(self, encoder: GaussianEncoder, head: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        mu, _ = self.encoder(x)
        return cast(Tensor, self.head(mu))

    def predict(self, x: Tensor, count: int, rng: torch.Generator) -> Tensor:
        """Logits of z = mu, or the log of the mean probability over `count` samples of z."""
        if not count:
            return self.forward(x)
        mu, sigma = self.encoder(x)
        return log_mean_probability(self.head(samples(mu, sigma, count, rng)))
