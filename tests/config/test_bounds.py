"""Bounds: every number has them, they are checked wherever a class is made, and said in one line."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest

from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import SECTIONS, LocalConfig, ModelConfig, config_from_tables, read_toml
from fedcir.config.toml import parse_assignment
from fedcir.errors import InputError
from fedcir.experiments.reference import describe_field, list_settings
from fedcir.validation import Between, bounds_of

CLASSES = [*SECTIONS.values(), *map(find_algorithm, list_algorithms())]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_number_of_the_settings_and_of_the_methods_has_bounds(cls: type) -> None:
    for field in dataclasses.fields(cls):
        if field.init and "number" in describe_field(cls, field.name)[0]:
            assert field.name in bounds_of(cls)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_number_above_the_highest_is_refused_from_a_file_and_from_python(cls: type) -> None:
    for name, between in bounds_of(cls).items():
        (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
        value: Any = 2 * between.high + 1
        if "tuple" in str(get_type_hints(cls)[name]):
            value = (value,)
        if field.init:
            with pytest.raises(InputError, match=rf"\.{name} must be (at most|below) [\d,.]+, got"):
                cls(**{name: value})


@pytest.mark.parametrize(
    ("between", "lowest", "highest", "words"),
    [
        (Between(1, 5), "must be at least 1, got 0", "must be at most 5, got 6", "1 to 5"),
        (Between(0, 1, below=True), "at least 0, got -1", "below 1, got 1", "at least 0, below 1"),
        (Between(0, 2000, above=True), "a number above 0, got 0", "at most 2,000, got inf", "above 0, at most 2,000"),
    ],
)
def test_bounds_say_what_is_wrong_and_what_is_right(between: Between, lowest: str, highest: str, words: str) -> None:
    for message in (lowest, highest):
        with pytest.raises(InputError, match=message):
            between.check("x", float(message.rpartition(" ")[2]) if "inf" in message else int(message.split()[-1]))
    assert str(between) == words


def test_what_is_not_a_number_is_out_of_all_bounds() -> None:
    with pytest.raises(InputError, match=r"local\.lr must be a number above 0, got nan"):
        LocalConfig(lr=float("nan"))


def test_each_number_of_a_list_is_checked() -> None:
    with pytest.raises(InputError, match=r"model\.std must be a number above 0, got 0"):
        ModelConfig(mean=(0.5, 0.5), std=(1.0, 0.0))


def test_a_users_own_method_declares_bounds_in_the_same_way() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(Algorithm):
        strength: Annotated[float, Between(0, 10)] = 1.0

    with pytest.raises(InputError, match=r"algorithm\.strength must be at most 10, got 11"):
        Mine(strength=11)


def test_settings_tell_their_bounds() -> None:
    assert [item.takes for item in list_settings("local.steps")] == ["whole number, 1 to 1,000,000"]
    assert [item.takes for item in list_settings("local.momentum")] == ["number, at least 0, below 1"]


@pytest.mark.parametrize("number", ["9" * 300, "9" * 5000, "0x" + "f" * 5000, "-" + "9" * 300])
@pytest.mark.parametrize("place", ["local.steps", "local.lr", "model.arguments.x", "algorithm.mu", "data.classes"])
def test_a_number_of_any_length_ends_in_one_short_line(number: str, place: str, tmp_path: Path) -> None:
    section, _, field = place.partition(".")
    path = tmp_path / "config.toml"
    path.write_text(f"{section}.{field} = {number}")
    with pytest.raises(InputError) as refused:
        config_from_tables(read_toml(path))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "text",
    ["x = " + "[" * 10_000, "a." * 1000 + "b = 1", "local.steps = " + "{a = " * 900 + "1" + "}" * 900, "a = 1\n" * 2],
)
def test_a_config_that_is_nested_beyond_measure_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(InputError):
        config_from_tables(read_toml(path))


def test_a_number_that_is_too_long_is_named() -> None:
    with pytest.raises(InputError, match=r"^algorithm\.mu must be .* at most 19 digits, got a number of 300 digits$"):
        config_from_tables({"algorithm": {"mu": [{"x": 1}, int("9" * 300)]}})


def test_a_config_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"cannot read the config .*: it is not a regular file"):
        read_toml(path)
    large = tmp_path / "large.toml"
    large.touch()
    os.truncate(large, 10_000_001)
    with pytest.raises(InputError, match="it has 10,000,001 bytes, more than 10,000,000"):
        read_toml(large)


def test_an_assignment_is_no_deeper_than_a_file() -> None:
    with pytest.raises(InputError, match=r"set takes section\.field=value"):
        parse_assignment("a." * 5000 + "b=1")
    assert parse_assignment("a.b=" + "[" * 10_000)["a"]["b"].startswith("[[")


def test_an_error_is_one_line_that_a_terminal_can_show() -> None:
    with pytest.raises(InputError) as refused:
        config_from_tables({"a\n\x1b[31mb": {}})
    assert str(refused.value).startswith("no section [a �[31mb]; ")
