"""The generator: label and noise in, a representation out. It stands for q(z|y), the global distribution."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        """BatchNorm uses the batch's statistics and remembers them, uses them only, or uses the remembered ones."""
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
        """Noise for so many samples, drawn on the CPU and moved to the generator's device."""
        drawn = (torch.randn if kind == "gaussian" else torch.rand)(count, self.noise, generator=rng)
        return drawn.to(self.outer.weight.device)


def logits_of_heads(z: Tensor, heads: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What every client's head, a weight and a bias, says of the same representations: (K, B, C), in one product."""
    weights = torch.stack([weight for weight, _ in heads])  # (K, C, Z)
    biases = torch.stack([bias for _, bias in heads])  # (K, C)
    return torch.baddbmm(biases.unsqueeze(1), z.expand(len(heads), -1, -1), weights.mT)


def all_classes(num_classes: int, samples: int) -> Tensor:
    """Labels of one batch that holds every class equally, classes in order (C * S,)."""
    return torch.arange(num_classes).repeat_interleave(samples)
