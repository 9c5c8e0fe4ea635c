"""Every setting can be looked up, and what is said of it is so."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.main import get_command

from fedcir.cli import app
from fedcir.config import OPTIONS, SECTIONS, Config, config_from_tables, merge_tables, parse_assignment
from fedcir.experiments.reference import list_settings
from fedcir.runtime.simulation import train

SETTINGS = {each.name: each for each in list_settings()}


def test_every_field_of_the_config_is_listed_with_a_sentence() -> None:
    fields = {f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    assert SETTINGS.keys() == fields - {"algorithm.fields"}
    assert all(setting.meaning.endswith(".") for setting in SETTINGS.values())


def test_defaults_are_those_of_a_config_without_any_settings() -> None:
    for name, item in SETTINGS.items():
        section, field = name.split(".")
        assert getattr(getattr(Config(), section), field) == item.default


@pytest.mark.parametrize("name", [name for name, item in SETTINGS.items() if item.choices and item.default != ()])
def test_every_choice_is_one(name: str) -> None:
    for choice in SETTINGS[name].choices:
        tables = parse_assignment(f"{name}={choice}")
        more = {"csv": {"partition": {"file": "owners.csv"}}, "example": {"privacy": {"clip": 1, "noise": 1}}}
        if name == "model.pooling":
            more = {choice: {"model": {"name": "hf:vit"}}}
        section, field = name.split(".")
        assert (
            getattr(getattr(config_from_tables(merge_tables(tables, more.get(choice, {}))), section), field) == choice
        )


def test_the_option_of_a_setting_is_one_of_run() -> None:
    run = get_command(app).commands["run"]  # type: ignore[attr-defined]
    known = {name for param in run.params for name in param.opts}
    assert {setting.option for setting in SETTINGS.values() if setting.option} <= known
    assert SETTINGS["local.lr"].option == "--lr"
    assert SETTINGS["run.seed"].option == "--seed"


@pytest.mark.parametrize("command", ["run", "compare", "reproduce", "local"])
def test_a_setting_is_the_same_option_in_every_command_of_runs(command: str) -> None:
    top = get_command(app).commands  # type: ignore[attr-defined]
    params = {param.name: param for param in {**top, **top["deploy"].commands}[command].params}
    for name, option in OPTIONS.items():
        if name in params or name not in ("algorithm", "seed"):
            assert params[name].help == option.help
    kinds = {name: params[name].type.name for name in ("data_root", "rounds", "lr", "model")}
    assert kinds == {"data_root": "path", "rounds": "integer", "lr": "float", "model": "text"}


def test_train_and_the_strategy_have_the_defaults_of_the_settings() -> None:
    strategy = pytest.importorskip("fedcir.flower.strategy")
    places = {name: option.setting for name, option in OPTIONS.items()}
    places |= {name: f"local.{name}" for name in ("momentum", "weight_decay")}
    places |= {"min_replies": "server.min_replies", "latent": "model.latent"}
    for function in (train, strategy.AlgorithmStrategy.__init__):
        taken = inspect.signature(function).parameters
        shared = places.keys() & taken.keys() - {"clients", "algorithm", "prior"}
        assert {name: taken[name].default for name in shared} == {
            name: SETTINGS[places[name]].default for name in shared
        }
        assert taken["rounds"].default == 25
        assert taken["prior"].default is None  # as the algorithm has it


def test_the_command_shows_all_a_section_or_one_setting(fedcir: Callable[..., Any]) -> None:
    output = fedcir("settings")
    assert output.code == 0
    assert [line.split(":")[0] for line in output.out.splitlines() if not line.startswith(" ")] == list(SETTINGS)
    assert fedcir("settings", "local.lr").out == (
        "local.lr: number, above 0, at most 1,000; default 0.01; --lr\n"
        "    Learning rate; adam and adamw usually need a lower one, such as 0.001.\n"
    )
    assert "; default batch; invariant for fedcirplus; --norm\n" in fedcir("settings", "model.norm").out
    listed = json.loads(fedcir("settings", "local", "--json").out)
    assert [item["name"] for item in listed] == [name for name in SETTINGS if name.startswith("local.")]
    (schedule,) = (item for item in listed if item["name"] == "local.schedule")
    assert (schedule["choices"], schedule["default"]) == (["constant", "cosine"], "constant")
