import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from fedcir.errors import InputError
from fedcir.models.closed_form import FeatureSums, RidgePath, add_sums, gram_sums
from fedcir.models.site_statistics import StandardisedEncoder
from fedcir.types import Tensors

CLASSES, FEATURES = 3, 5


def draw(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(count, FEATURES, generator=rng) * torch.tensor([1, 10, 0.1, 3, 200]) + torch.arange(FEATURES)
    return z, torch.randint(CLASSES, (count,), generator=rng)


def sum_parts(z: torch.Tensor, labels: torch.Tensor, parts: list[list[int]]) -> Tensors:
    total = gram_sums([], FEATURES, CLASSES)
    for rows in parts:
        total = add_sums(total, gram_sums([(z[rows], labels[rows])], FEATURES, CLASSES))
    return total


def test_the_sums_are_exact() -> None:
    z, labels = torch.tensor([[0.5, -3.25], [7.125, 2.0**-20]]), torch.tensor([1, 0])
    sums = gram_sums([(z, labels)], 2, 2)
    whole = [int(h) * 2**42 + int(low) for h, low in zip(sums["high"], sums["low"], strict=True)]
    rows = [[Fraction(0.5), Fraction(-3.25), Fraction(0), Fraction(1)], [Fraction(7.125), Fraction(2.0**-20), 1, 0]]
    pairs = [(i, j) for i in range(4) for j in range(i, 4)]
    assert [Fraction(value, 2**60) for value in whole] == [sum(row[i] * row[j] for row in rows) for i, j in pairs]


@given(st.permutations(range(40)), st.lists(st.integers(0, 40), max_size=6))
def test_the_sums_have_the_same_bits_for_any_partition_and_order(order: list[int], cuts: list[int]) -> None:
    z, labels = draw(40)
    edges = sorted({0, 40, *cuts})
    parts = [order[begin:end] for begin, end in itertools.pairwise(edges)]
    expected = gram_sums([(z, labels)], FEATURES, CLASSES)
    sums = sum_parts(z, labels, parts)
    assert torch.equal(sums["high"], expected["high"])
    assert torch.equal(sums["low"], expected["low"])


def test_sums_over_more_rows_than_one_product_holds_are_exact() -> None:
    z = torch.full((5000, 1), 2047.875)
    sums = FeatureSums.from_exact(gram_sums([(z, torch.zeros(5000, dtype=torch.int64))], 1, 1), 1)
    assert float(sums.gram) == 5000 * 2047.875**2
    assert float(sums.cross) == 5000 * 2047.875


@pytest.mark.parametrize("value", [2048.0, -3e5, float("nan"), float("inf")])
def test_a_feature_that_cannot_be_summed_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="below 2048"):
        gram_sums([(torch.tensor([[value]]), torch.tensor([0]))], 1, 1)


def test_the_head_is_ridge_regression_on_the_pooled_features() -> None:
    z, labels = draw(200)
    path = RidgePath(FeatureSums.from_exact(gram_sums([(z, labels)], FEATURES, CLASSES), FEATURES))
    for penalty in (1e-3, 0.1, 10.0):
        head = path.fit(penalty)
        pooled = Ridge(alpha=200 * penalty).fit(z.double().numpy(), np.eye(CLASSES)[labels])
        assert np.abs(head.weight.numpy() - pooled.coef_).max() < 1e-8
        assert np.abs(head.bias.numpy() - pooled.intercept_).max() < 1e-8


def test_standardised_sums_are_sums_of_standardised_features() -> None:
    z, labels = draw(60)
    sums = FeatureSums.from_exact(gram_sums([(z, labels)], FEATURES, CLASSES), FEATURES)
    standardised = sums.standardise(sums.mean, sums.spread)
    by_hand = (z.double() - z.double().mean(0)) / z.double().std(0, correction=0)
    one_hot = torch.eye(CLASSES, dtype=torch.double)[labels]
    assert torch.allclose(standardised.gram, by_hand.T @ by_hand, atol=1e-6)
    assert torch.allclose(standardised.cross, by_hand.T @ one_hot, atol=1e-6)
    assert standardised.counts.tolist() == labels.bincount(minlength=CLASSES).tolist()


