"""Shapley values, intervals of paired differences, and the verdict for a site."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedcir.analysis.contribution import SiteWorth, paired_interval, shapley_values, shapley_weights
from fedcir.runs.statistics import Interval

games = st.integers(1, 5).flatmap(lambda n: arrays(float, 1 << n, elements=st.floats(-10, 10)))


def test_in_the_glove_game_the_only_left_glove_gets_two_thirds() -> None:
    # Player 0 has a left glove, 1 and 2 a right one; a pair is worth 1. Coalitions by number: bit p is player p.
    values = [0, 0, 0, 1, 0, 1, 0, 1]
    assert shapley_values(values) == pytest.approx([2 / 3, 1 / 6, 1 / 6])


def test_two_players_share_the_surplus() -> None:
    # v() = 1, v(0) = 3, v(1) = 4, v(01) = 10: player 0 brings 2 or 6, player 1 brings 3 or 7.
    assert shapley_values([1.0, 3.0, 4.0, 10.0]) == pytest.approx([4, 5])


@given(games)
def test_contributions_add_up_to_the_value_of_all_less_that_of_nobody(values: np.ndarray) -> None:
    assert shapley_values(values).sum() == pytest.approx(values[-1] - values[0], abs=1e-9)


@given(games)
def test_a_player_who_adds_nothing_gets_nothing_and_equal_players_get_the_same(values: np.ndarray) -> None:
    players = len(values).bit_length() - 1
    numbers = np.arange(4 * len(values))
    with_dummy = shapley_values(values[numbers[: 2 * len(values)] % len(values)])
    assert with_dummy[players] == pytest.approx(0, abs=1e-9)
    assert with_dummy[:players] == pytest.approx(shapley_values(values), abs=1e-9)
    twins = (numbers >> players & 1) + (numbers >> players + 1)  # two further players, who bring 0.5 or 2 together
    equal = shapley_values(values[numbers % len(values)] + np.array([0, 0.5, 2])[twins])
    assert equal[players:] == pytest.approx([1, 1], abs=1e-9)


def test_values_may_be_arrays_and_weights_of_each_player_sum_to_zero() -> None:
    values = np.random.default_rng(0).random((8, 4))
    by_image = shapley_values(list(values))
    assert np.allclose(by_image, np.stack([shapley_values(column) for column in values.T], axis=1))
    assert np.allclose(shapley_weights(12).sum(1), 0)


def test_the_interval_of_a_paired_difference_is_that_of_bonett_and_price() -> None:
    # 20 images: 5 gained, 1 lost. (6 - 2) / 22 = 0.1818; sqrt((8/22 - 0.1818^2) / 22) = 0.12259; 1.95996 of it 0.24027.
    interval = paired_interval(np.array([1.0] * 5 + [-1.0] + [0.0] * 14))
    assert interval.value == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((-0.05845, 0.42209), abs=1e-4)


def test_equal_predictions_on_few_images_leave_room_for_a_difference() -> None:
    interval = paired_interval(np.zeros(14))
    assert interval.value == 0
    assert interval.high == -interval.low == pytest.approx(1.959964 * (2 / 16 / 16) ** 0.5)


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        (Interval(0.031, 0.01, 0.052), "gains 3.1 points (1.0 to 5.2) from federating"),
        (Interval(-0.02, -0.03, -0.012), "loses 2.0 points (1.2 to 3.0) from federating"),
        (Interval(0.001, -0.009, 0.011), "loses nothing from federating: +0.1 points (-0.9 to +1.1)"),
        (Interval(0.02, -0.05, 0.09), "cannot be told from 31 test images: +2.0 points (-5.0 to +9.0)"),
    ],
)
def test_the_verdict_follows_the_interval_of_the_gain(gain: Interval, verdict: str) -> None:
    some = Interval(0.5, 0.4, 0.6)
    assert SiteWorth("ink", 10, 31, some, some, some, some, gain, some).verdict == verdict
