"""Mutated configs: they are settings, or they are refused in one line; and what is accepted can be opened and run."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ended import fault
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mutate import VALUES, batches, damaged_toml, outcomes

from fedcir.algorithms import find_algorithm, list_algorithms, make_algorithm
from fedcir.config import SECTIONS, Config, config_from_tables, config_to_tables, dump_toml, read_toml
from fedcir.errors import FedcirError
from fedcir.experiments.reference import describe_field
from fedcir.runtime.resolution import get_hyper_parameters
from fedcir.runtime.simulation import open_run
from fedcir.validation import bounds_of

PLACES = [f"{section}.{name}" for section, cls in SECTIONS.items() for name in cls.__dataclass_fields__]
SCALARS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.booleans(), st.text(max_size=20), st.sampled_from([10**300, 2**53])
)
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def text_of(algorithm: str, config: Config) -> bytes:
    """A whole config with every field of the algorithm."""
    tables: dict[str, Any] = config_to_tables(config)
    tables["algorithm"] = {"name": algorithm, **get_hyper_parameters(find_algorithm(algorithm)())}
    return dump_toml(tables).encode()


def settled(tables: dict[str, Any]) -> Config:
    config = config_from_tables(tables)
    make_algorithm(config.algorithm)
    return config


@batches(60)
def test_a_mutated_file_is_read_or_refused_in_one_line(seeds: range, tmp_path: Path) -> None:
    texts = [text_of(name, Config()) for name in list_algorithms()]
    path = tmp_path / "config.toml"

    def attempt(rng: random.Random) -> str | None:
        path.write_bytes(damaged_toml(rng.choice(texts), rng))
        return fault(lambda: settled(read_toml(path)))

    assert not outcomes(seeds, attempt)


@seed(0)
@settings(suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(PLACES), NESTED, min_size=1, max_size=3))
def test_any_value_in_any_place_is_taken_or_refused_in_one_line(found: dict[str, Any]) -> None:
    tables: dict[str, dict[str, Any]] = {}
    for path, value in found.items():
        section, _, name = path.partition(".")
        tables.setdefault(section, {})[name] = value
    assert fault(lambda: settled(tables)) is None


def possible(cls: type, name: str, rng: random.Random) -> Any:
    """A value that its type and its bounds allow, small where it is a size."""
    words, choices = describe_field(cls, name)
    bounds = bounds_of(cls).get(name)
    if bounds is not None and "whole" in words:
        return int(bounds.low) + rng.choice((0, 1, 2, 5))
    if bounds is not None:
        value = rng.choice((bounds.low, bounds.low + 1e-9, (bounds.low + bounds.high) / 2, bounds.high))
        return [value] * rng.choice((1, 3)) if "list" in words else value
    return rng.choice(choices or (True, False, *VALUES))


def quick(config: Config, like: Config) -> Config:
    """The same without what only takes time, and on the same data."""
    local = replace(config.local, steps=min(config.local.steps, 2), batch_size=min(config.local.batch_size, 64))
    return replace(config, data=replace(config.data, root=like.data.root), local=local)


@batches(10, range(200))
def test_what_is_accepted_opens_and_trains_for_a_round(
    seeds: range, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    like = {name: tiny(name, "server.rounds=1", "run.workers=1") for name in ("fedavg", "fedcir", "fedsr", "moon")}

    def attempt(rng: random.Random) -> str | None:
        config = like[rng.choice(sorted(like))]
        tables: dict[str, Any] = config_to_tables(config)
        for _ in range(rng.randint(1, 3)):
            section = rng.choice([section for section in SECTIONS if section != "data"])
            cls = find_algorithm(config.algorithm.name) if section == "algorithm" else SECTIONS[section]
            fields = [field.name for field in dataclasses.fields(cls) if field.init and field.name != "compile"]
            if fields:  # to compile takes a minute
                name = rng.choice(fields)
                tables[section][name] = possible(cls, name, rng)
        out = tmp_path / f"run-{rng.random()}"

        def once() -> None:
            with open_run(quick(settled(tables), config), out) as (_, rounds):
                next(rounds, None)

        return fault(once, FedcirError)  # weights may end up not finite

    assert not outcomes(seeds, attempt)


@pytest.mark.parametrize("beta", [5e-324, 1e-300, 1e-12, 1_000_000])
def test_any_label_skew_can_be_dealt_out(beta: float, tiny: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny("fedavg", "partition.scheme=dirichlet", "partition.clients=6", f"partition.beta={beta}")
    assert fault(lambda: open_run(config, tmp_path / "run").__enter__()) is None