def test_a_constant_feature_has_spread_one() -> None:
    z = torch.cat([draw(9)[0], torch.full((9, 1), 1000.3)], dim=1)
    sums = FeatureSums.from_exact(gram_sums([(z, torch.zeros(9, dtype=torch.int64))], FEATURES + 1, 1), FEATURES + 1)
    assert float(sums.spread[-1]) == 1.0


def test_the_squared_error_comes_from_sums_alone() -> None:
    z, labels = draw(50)
    sums = FeatureSums.from_exact(gram_sums([(z, labels)], FEATURES, CLASSES), FEATURES)
    other, other_labels = draw(30, seed=1)
    held = FeatureSums.from_exact(gram_sums([(other, other_labels)], FEATURES, CLASSES), FEATURES)
    head = RidgePath(sums).fit(0.1)
    errors = other.double() @ head.weight.T + head.bias - torch.eye(CLASSES, dtype=torch.double)[other_labels]
    assert head.squared_error(held) == pytest.approx(float(errors.square().sum()), rel=1e-9)


def test_generalised_cross_validation_is_that_of_the_hat_matrix() -> None:
    z, labels = draw(20)
    path = RidgePath(FeatureSums.from_exact(gram_sums([(z, labels)], FEATURES, CLASSES), FEATURES))
    centred = z.double().numpy() - z.double().numpy().mean(0)
    y = np.eye(CLASSES)[labels]
    hat = centred @ np.linalg.solve(centred.T @ centred + 20 * 0.3 * np.eye(FEATURES), centred.T) + 1 / 20
    expected = ((y - hat @ y) ** 2).sum() / 20 / (1 - np.trace(hat) / 20) ** 2
    assert path.cross_validation_error(0.3) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("uniform", [False, True])
def test_the_discriminant_is_that_of_scikit_learn(uniform: bool) -> None:
    z, labels = draw(300)
    path = RidgePath(FeatureSums.from_exact(gram_sums([(z, labels)], FEATURES, CLASSES), FEATURES))
    head = path.fit_discriminant(1e-12, uniform)
    pooled = LinearDiscriminantAnalysis(solver="lsqr").fit(z.double().numpy(), labels.numpy())
    expected = pooled.decision_function(z.double().numpy()) - (np.log(pooled.priors_) if uniform else 0)
    outputs = (z.double() @ head.weight.T + head.bias).numpy()
    centred = outputs - outputs.mean(1, keepdims=True)
    assert np.abs(centred - (expected - expected.mean(1, keepdims=True))).max() < 1e-6


def test_a_site_is_standardised_by_its_own_statistics_and_others_by_those_of_all() -> None:
    encoder = StandardisedEncoder(torch.nn.Identity(), 2)
    loaded = {
        "mean": torch.tensor([1.0, 2.0]),
        "scale": torch.tensor([2.0, 4.0]),
        "site_keys": torch.tensor([7, 9]),
        "site_means": torch.tensor([[0.0, 0.0], [5.0, 6.0]]),
        "site_scales": torch.tensor([[1.0, 1.0], [0.5, 0.25]]),
    }
    encoder.load_state_dict(loaded)
    x = torch.tensor([[5.0, 10.0]])
    assert encoder(x).tolist() == [[2.0, 2.0]]
    assert encoder(x, [3, 9]).tolist() == [[0.0, 16.0]]
    assert encoder(x, [3]).tolist() == [[2.0, 2.0]]


def test_the_head_does_not_depend_on_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on Cholesky's, nor on the eigendecomposition that is used where torch's does not converge."""
    z, labels = draw(60)
    sums = FeatureSums.from_exact(gram_sums([(z, labels)], FEATURES, CLASSES), FEATURES)
    heads = [RidgePath(sums).fit(0.1), RidgePath(sums).fit_once(0.1)]

    def fail(matrix: torch.Tensor) -> None:
        raise RuntimeError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    heads.append(RidgePath(sums).fit(0.1))
    for head in heads[1:]:
        assert torch.allclose(head.weight, heads[0].weight, rtol=1e-9, atol=1e-12)
        assert torch.allclose(head.bias, heads[0].bias, rtol=1e-9, atol=1e-12)
