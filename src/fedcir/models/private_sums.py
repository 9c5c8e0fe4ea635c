"""Differential privacy of sums over examples: features of bounded norm, and discrete Gaussian noise on exact sums.

An example adds vv' to the sums, where v is its features, of norm `clip` at most, and its one-hot label. The diagonal of
vv' and sqrt(2) times the entries above it are a vector of norm |v|^2, which is at most clip^2 + 1. So noise of this
standard deviation, times the noise multiplier, on the diagonal, and 1 / sqrt(2) of it above, is one Gaussian mechanism.
Noise is drawn as integers, on the grid of the sums, so that no digits of a float tell what it hides.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.models.closed_form import add_sums, triangle_width
from fedcir.types import ExampleNoise, Tensors

GRID = 2.0**15
"""Features are rounded to multiples of 1 / GRID, so that sums of products are multiples of its square, as noise is."""
SHRINK = 1 - 2.0**-40
"""Factor that outweighs the rounding errors of the scale to the clip."""
TAIL = 20.0
"""Standard deviations of noise that the server allows for in an entry of a reply."""
SHARE = 0.5
"""Ridge penalty as a share of the largest eigenvalue of the noise; chosen on validation images of PACS."""


class RandomProjection(nn.Module):
    """An encoder whose features are projected to `width` numbers by a random matrix, and scaled to length 1.

    Before that, square roots are taken (power normalisation, F. Perronnin, J. Sanchez, T. Mensink, ECCV 2010), and each
    example is centred by the mean of its own features. Nothing here depends on data.
    """

    matrix: Tensor

    def __init__(self, encoder: nn.Module, features: int, width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("matrix", torch.randn(features, width, generator=rng) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)  # (B, F)
        z = z.sign() * z.abs().sqrt()
        return F.normalize((z - z.mean(1, keepdim=True)) @ self.matrix, dim=1)


def bound_rows(rows: Iterable[tuple[Tensor, Tensor]], clip: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Scale features down to a norm of `clip`, and round them towards 0. One that is not finite counts as 0.

    It raises no error, because an error would tell of an example without noise.
    """
    for z, labels in rows:
        norms = torch.linalg.vector_norm(z.double(), dim=1, keepdim=True)
        scale = (clip / norms.clamp_min(1e-300)).clamp_max(1.0) * SHRINK
        bounded = torch.where(norms.isfinite(), z.double() * scale, 0.0)
        yield (bounded * GRID).trunc() / GRID, labels


def sum_deviation(noise: ExampleNoise) -> float:
    """Standard deviation of the noise on the diagonal of the sums."""
    return noise.multiplier * (noise.clip**2 + 1)


def add_noise(sums: Tensors, noise: ExampleNoise, rng: np.random.Generator) -> Tensors:
    """Add noise to exact sums of the rows of `bound_rows`; the result has their form."""
    width = triangle_width(len(sums["high"]))
    row, column = torch.triu_indices(width, width)
    units = sum_deviation(noise) * GRID**2
    drawn = np.empty(len(row), np.int64)
    is_diagonal = (row == column).numpy()
    drawn[is_diagonal] = draw_discrete_gaussian(units, width, rng)
    drawn[~is_diagonal] = draw_discrete_gaussian(units / math.sqrt(2), len(row) - width, rng)
    values = torch.from_numpy(drawn)  # in units of 2^-30, where `low` counts 2^-60 and `high` 2^-18
    return add_sums(sums, {"high": values >> 12, "low": (values & 0xFFF) << 30})


def draw_discrete_gaussian(deviation: float, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw integers with probabilities in proportion to exp(-x^2 / (2 deviation^2)), by rejection.

    C. Canonne, G. Kamath, T. Steinke. The Discrete Gaussian for Differential Privacy. NeurIPS 2020, Algorithms 2 and 3.
    Integers are drawn exactly; probabilities to accept them are computed in double precision.
    """
    scale = math.floor(deviation) + 1
    drawn = np.empty(0, np.int64)
    while len(drawn) < count:
        size = 2 * (count - len(drawn)) + 16
        remainder = rng.integers(scale, size=size)
        remainder = remainder[rng.random(size) < np.exp(-remainder / scale)]
        magnitude = remainder + scale * (rng.geometric(1 - math.exp(-1), len(remainder)) - 1)  # discrete Laplace
        is_negative = rng.integers(2, size=len(magnitude)) == 1
        accepted = rng.random(len(magnitude)) < np.exp(-((magnitude - deviation**2 / scale) ** 2) / (2 * deviation**2))
        accepted &= ~(is_negative & (magnitude == 0))
        drawn = np.concatenate([drawn, np.where(is_negative, -magnitude, magnitude)[accepted]])
    return drawn[:count]


def are_noised_sums(high: Tensor, low: Tensor, noise: ExampleNoise, examples: int) -> bool:
    """Check whether these can be noised sums over so many examples: parts in their range, no entry too large."""
    most = examples * max(noise.clip, 1.0) ** 2 + TAIL * sum_deviation(noise) + 1
    return bool(((low >= 0) & (low < 1 << 42)).all() and (high.double().abs() * 2.0**-18 <= most).all())


def choose_penalty(noise: ExampleNoise, releases: int, features: int, examples: float) -> float:
    """Ridge penalty for sums of several noised releases: a share of the largest eigenvalue of their mean noise.

    The largest eigenvalue of a symmetric (F, F) matrix with noise of standard deviation s above its diagonal is about
    2 s sqrt(F).
    """
    deviation = sum_deviation(noise) / math.sqrt(2)
    return SHARE * 2 * deviation * math.sqrt(releases * features) / max(examples, 1.0)
