"""How near representations are to the global q(z|y), and how well the generator's Gaussians stand for the true ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedcir.analysis.bootstrap import RESAMPLES, Draws, Interval, interval, mean_of, weights
from fedcir.analysis.views import View
from fedcir.losses import gaussian_kl
from fedcir.types import Arrays


@dataclass(frozen=True)
class Alignment:
    """KL divergences in nats, summed over z."""

    client_intervals: dict[str, Interval]
    """Of each client's p(z|x) to q(z|y), on average over its samples: what L_align is."""
    mean: Interval
    """Their mean over clients."""
    generator_interval: Interval | None
    """Of the true class Gaussians, over all clients together, to the generator's, on average over the classes that have
    two samples at least. A true one has the moments of z given y: mean E[mu(x)], variance Var[mu(x)] + E[sigma(x)^2].
    Only a simulation can know it."""
    dimensions: int
    """Of z."""

    @property
    def clients(self) -> dict[str, float]:
        return {name: each.value for name, each in self.client_intervals.items()}

    @property
    def generator(self) -> float:
        return float("nan") if self.generator_interval is None else self.generator_interval.value


def alignment(views: Sequence[View], gaussians: Arrays, seed: int = 0) -> Alignment | None:
    """None where the encoder gives no sigma."""
    kls = {}
    for view in views:
        if view.sigma is None:
            return None
        y = torch.from_numpy(view.labels)
        mean, std = gaussians["mean"][y], gaussians["std"][y]
        kls[view.domain] = gaussian_kl(torch.from_numpy(view.z), torch.from_numpy(view.sigma), mean, std).numpy()
    each = {name: mean_of({name: kl}, seed) for name, kl in kls.items()}
    return Alignment(each, mean_of(kls, seed), _generator(views, gaussians, seed), gaussians["mean"].shape[1])


def _generator(views: Sequence[View], gaussians: Arrays, seed: int) -> Interval | None:
    mu, sigma, labels = (np.concatenate([getattr(view, name) for view in views]) for name in ("z", "sigma", "labels"))
    values: list[float] = []
    spreads: list[Draws] = []
    for label in np.unique(labels):
        class_mu, class_sigma = (torch.from_numpy(part[labels == label]).double() for part in (mu, sigma))  # (N, Z)
        if len(class_mu) < 2:
            continue
        target = gaussians["mean"][label].double(), gaussians["std"][label].double()
        whole = torch.full((1, len(class_mu)), 1.0, dtype=torch.float64)
        again = torch.from_numpy(weights(f"class {label}", len(class_mu), seed)).double()
        kl = gaussian_kl(*_moments(class_mu, class_sigma, torch.cat([whole, again])), *target).numpy()
        values.append(float(kl[0]))
        spreads.append(kl[1:] - np.median(kl[1:]))
    if not values:
        return None
    # A class's sigma is smaller in a resample than in the sample, which lifts every KL: only their spread is used.
    spread = np.mean(spreads, axis=0).reshape(RESAMPLES)
    return interval(float(np.mean(values)), np.mean(values) + spread)


def _moments(mu: torch.Tensor, sigma: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and standard deviations (R, Z) of z, from N samples' Gaussians (N, Z) weighted in R ways (R, N)."""
    centre = mu.mean(0)
    total = weight.sum(1, keepdim=True)
    mean = weight @ (mu - centre) / total
    variance_of_mu = (weight @ (mu - centre) ** 2 / total - mean**2).clamp_min(0)
    return mean + centre, (variance_of_mu + weight @ sigma**2 / total).sqrt()
