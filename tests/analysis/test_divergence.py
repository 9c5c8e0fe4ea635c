"""The proxy A-distance against what it must be."""

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from fedcir.analysis import distance, divergences, proxy_a_distance
from fedcir.errors import InputError


def normal(samples: int, shift: float = 0.0, width: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(shift, 1.0, (samples, width))


def test_sets_of_one_distribution_are_near_0() -> None:
    assert proxy_a_distance(normal(2000, seed=1), normal(2000, seed=2)) < 0.15


def test_sets_that_a_line_separates_are_at_2() -> None:
    assert proxy_a_distance(normal(200, seed=1), normal(200, 8.0, seed=2)) == 2.0


def test_two_normal_distributions_come_to_what_their_overlap_says() -> None:
    # The best line between N(0, 1) and N(2, 1) lies at 1 and errs with probability Phi(-1) = 0.1587.
    result = distance(normal(8000, width=1, seed=3), normal(8000, 2.0, width=1, seed=4))
    assert result.value == pytest.approx(2 * (1 - 2 * 0.1587), abs=0.04)  # its own error is 0.012
    assert result.low < 2 * (1 - 2 * 0.1587) < result.high
    assert result.high - result.low < 0.06


def test_it_is_two_minus_four_times_the_error_of_a_linear_svm_on_what_it_has_not_seen() -> None:
    a, b = normal(300, seed=1), normal(300, 0.4, seed=2)
    rng = np.random.default_rng(3)
    errors = []
    for _ in range(20):
        halves = [rng.permutation(rows) for rows in (a, b)]
        x, x_test = (np.concatenate([half[part] for half in halves]) for part in (slice(0, 150), slice(150, 300)))
        y = np.repeat([0, 1], 150)
        scaler = StandardScaler().fit(x)
        svm = LinearSVC(dual="auto").fit(scaler.transform(x), y)
        errors.append((svm.predict(scaler.transform(x_test)) != y).mean())
    ours = [proxy_a_distance(a, b, seed) for seed in range(20)]
    assert np.mean(ours) == pytest.approx(2 * (1 - 2 * np.mean(errors)), abs=0.08)


def test_a_set_that_is_much_larger_does_not_make_it_larger() -> None:
    # A line that always says "the large one" errs on one sample in ten, which would be 1.6.
    assert proxy_a_distance(normal(1800, seed=1), normal(200, seed=2)) < 0.4


def test_it_is_never_below_0_and_the_same_for_the_same_seed_and_both_ways_round() -> None:
    few = [proxy_a_distance(normal(12, seed=seed), normal(12, seed=seed + 100)) for seed in range(30)]
    assert min(few) == 0.0
    a, b = normal(100, seed=1), normal(100, 0.5, seed=2)
    assert proxy_a_distance(a, b, 4) == proxy_a_distance(a, b, 4)
    assert abs(proxy_a_distance(a, b) - proxy_a_distance(b, a)) < 0.2


def test_scale_and_place_do_not_matter() -> None:
    a, b = normal(200, seed=1), normal(200, 0.5, seed=2)
    moved = [1e4 * rows + 1e6 for rows in (a, b)]
    assert proxy_a_distance(*moved) == pytest.approx(proxy_a_distance(a, b), abs=0.05)


def test_every_pair_is_there_and_the_odd_one_out_is_furthest_from_the_mixture() -> None:
    sites = {"a": normal(200, seed=1), "b": normal(200, seed=2), "c": normal(200, 6.0, seed=3)}
    result = divergences(sites)
    assert list(result.pairs) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert result.pairs["a", "b"].value < 0.4
    assert result.pairs["a", "c"].value > 1.9
    assert max(result.to_mixture, key=lambda name: result.to_mixture[name].value) == "c"
    assert result.mean_pair.value == pytest.approx(np.mean([item.value for item in result.pairs.values()]))
    assert result.mean_to_mixture.value == pytest.approx(np.mean([item.value for item in result.to_mixture.values()]))


def test_clients_of_one_distribution_are_near_their_mixture() -> None:
    result = divergences({name: normal(1000, seed=seed) for seed, name in enumerate("abc")})
    assert max(item.value for item in result.to_mixture.values()) < 0.3


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (normal(3), normal(9), r"at least 4 samples \(N, Z\) on each side, got \[3, 8\]"),
        (normal(9), normal(9, width=5), "the same width, got 8 and 5"),
        (normal(9)[:, 0], normal(9), "got \\[9\\]"),
        (np.full((9, 8), np.nan), normal(9), "finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(a: np.ndarray, b: np.ndarray, words: str) -> None:
    with pytest.raises(InputError, match=words):
        proxy_a_distance(a, b)


def test_one_client_has_no_distance() -> None:
    with pytest.raises(InputError, match="at least two clients, got 1"):
        divergences({"a": normal(20)})


def test_a_client_with_too_few_samples_is_named() -> None:
    with pytest.raises(InputError, match="'b' has 7 samples"):
        divergences({"a": normal(20), "b": normal(7)})


def test_a_few_samples_whose_features_are_nearly_the_same_converge() -> None:
    """Warnings are errors here: liblinear's dual problem gives up on them."""
    rng = np.random.default_rng(0)
    few = rng.normal(size=(2, 30, 3)) @ rng.normal(size=(3, 128)) + 1e-3 * rng.normal(size=(2, 30, 128))
    assert 0 <= proxy_a_distance(*few) < 1
