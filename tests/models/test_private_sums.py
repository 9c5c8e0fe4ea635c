"""Noise on sums over examples: what one example can change, and the distribution of the noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcir.models.closed_form import FeatureSums, gram_sums, is_gram
from fedcir.models.private_sums import (
    GRID,
    RandomProjection,
    add_noise,
    are_noised_sums,
    bound_rows,
    choose_penalty,
    draw_discrete_gaussian,
    sum_deviation,
)
from fedcir.types import ExampleNoise, Tensors

FEATURES, CLASSES = 6, 3
ONE = ExampleNoise(clip=1.0, multiplier=1.0)


def to_units(sums: Tensors) -> list[int]:
    """The integers in units of 2^-60."""
    return [int(high) * 2**42 + int(low) for high, low in zip(sums["high"], sums["low"], strict=True)]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=FEATURES, max_size=FEATURES),
    st.integers(0, CLASSES - 1),
    st.sampled_from([0.3, 1.0, 2.5]),
)
def test_one_example_changes_the_weighted_sums_by_the_sensitivity_at_most(
    values: list[float], label: int, clip: float
) -> None:
    z, y = torch.tensor([values], dtype=torch.double), torch.tensor([label])
    sums = gram_sums(bound_rows([(z, y)], clip), FEATURES, CLASSES)
    row, column = torch.triu_indices(FEATURES + CLASSES, FEATURES + CLASSES)
    weights = [1 if i == j else 2 for i, j in zip(row.tolist(), column.tolist(), strict=True)]  # sqrt(2) squared
    squared = sum(weight * value**2 for weight, value in zip(weights, to_units(sums), strict=True))
    limit = int((clip**2 + 1) * 2**60)
    assert squared <= limit**2
    if np.linalg.norm(values) >= clip:
        assert squared >= ((1 - 1e-3) * limit) ** 2, "the bound is reached"


def test_the_sums_of_bounded_rows_lie_on_the_grid_of_the_noise() -> None:
    z = torch.randn(50, FEATURES, generator=torch.Generator().manual_seed(0))
    sums = gram_sums(bound_rows([(z, torch.arange(50) % CLASSES)], 1.0), FEATURES, CLASSES)
    assert all(value % 2**30 == 0 for value in to_units(sums)), "lower digits would have no noise"
    noised = add_noise(sums, ONE, np.random.default_rng(0))
    assert all(value % 2**30 == 0 for value in to_units(noised))


def test_features_that_are_not_finite_count_as_zero_and_raise_no_error() -> None:
    z = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [3.0, 4.0], [1e38, 1e38]])
    ((bounded, _),) = bound_rows([(z, torch.zeros(4))], 1.0)
    assert bounded[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert torch.allclose(bounded[2:], torch.tensor([[0.6, 0.8], [0.5**0.5] * 2]).double(), atol=1 / GRID)


def test_the_noise_is_half_as_large_in_variance_above_the_diagonal() -> None:
    width, noise = 300, ExampleNoise(clip=1.0, multiplier=2.0)
    zero = gram_sums([], width, 1)
    noised = FeatureSums.from_exact(add_noise(zero, noise, np.random.default_rng(1)), width)
    assert torch.equal(noised.gram, noised.gram.T)
    above = noised.gram[torch.triu(torch.ones(width, width), 1) > 0]
    assert above.std().item() == pytest.approx(4 / math.sqrt(2), rel=0.02)
    assert noised.gram.diagonal().std().item() == pytest.approx(4.0, rel=0.15)
    assert not is_gram(*add_noise(zero, noise, np.random.default_rng(1)).values())


@pytest.mark.parametrize("deviation", [0.7, 3.0])
def test_drawn_integers_have_the_probabilities_of_the_discrete_gaussian(deviation: float) -> None:
    drawn = draw_discrete_gaussian(deviation, 200_000, np.random.default_rng(0))
    support = np.arange(-20, 21)
    expected = np.exp(-(support**2) / (2 * deviation**2))
    expected /= expected.sum()
    counted = np.array([(drawn == value).mean() for value in support])
    assert np.abs(counted - expected).max() < 4 * math.sqrt(0.25 / 200_000)


def test_a_wide_discrete_gaussian_is_a_gaussian() -> None:
    from scipy.stats import kstest

    deviation = 4.0 * 2**30
    drawn = draw_discrete_gaussian(deviation, 20_000, np.random.default_rng(0))
    assert kstest(drawn / deviation, "norm").pvalue > 0.01
    assert len(np.unique(drawn % 1024)) == 1024, "the low digits are noise too"


def test_the_server_takes_noised_sums_and_nothing_larger() -> None:
    z = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(0))
    exact = gram_sums(bound_rows([(z, torch.arange(20) % CLASSES)], 1.0), FEATURES, CLASSES)
    noised = add_noise(exact, ONE, np.random.default_rng(0))
    assert are_noised_sums(noised["high"], noised["low"], ONE, 20)
    assert not are_noised_sums(noised["high"] + (100 << 18), noised["low"], ONE, 20)
    assert not are_noised_sums(noised["high"], noised["low"] - (1 << 42), ONE, 20)


def test_the_penalty_is_half_the_largest_eigenvalue_of_the_noise() -> None:
    noise, width, releases, examples = ExampleNoise(1.0, 3.0), 200, 4, 1000.0
    rng, total = np.random.default_rng(0), torch.zeros(width, width, dtype=torch.double)
    for _ in range(releases):
        total += FeatureSums.from_exact(add_noise(gram_sums([], width, 1), noise, rng), width).gram
    largest = float(torch.linalg.eigvalsh(total / examples)[-1])
    assert choose_penalty(noise, releases, width, examples) == pytest.approx(largest / 2, rel=0.05)
    assert sum_deviation(noise) == 6.0


def test_projected_features_have_length_one_and_keep_angles() -> None:
    rng = torch.Generator().manual_seed(0)
    encoder = RandomProjection(torch.nn.Identity(), 2000, 1000, rng)
    x = torch.randn(2, 2000, generator=rng)
    z = encoder(torch.cat([x, 9 * x]))
    assert torch.allclose(z.norm(dim=1), torch.ones(4))
    assert torch.allclose(z[:2], z[2:], atol=1e-6), "the scale of an input does not matter"
    power = x.sign() * x.abs().sqrt()
    power = power - power.mean(1, keepdim=True)
    assert float(z[0] @ z[1]) == pytest.approx(float(torch.cosine_similarity(*power, dim=0)), abs=0.1)
