"""Values to try, as people write them."""

import pytest

from fedcir.config import Choices, NumberRange, parse_range
from fedcir.errors import InputError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3..1e-1", NumberRange(0.001, 0.1)),
        ("0..1", NumberRange(0.0, 1.0)),
        ("0.1, 1,5", Choices((0.1, 1, 5))),
        ("linear,constant", Choices(("linear", "constant"))),
        ("true,false", Choices((True, False))),
        ("0.5,0.5", Choices((0.5,))),
    ],
)
def test_a_text_names_values_and_is_written_back(text: str, values: NumberRange | Choices) -> None:
    assert parse_range(text, "x.y") == values
    assert parse_range(str(values), "x.y") == values


def test_a_span_over_a_factor_of_ten_is_searched_by_its_logarithm() -> None:
    assert [NumberRange(*ends).log for ends in ((0.01, 0.1), (0.02, 0.1), (0.0, 1.0))] == [True, False, False]


def test_values_between_are_rounded_to_three_digits_within_the_ends() -> None:
    assert [NumberRange(0.12345, 2).rounded(value) for value in (0.066666 + 0.1, 0.12346, 1.99999)] == [
        0.167,
        0.12345,
        2.0,
    ]
    assert NumberRange(1, 9999, whole=True).rounded(1234) == 1234


@pytest.mark.parametrize("text", ["", ",", "1..0", "1..1", "a..b", "0..inf", "nan..1", "1.."])
def test_what_names_no_values_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"x\.y"):
        parse_range(text, "x.y")
