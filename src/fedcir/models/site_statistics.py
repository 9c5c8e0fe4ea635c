"""Statistics of sites that standardise features: of sums, in the model, and of a new site."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedcir.models.closed_form import FeatureSums, LinearHead
from fedcir.types import ExampleNoise, Groups, Tensors

PRIOR_IMAGES = 20
"""Weight of the federation's statistics beside those of a new site, in images (docs/use.md)."""


@dataclass
class SitePool:
    """Sums of sites, which are standardised and added up as they come."""

    kind: str
    features: int
    noise: ExampleNoise | None
    balance: str
    train: FeatureSums | None = None
    held: FeatureSums | None = None
    """Over validation examples."""
    pooled: FeatureSums | None = None
    """Of training examples as they are."""
    statistics: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Mean and spread by the key of a site."""

    def add(self, key: int, site: Groups) -> None:
        """Standardise the sums of a site by its own statistics, and add them."""
        features = self.features
        sums = FeatureSums.from_exact(site["train"], features)
        if self.noise is not None:
            sums = replace(sums, counts=sums.counts.clamp_min(0))
        if not sums.total:
            return
        zero, one = torch.zeros(features, dtype=torch.double), torch.ones(features, dtype=torch.double)
        # Noise exceeds the spread of a projected feature, and a random projection makes spreads alike.
        spread = sums.spread if self.noise is None else one
        statistics = self.statistics[key] = (zero, one) if self.kind == "none" else (sums.mean, spread)
        part = sums.standardise(*statistics) * (1 / sums.total if self.balance == "domains" else 1.0)
        self.train = part if self.train is None else self.train + part
        self.pooled = sums if self.pooled is None else self.pooled + sums
        if "validation" in site:
            other = FeatureSums.from_exact(site["validation"], features).standardise(*statistics)
            self.held = other if self.held is None else self.held + other


@dataclass(frozen=True)
class StandardisedHead:
    """A head with the statistics that standardise its features."""

    kind: str
    error: float
    head: LinearHead
    fallback: tuple[Tensor, Tensor]
    """Mean and spread for sites that have none of their own."""
    statistics: dict[int, tuple[Tensor, Tensor]]

    def tensors(self) -> Tensors:
        features = self.head.weight.shape[1]
        means = [mean for mean, _ in self.statistics.values()]
        scales = [scale for _, scale in self.statistics.values()]
        values = {
            "encoder.mean": self.fallback[0],
            "encoder.scale": self.fallback[1],
            "encoder.site_means": torch.stack(means) if means else torch.zeros(0, features),
            "encoder.site_scales": torch.stack(scales) if scales else torch.ones(0, features),
            "head.weight": self.head.weight,
            "head.bias": self.head.bias,
        }
        keys = torch.tensor(list(self.statistics), dtype=torch.int64)
        return {**{name: tensor.float() for name, tensor in values.items()}, "encoder.site_keys": keys}


class StandardisedEncoder(nn.Module):
    """An encoder whose features are standardised by the statistics of a site, or of the federation.

    Sites are found by a key. Their number follows the tensors that are loaded.
    """

    mean: Tensor
    scale: Tensor
    site_keys: Tensor
    site_means: Tensor
    site_scales: Tensor

    def __init__(self, encoder: nn.Module, features: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("site_keys", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("site_means", torch.zeros(0, features))
        self.register_buffer("site_scales", torch.ones(0, features))

    def forward(self, x: Tensor, keys: Sequence[int] = ()) -> Tensor:
        mean, scale = self.statistics(keys)
        features: Tensor = (self.encoder(x) - mean) / scale
        return features

    def statistics(self, keys: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Mean and spread of the site with one of these keys, or of the federation if there is none."""
        site = torch.stack([self.site_keys == key for key in keys]).any(0) if keys else self.site_keys < 0  # (K,)
        mean = torch.where(site.any(), site.float() @ self.site_means, self.mean)
        return mean, torch.where(site.any(), site.float() @ self.site_scales, self.scale)

    def adapt(self, features: Tensor) -> None:
        """Standardise all images by the statistics of a new site, from its features (N, F) before standardising."""
        self.mean, self.scale = shrink_statistics(features, self.mean, self.scale)
        self.resize(0)

    def resize(self, sites: int) -> None:
        """Make room for the statistics of so many sites."""
        self.site_keys = self.site_keys.new_zeros(sites)
        self.site_means = self.site_means.new_zeros(sites, len(self.mean))
        self.site_scales = self.site_scales.new_ones(sites, len(self.mean))

    def _load_from_state_dict(self, state_dict: Tensors, prefix: str, *args: Any) -> None:
        keys = state_dict.get(f"{prefix}site_keys")
        if keys is not None and keys.ndim == 1:
            self.resize(len(keys))
        super()._load_from_state_dict(state_dict, prefix, *args)


def shrink_statistics(features: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of features (N, F), shrunk towards `mean` and `scale` as N is small.

    Means and variances are averaged, where `mean` and `scale` count as PRIOR_IMAGES images.
    """
    share, values = len(features) / (len(features) + PRIOR_IMAGES), features.double()
    variance = torch.lerp(scale.double().square(), values.var(0, correction=0), share)
    return torch.lerp(mean.double(), values.mean(0), share).to(mean), variance.sqrt().to(scale)


def fit_site_count(network: nn.Module, tensors: Tensors) -> None:
    """Give a network's standardised encoder as many sites as these tensors have."""
    keys, encoder = tensors.get("encoder.site_keys"), getattr(network, "encoder", None)
    if isinstance(encoder, StandardisedEncoder) and keys is not None and keys.ndim == 1:
        encoder.resize(len(keys))


def drop_site_statistics(tensors: Tensors) -> Tensors:
    """Leave out the statistics of sites, whose number is not known before training."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("encoder.site_")}
