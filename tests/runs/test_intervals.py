"""Intervals that cover seeds and test images."""

import numpy as np
import pytest
from scipy import stats

from fedcir.runs.statistics import MeanInterval, RunScores, half_width, is_at_chance, mean_interval

Z = 1.959964


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize("values", [[0.01, 0.03], [0.02, -0.01, 0.04, 0.0, 0.03]])
def test_half_width_is_that_of_students_interval(values: list[float], confidence: float) -> None:
    low, high = stats.t.interval(confidence, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert half_width(values, confidence) == pytest.approx((high - low) / 2)


def test_half_width_of_three_seeds_by_the_table() -> None:
    # The table's t for 2 degrees of freedom is 4.303; the standard error of 1, 2, 3 is 1 / sqrt(3).
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)


def counted(a: float, b: float, test_set: str = "same") -> RunScores:
    """Two domains of 100 and 400 test images, without hits."""
    return RunScores({"a": a, "b": b}, {"a": 100, "b": 400}, test_set)


def test_without_hits_one_seed_has_the_binomial_error_of_the_mean_over_domains() -> None:
    interval = mean_interval([counted(0.5, 0.8)])
    # (0.25 / 100 + 0.16 / 400) / 2^2 = 0.000725
    assert interval == MeanInterval(pytest.approx(0.65), 1, None, pytest.approx(Z * 0.000725**0.5))
    assert interval.half_width == interval.image_half_width


def test_seeds_that_share_test_images_do_not_shrink_the_error_of_the_images() -> None:
    interval = mean_interval([counted(0.5, 0.8)] * 4)
    assert interval.image_half_width == pytest.approx(Z * 0.000725**0.5)
    assert interval.seed_half_width == pytest.approx(0)


def test_seeds_that_draw_test_images_anew_shrink_the_error_of_the_images() -> None:
    interval = mean_interval([counted(0.5, 0.8, str(seed)) for seed in range(4)])
    assert interval.image_half_width == pytest.approx(Z * (0.000725 / 4) ** 0.5)


def test_both_errors_are_added_in_squares() -> None:
    interval = mean_interval([counted(0.4, 0.8), counted(0.5, 0.8), counted(0.6, 0.8)])
    seeds = half_width([0.6, 0.65, 0.7])
    assert interval.half_width == pytest.approx((seeds**2 + Z**2 * 0.000725) ** 0.5)


def test_a_difference_without_hits_adds_the_errors_of_both() -> None:
    ours, base = [counted(0.5, 0.8)] * 3, [counted(0.4, 0.7)] * 3
    interval = mean_interval(ours, base)
    # the baseline's is (0.24 / 100 + 0.21 / 400) / 2^2 = 0.00073125
    assert interval.mean == pytest.approx(0.1)
    assert interval.half_width == pytest.approx(Z * (0.000725 + 0.00073125) ** 0.5)


def with_hits(*hits: np.ndarray, test_set: str = "same") -> RunScores:
    domains = dict(zip("ab", hits, strict=True))
    accuracy = {name: float(values.mean()) for name, values in domains.items()}
    return RunScores(accuracy, {name: len(values) for name, values in domains.items()}, test_set, domains)


@pytest.fixture
def both() -> tuple[np.ndarray, np.ndarray, list[RunScores], list[RunScores]]:
    """Hits (method, seed, image) of two domains, and the runs of both methods."""
    rng = np.random.default_rng(0)
    hard = [rng.random(60), rng.random(200)]  # some images are hard for all
    a, b = (rng.random((2, 3, len(item))) < item for item in hard)
    runs = [[with_hits(a[method, seed], b[method, seed]) for seed in range(3)] for method in range(2)]
    return a, b, runs[0], runs[1]


def test_with_hits_the_error_of_images_is_that_of_their_means_over_seeds(
    both: tuple[np.ndarray, np.ndarray, list[RunScores], list[RunScores]],
) -> None:
    a, b, ours, _ = both
    variance = (a[0].mean(0).var() / 60 + b[0].mean(0).var() / 200) / 4
    assert mean_interval(ours).image_half_width == pytest.approx(Z * variance**0.5)


