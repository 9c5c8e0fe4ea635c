"""Linear heads in closed form, from sums over examples that are exact, so that they do not depend on their order.

A client sends the Gram matrix of its features and one-hot labels. Values are rounded to multiples of 2^-30 and summed
as integers: the total of a federation has the same bits for any partition, and can be subtracted from.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir.errors import InputError
from fedcir.types import Tensors

BITS = 21
"""Bits of a part of a rounded value: products of two parts, summed over 2,048 rows, are exact in double precision."""
SCALE = 2.0**30
LIMIT = 2.0**11
"""Largest feature value; with SCALE, a rounded value has two parts of BITS bits."""
ROWS = 2048
MASK = (1 << BITS) - 1


def gram_sums(rows: Iterable[tuple[Tensor, Tensor]], features: int, classes: int) -> Tensors:
    """Exact Gram matrix of [features, one-hot labels], its upper triangle, as two parts of each integer.

    `rows` yields features (B, F) and labels (B,). The integers are `high` * 2^42 + `low`, in units of 2^-60.
    """
    width = features + classes
    parts = torch.zeros(3, width, width, dtype=torch.int64)
    for chunk in _join_rows(rows, classes):
        rounded = (chunk * SCALE).round()
        high = (rounded / 2**BITS).floor()
        low = rounded - high * 2**BITS
        mixed = high.T @ low
        parts += torch.stack([high.T @ high, mixed + mixed.T, low.T @ low]).long()
    upper = torch.triu_indices(width, width)
    high, middle, low = parts[:, upper[0], upper[1]]
    middle += low >> BITS
    return {"high": high + (middle >> BITS), "low": (middle & MASK) << BITS | low & MASK}


def _join_rows(rows: Iterable[tuple[Tensor, Tensor]], classes: int) -> Iterator[Tensor]:
    """Yield features and one-hot labels side by side, ROWS examples at a time, however large the batches are."""
    pending: list[Tensor] = []
    for z, labels in rows:
        values = torch.cat([z.double().cpu(), F.one_hot(labels.cpu(), classes).double()], dim=1)
        if not (values.abs() < LIMIT).all():
            raise InputError(f"features must be finite and below {LIMIT:g} in size: standardise or rescale the inputs")
        pending.append(values)
        if sum(map(len, pending)) >= ROWS:
            yield from torch.split(torch.cat(pending), ROWS)
            pending = []
    if pending:
        yield from torch.split(torch.cat(pending), ROWS)


def add_sums(first: Tensors, second: Tensors) -> Tensors:
    """Add two exact sums; the result has the form of `gram_sums`."""
    low = first["low"] + second["low"]
    return {"high": first["high"] + second["high"] + (low >> 2 * BITS), "low": low & ((1 << 2 * BITS) - 1)}


def is_gram(high: Tensor, low: Tensor) -> bool:
    """Whether these can be exact sums: parts in their range, and no entry larger than the diagonal allows."""
    if ((low < 0) | (low >= 1 << 2 * BITS)).any() or (high.abs() > 1 << 52).any():
        return False
    width = triangle_width(len(high))
    row, column = torch.triu_indices(width, width)
    diagonal = high[row == column].double()
    bound = (diagonal[row] + 1).clamp_min(0).sqrt() * (diagonal[column] + 1).clamp_min(0).sqrt() + 1
    return bool((diagonal >= 0).all() and (high.double().abs() <= bound).all())


def count_examples(sums: Tensors, classes: int) -> float:
    return float(class_counts(sums, classes).sum())


def class_counts(sums: Tensors, classes: int) -> Tensor:
    """Number of examples of each class (C,): the sums of the squared one-hot labels, which end the diagonal."""
    row, column = torch.triu_indices(*[triangle_width(len(sums["high"]))] * 2)
    high, low = (sums[half][row == column][-classes:].double() for half in ("high", "low"))
    return high * 2.0**-18 + low * 2.0**-60


def triangle_width(entries: int) -> int:
    """Width of the matrix whose upper triangle has so many entries."""
    return (math.isqrt(8 * entries + 1) - 1) // 2


@dataclass(frozen=True)
class FeatureSums:
    """Sums over examples: features z, and their products with each other and with one-hot labels."""

    gram: Tensor  # (F, F), sum of z z'
    cross: Tensor  # (F, C), sum of z by class
    counts: Tensor  # (C,)

    @classmethod
    def from_exact(cls, sums: Tensors, features: int) -> "FeatureSums":
        values = sums["high"].double() * 2.0**-18 + sums["low"].double() * 2.0**-60
        width = triangle_width(len(values))
        matrix = torch.zeros(width, width, dtype=torch.double)
        row, column = torch.triu_indices(width, width)
        matrix[row, column] = matrix[column, row] = values
        return cls(matrix[:features, :features], matrix[:features, features:], matrix.diagonal()[features:])

    @property
    def total(self) -> float:
        return float(self.counts.sum())

    @property
    def mean(self) -> Tensor:
        return self.cross.sum(1) / max(self.total, 1.0)

    @property
    def spread(self) -> Tensor:
        """Standard deviation of each feature; 1 where a feature is constant."""
        variance = self.gram.diagonal() / max(self.total, 1.0) - self.mean.square()
        floor = 1e-12 * (1 + self.mean.square())
        return torch.where(variance > floor, variance.clamp_min(0).sqrt(), 1.0)

    def standardise(self, mean: Tensor, scale: Tensor) -> "FeatureSums":
        """Sums of (z - mean) / scale over the same examples."""
        total = self.cross.sum(1)
        gram = self.gram - torch.outer(total, mean) - torch.outer(mean, total) + self.total * torch.outer(mean, mean)
        cross = self.cross - torch.outer(mean, self.counts)
        return FeatureSums(gram / torch.outer(scale, scale), cross / scale.unsqueeze(1), self.counts)

    def __add__(self, other: "FeatureSums") -> "FeatureSums":
        return FeatureSums(self.gram + other.gram, self.cross + other.cross, self.counts + other.counts)

    def __mul__(self, weight: float) -> "FeatureSums":
        return FeatureSums(self.gram * weight, self.cross * weight, self.counts * weight)

    def project(self, basis: Tensor) -> "FeatureSums":
        """Sums of basis' z, for a basis (F, D)."""
        return FeatureSums(basis.T @ self.gram @ basis, basis.T @ self.cross, self.counts)


