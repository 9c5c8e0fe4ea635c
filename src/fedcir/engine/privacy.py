"""Client-level differential privacy: updates are clipped and summed, and Gaussian noise is added to the sum.

DP-FedAvg (McMahan et al., ICLR 2018, https://arxiv.org/abs/1710.06963) with the adaptive clipping of Andrew et al.
(NeurIPS 2021, https://arxiv.org/abs/1905.03871). Two runs are adjacent if one has one client more. The mean divides
by the expected number of active clients, which is no secret, and never by the replies that came. Epsilon is Opacus'.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, PrivacyConfig
from fedcir.models.tensors import is_statistic
from fedcir.types import ClientReply, Groups, InputError

QUANTILE, RATE = 0.5, 0.2
"""Of the norms, which an adaptive clip moves to, and how fast: gamma and eta_C of Andrew et al."""


@dataclass
class PrivateMean:
    """The noised mean of clipped updates, and the norm that the next round clips to."""

    settings: PrivacyConfig
    clip: float
    expected: int
    """How many clients take part in a round on average."""
    rng: np.random.Generator

    def released(self, replies: Iterable[ClientReply], before: Groups) -> Iterator[ClientReply]:
        """All that a method sees of a round: the noised mean, as the reply of every client that was expected."""
        mean = self.of((reply.arrays for reply in replies), before)
        for client in range(self.expected):
            yield ClientReply(client, 1, mean, {})

    def of(self, replies: Iterable[Groups], before: Groups) -> Groups:
        """What was sent out, moved by the noised mean of the updates. A client that did not reply has moved nothing."""
        sums = {
            group: {name: torch.zeros_like(t, dtype=torch.double) for name, t in bag.items() if is_private(name, t)}
            for group, bag in before.items()
        }
        within = 0.0
        for arrays in replies:
            norm = math.sqrt(sum(float((arrays[g][n].double() - before[g][n]).square().sum()) for g, n in _names(sums)))
            scale = min(1.0, self.clip / norm) if norm else 1.0
            within += 0.5 if norm <= self.clip else -0.5
            for g, n in _names(sums):
                sums[g][n].add_(arrays[g][n].double() - before[g][n], alpha=scale)
        on_sum, on_count = self._multipliers()
        for g, n in _names(sums):
            noise = torch.as_tensor(self.rng.standard_normal(sums[g][n].shape))
            sums[g][n].add_(noise, alpha=on_sum * self.clip).div_(self.expected).add_(before[g][n])
        if self.settings.adaptive:
            within += on_count * self.rng.standard_normal()
            self.clip *= math.exp(-RATE * (within / self.expected + 0.5 - QUANTILE))
        return {
            g: {n: sums[g][n].to(t.dtype) if n in sums[g] else t for n, t in bag.items()} for g, bag in before.items()
        }

    def _multipliers(self) -> tuple[float, float]:
        """Of the noise on the sum, in clips, and on the count of +-1/2: both together cost what `noise` alone does."""
        z = self.settings.noise
        if not (z and self.settings.adaptive):
            return z, 0.0
        on_count = max(self.expected / 20, z)  # a twentieth in the paper; with few clients that would be too little
        return (z**-2 - (2 * on_count) ** -2) ** -0.5, on_count


def is_private(name: str, tensor: torch.Tensor) -> bool:
    """Whether clients may change it. BatchNorm's statistics are frozen, and integers only count steps."""
    return tensor.is_floating_point() and not is_statistic(name)


def _names(groups: Groups) -> Iterator[tuple[str, str]]:
    """In an order that a resume, which reads tensors by name, has too."""
    return ((group, name) for group in sorted(groups) for name in sorted(groups[group]))


def check_private(config: Config, algorithm: Algorithm, uploads: Groups) -> None:
    """Refuse what clipping and noise do not cover."""
    if not (config.privacy.by_server or config.privacy.by_clients):
        return
    name = config.algorithm.name
    if algorithm.sends:
        raise InputError(
            f"{name} uploads {', '.join(algorithm.sends)} beside what it trains, which privacy.clip does not cover: "
            "use a method that uploads its model only, such as fedavg, fedcir or fedcirplus"
        )
    if config.model.batchnorm != "frozen" and any(is_statistic(name) for bag in uploads.values() for name in bag):
        raise InputError(
            "privacy.clip cannot cover BatchNorm's running statistics, which noise would make useless: "
            "set model.norm=group, or model.batchnorm=local, which leaves them with the clients"
        )
