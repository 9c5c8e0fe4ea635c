"""Intervals by the bootstrap: right by hand, and as often right as they say."""

import numpy as np
import pytest

from fedcir.analysis.divergence import distance, divergences
from fedcir.runs.statistics import RESAMPLES, Interval, bootstrap_mean, draw_resamples, percentile_interval


def test_every_resample_draws_as_many_samples_as_there_are() -> None:
    drawn = draw_resamples("a", 7)
    assert drawn.shape == (RESAMPLES, 7)
    assert set(drawn.sum(axis=1)) == {7.0}
    assert drawn.mean() == 1.0
    np.testing.assert_array_equal(drawn, draw_resamples("a", 7))
    assert not np.array_equal(drawn, draw_resamples("b", 7))
    assert not np.array_equal(drawn, draw_resamples("a", 7, seed=1))


def test_an_interval_is_made_of_percentiles_and_holds_its_estimate() -> None:
    draws = np.arange(1001) / 1000
    assert vars(percentile_interval(0.5, draws)) == pytest.approx({"value": 0.5, "low": 0.025, "high": 0.975})
    assert percentile_interval(2.0, draws).high == 2.0
    assert f"{Interval(0.5, 0.25, 0.75):.1%}" == "50.0% (25.0% to 75.0%)"


def test_the_mean_of_two_values_is_one_of_three_in_a_resample() -> None:
    # (0,0), (0,1) or (1,0), (1,1) with 1/4, 1/2 and 1/4: the 2.5th percentile is 0 and the 97.5th is 1.
    assert bootstrap_mean({"a": np.array([0, 1])}) == Interval(0.5, 0.0, 1.0)
    assert bootstrap_mean({"a": np.full(9, 3.0)}) == Interval(3.0, 3.0, 3.0)


def test_clients_weigh_the_same_whatever_their_size() -> None:
    both = bootstrap_mean({"a": np.zeros(1000), "b": np.ones(10)})
    assert both == Interval(0.5, 0.5, 0.5)


def test_an_interval_is_as_wide_as_the_central_limit_says() -> None:
    samples = np.random.default_rng(0).normal(5, 2, 400)
    made = bootstrap_mean({"a": samples})
    half = 1.96 * samples.std() / np.sqrt(400)
    assert made.low == pytest.approx(samples.mean() - half, abs=0.04)
    assert made.high == pytest.approx(samples.mean() + half, abs=0.04)


@pytest.mark.slow
def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(300):
        made = bootstrap_mean({"a": rng.random(80) < 0.7, "b": rng.random(40) < 0.4}, seed=trial)
        held += made.low <= 0.55 <= made.high
    assert 0.91 <= held / 300 <= 0.98


def test_beyond_chance_is_what_leaves_0_out() -> None:
    assert Interval(0.2, 0.1, 0.3).beyond_chance
    assert Interval(-0.2, -0.3, -0.1).beyond_chance
    assert not Interval(0.2, 0.0, 0.4).beyond_chance


def test_a_mean_over_pairs_is_surer_than_a_pair_and_less_sure_than_if_pairs_shared_no_client() -> None:
    rng = np.random.default_rng(2)
    clients = {name: rng.normal(shift, 1, (150, 2)) for name, shift in (("a", 0.0), ("b", 0.7), ("c", 1.4))}
    result = divergences(clients)
    widths = [pair.high - pair.low for pair in result.pairs.values()]
    mean = result.mean_pair
    assert mean.value == pytest.approx(np.mean([pair.value for pair in result.pairs.values()]))
    assert np.sqrt(np.sum(np.square(widths))) / 3 * 0.9 < mean.high - mean.low < np.mean(widths)


def test_the_interval_of_a_distance_is_that_of_the_share_that_was_told_apart() -> None:
    rng = np.random.default_rng(3)
    result = distance(rng.normal(0, 1, (500, 1)), rng.normal(1, 1, (500, 1)))
    error = (1 - result.value / 2) / 2
    half = 4 * 1.96 * np.sqrt(error * (1 - error) / 1000)
    assert result.high - result.low == pytest.approx(2 * half, rel=0.12)
