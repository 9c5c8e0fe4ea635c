"""What to vary: the ranges of an algorithm's own fields, the learning rate, and what the user adds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from fedcir.algorithms import algorithm_class, make_algorithm
from fedcir.config import (
    SECTIONS,
    Choices,
    Config,
    Range,
    Span,
    config_from,
    config_tables,
    merged,
    nested,
    parse_range,
)
from fedcir.rng import numpy_rng
from fedcir.types import InputError

ALWAYS = {"local.lr": "1e-3..1e-1"}
"""What is varied for every algorithm, unless the user says otherwise."""
SHARED = ("data.", "partition.", "run.", "server.rounds", "server.eval_every", "algorithm.name")
"""Settings that all trials must share to be comparable."""

Space = dict[str, Range]
"""Values to try, by setting."""
Settings = dict[str, Any]
"""One value of each."""


def space_of(config: Config, asked: Sequence[str] | Mapping[str, str] = ()) -> Space:
    """The ranges for a config's algorithm; one that is asked for takes the place of the declared one."""
    own = algorithm_class(config.algorithm.name)
    settable = {field.name for field in fields(own) if field.init}
    declared = {f"algorithm.{name}": text for name, text in own.ranges.items() if name in settable}
    told = {**ALWAYS, **declared, **as_texts(asked)}
    return {place: _checked(config, place, parse_range(text, place)) for place, text in told.items()}


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """A config with other values of some settings."""
    return config_from(merged(config_tables(config), nested(settings)))


def own_settings(config: Config, space: Space) -> Settings:
    """The values that a config has itself, where they are within their ranges."""
    algorithm = make_algorithm(config.algorithm)
    own = {place: _value(config, algorithm, place) for place in space}
    return {place: value for place, value in own.items() if value in space[place]}


def combinations(space: Space, seed: int) -> list[Settings] | None:
    """Every combination once, in random order; None if there is no end of them."""
    lists = [each.values for each in space.values() if isinstance(each, Choices)]
    if len(lists) < len(space) or math.prod(map(len, lists)) > 10**6:
        return None
    every = [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]
    return [every[row] for row in numpy_rng(seed, "combinations").permutation(len(every))]


def as_texts(asked: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Ranges by setting, from a dict or from texts such as `local.lr=1e-3..1e-1`."""
    if isinstance(asked, str):
        raise InputError(f"space takes a dict or a list such as ['local.lr=1e-3..1e-1'], got {asked!r}")
    if isinstance(asked, Mapping):
        return {place: str(text) for place, text in asked.items()}
    pairs = [text.partition("=") for text in asked]
    if wrong := next((place for place, equals, _ in pairs if not equals or "." not in place), None):
        raise InputError(f"space takes section.field=values, such as local.lr=1e-3..1e-1, got {wrong!r}")
    return {place.strip(): values.strip() for place, _, values in pairs}


def _checked(config: Config, place: str, values: Range) -> Range:
    """The range, once every end of it has been found to be possible."""
    if place.startswith(SHARED):
        raise InputError(f"{place} cannot be tuned: all trials must share it to be comparable")
    if isinstance(values, Span) and _takes_whole(config, place):
        if values.low % 1 or values.high % 1:
            raise InputError(f"{place} takes whole numbers, got {values}")
        values = replace(values, whole=True)
    for value in values.ends:
        make_algorithm(with_settings(config, {place: value}).algorithm)
    return values


def _takes_whole(config: Config, place: str) -> bool:
    section, _, name = place.partition(".")
    cls = algorithm_class(config.algorithm.name) if section == "algorithm" else SECTIONS.get(section, object)
    hint = get_type_hints(cls).get(name)
    if isinstance(hint, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    return hint is int


def _value(config: Config, algorithm: object, place: str) -> Any:
    section, name = place.split(".")
    return getattr(algorithm if section == "algorithm" else getattr(config, section), name)
