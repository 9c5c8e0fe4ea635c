"""Quantities as people write them."""

import pytest

from fedcir.text import choose_time_unit, choose_unit, format_bytes, format_duration, format_flops


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (0.42, "0.4 s"),
        (5.964, "6 s"),  # 0.0994 minutes
        (9.96, "10 s"),
        (59.6, "1 min"),
        (130, "2 min 10 s"),
        (3599.7, "1 h"),
        (3900, "1 h 5 min"),
        (3 * 86400 + 4 * 3600 + 59, "3 d 4 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (512, "512 B"), (105_112_345, "105 MB"), (999_999_999, "1 GB"), (1.234e13, "12.3 TB")],
)
def test_a_size_has_the_unit_that_suits_it(count: float, words: str) -> None:
    assert format_bytes(count) == words


def test_flops_have_the_unit_that_suits_them() -> None:
    assert format_flops(1.926e11) == "193 GFLOPs"
    assert format_flops(3.2e12) == "3.2 TFLOPs"


def test_an_axis_has_the_unit_of_its_longest_run() -> None:
    assert choose_unit(2.5e9, "B") == (1e9, "GB")
    assert choose_unit(0, "B") == (1.0, "B")
    assert [choose_time_unit(seconds) for seconds in (6, 119, 120, 7200)] == [
        (1.0, "seconds"),
        (1.0, "seconds"),
        (60.0, "minutes"),
        (3600.0, "hours"),
    ]