def test_with_hits_a_difference_is_paired_image_by_image(
    both: tuple[np.ndarray, np.ndarray, list[RunScores], list[RunScores]],
) -> None:
    a, b, ours, base = both
    by_image = [(item[0].astype(float) - item[1]).mean(0) for item in (a, b)]
    variance = (by_image[0].var() / 60 + by_image[1].var() / 200) / 4
    means = (a.mean(2) + b.mean(2)) / 2  # (method, seed)
    interval = mean_interval(ours, base)
    assert interval.image_half_width == pytest.approx(Z * variance**0.5)
    assert interval.half_width == pytest.approx((Z**2 * variance + half_width(list(means[0] - means[1])) ** 2) ** 0.5)
    counts_only = [[RunScores(run.scores, run.images, "same") for run in runs] for runs in (ours, base)]
    unpaired = mean_interval(*counts_only).image_half_width
    assert interval.image_half_width is not None
    assert unpaired is not None
    assert interval.image_half_width < unpaired  # both meet the same hard images


def test_the_closed_form_is_that_of_resampling_seeds_and_images() -> None:
    rng = np.random.default_rng(1)
    hits = rng.random((8, 400)) < rng.random(400) * 0.6 + rng.random((8, 1)) * 0.4  # (seed, image)
    draws = []
    for _ in range(2000):
        seeds, images = rng.integers(0, 8, 8), rng.integers(0, 400, 400)
        draws.append(hits[seeds][:, images].mean())
    # Without Student's factor and ddof 1, which correct for few seeds.
    closed = (hits.mean(1).var() / 8 + hits.mean(0).var() / 400) ** 0.5
    interval = mean_interval([RunScores({"a": row.mean()}, {"a": 400}, "same", {"a": row}) for row in hits])
    assert interval.seed_half_width is not None
    assert interval.image_half_width is not None
    ours = np.hypot(interval.seed_half_width / stats.t.ppf(0.975, 7) * (7 / 8) ** 0.5, interval.image_half_width / Z)
    assert ours == pytest.approx(closed)
    assert ours == pytest.approx(np.std(draws), rel=0.1)


def test_hits_on_other_images_are_not_paired(
    both: tuple[np.ndarray, np.ndarray, list[RunScores], list[RunScores]],
) -> None:
    a, b, ours, base = both
    other = [with_hits(run.hits["a"], run.hits["b"], test_set="other") for run in base]
    p = [[item[method].mean() for item in (a, b)] for method in range(2)]
    variance = sum((q[0] * (1 - q[0]) / 60 + q[1] * (1 - q[1]) / 200) / 4 for q in p)
    assert mean_interval(ours, other).image_half_width == pytest.approx(Z * variance**0.5)


def test_where_nothing_tells_the_number_of_images_only_seeds_count() -> None:
    interval = mean_interval([RunScores({"a": value}) for value in (0.5, 0.6, 0.7)])
    assert interval.image_half_width is None
    assert interval.half_width == pytest.approx(half_width([0.5, 0.6, 0.7]))


@pytest.mark.parametrize(("seeds", "expected"), [(2, False), (3, True)])
def test_a_verdict_takes_three_seeds(seeds: int, expected: bool) -> None:
    assert MeanInterval(0.5, seeds, 0.1, 0.1).is_beyond_chance is expected


def test_at_chance_is_what_an_interval_cannot_tell_from_it() -> None:
    assert is_at_chance(MeanInterval(0.14, 3, 0.03, 0.03), 0.1)  # 0.14 - 0.042
    assert not is_at_chance(MeanInterval(0.16, 3, 0.03, 0.03), 0.1)
    assert not is_at_chance(MeanInterval(0.5, 2, 0.9, 0.03), 0.1)  # two seeds: only images count
    assert not is_at_chance(MeanInterval(0.05, 3, 0.03, 0.03), None)