@dataclass(frozen=True)
class LinearHead:
    weight: Tensor  # (C, F)
    bias: Tensor  # (C,)

    def squared_error(self, sums: FeatureSums) -> float:
        """Sum over examples of the squared distance between one-hot label and output."""
        z = sums.cross.sum(1)
        with_label = (self.weight * sums.cross.T).sum() + (self.bias * sums.counts).sum()
        output = (self.weight @ sums.gram * self.weight).sum() + 2 * self.bias @ self.weight @ z
        return float(sums.total - 2 * with_label + output + sums.total * self.bias.square().sum())


class RidgePath:
    """Ridge regression of one-hot labels with an intercept, for any penalty, from one eigendecomposition.

    It minimises the mean squared error plus `penalty` times the squared norm of the weights.
    """

    def __init__(self, sums: FeatureSums) -> None:
        self.sums, self.total = sums, sums.total
        self.mean, self.shares = sums.mean, sums.counts / sums.total
        self.covariance = sums.gram / self.total - torch.outer(self.mean, self.mean)
        self.targets = sums.cross / self.total - torch.outer(self.mean, self.shares)  # (F, C)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues of the covariance, ascending (F,), eigenvectors (F, F), and the targets in their basis (F, C)."""
        try:
            values, vectors = torch.linalg.eigh(self.covariance)
        except RuntimeError:  # divide and conquer may fail on a matrix of low rank; QR iteration does not
            from scipy.linalg import eigh

            values, vectors = map(torch.from_numpy, eigh(self.covariance.numpy(), driver="ev"))
        return values.clamp_min(0), vectors, vectors.T @ self.targets

    @property
    def label_variance(self) -> float:
        """Mean variance of the one-hot labels over classes: the error of a head that knows the shares only."""
        return float((self.shares * (1 - self.shares)).mean())

    def fit(self, penalty: float) -> LinearHead:
        values, vectors, targets = self.eigen
        return self._add_bias(vectors @ (targets / (values + penalty).unsqueeze(1)))

    def fit_once(self, penalty: float) -> LinearHead:
        """The same head without an eigendecomposition, in a tenth of its time; the penalty must be above 0."""
        matrix = self.covariance + penalty * torch.eye(len(self.covariance), dtype=torch.double)
        return self._add_bias(torch.cholesky_solve(self.targets, torch.linalg.cholesky(matrix)))

    def _add_bias(self, weight: Tensor) -> LinearHead:
        return LinearHead(weight.T, self.shares - weight.T @ self.mean)

    def expected_error(self, penalty: float, validation: FeatureSums | None) -> float:
        """Squared error to expect of a new example: on validation sums, or by generalised cross-validation."""
        if validation is None or not validation.total:
            return self.cross_validation_error(penalty)
        return self.fit(penalty).squared_error(validation) / validation.total

    def cross_validation_error(self, penalty: float) -> float:
        """Generalised cross-validation (Golub, Heath and Wahba, 1979): the error to expect on new examples."""
        values = self.eigen[0]
        freedom = float((values / (values + penalty)).sum()) + 1
        if freedom >= self.total:
            return float("inf")
        return self.fit(penalty).squared_error(self.sums) / self.total / (1 - freedom / self.total) ** 2

    def fit_discriminant(self, penalty: float, uniform: bool) -> LinearHead:
        """Linear discriminant analysis, with `penalty` added to the variances; priors uniform or as observed.

        A class without examples gets the bias of a tenth of an example.
        """
        counts = self.sums.counts
        means = (self.sums.cross / counts.clamp_min(1)).T - self.mean * (counts > 0).double().unsqueeze(1)  # (C, F)
        scatter = self.covariance - (means.T * (counts / self.total)) @ means
        inverse = torch.linalg.solve(scatter + penalty * torch.eye(len(scatter), dtype=torch.double), means.T)  # (F, C)
        prior = torch.where(counts > 0, torch.zeros_like(counts), -1e3) if uniform else counts.clamp_min(0.1).log()
        bias = prior - 0.5 * (means * inverse.T).sum(1) - inverse.T @ self.mean
        return LinearHead(inverse.T.contiguous(), bias)
