from pathlib import Path
from typing import Any

import pytest

from fedcir.config import (
    DEFAULT_ALGORITHM,
    AlgorithmConfig,
    Config,
    ConfigRequest,
    DataConfig,
    LocalConfig,
    ModelConfig,
    config_from_tables,
    config_to_tables,
    dump_toml,
    merge_tables,
    parse_assignment,
    read_toml,
)
from fedcir.errors import InputError
from fedcir.runtime.run_folder import RunFolder

CHANGED = Config(
    data=DataConfig(name="arrays", root="/data/größe", train_per_domain=50),
    model=ModelConfig(name="resnet18", latent=32, norm="group"),
    local=LocalConfig(lr=0.05, schedule="cosine"),
    algorithm=AlgorithmConfig("fedcir", {"lambda_reg": 0.1, "generator_statistics": "batch", "noise": 8}),
)


@pytest.mark.parametrize("config", [Config(), CHANGED])
def test_a_config_survives_toml(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config_to_tables(config)), encoding="utf-8")
    assert config_from_tables(read_toml(path)) == config


def test_a_saved_config_with_its_own_section_reads_back(tmp_path: Path) -> None:
    RunFolder(tmp_path).create(CHANGED, {"clients": [], "hash": ""})
    tables = read_toml(tmp_path / "config.toml")
    assert {"format", "version"} <= tables["fedcir"].keys()
    assert config_from_tables(tables) == CHANGED


def test_no_tables_are_the_defaults_which_train_as_the_paper_does_but_with_the_recommended_method() -> None:
    config = config_from_tables({})
    assert config == Config()
    local = config.local
    assert (local.steps, local.batch_size, local.lr, local.momentum, local.weight_decay) == (20, 32, 0.01, 0.9, 5e-4)
    assert config.algorithm == AlgorithmConfig("fedcirplus", {})
    assert config.server.weighting == "uniform"


def test_a_field_that_is_none_is_left_out_of_toml() -> None:
    assert "root" not in config_to_tables(Config())["data"]
    assert "None" not in dump_toml(config_to_tables(Config()))


def test_a_whole_number_is_taken_for_a_number() -> None:
    lr = config_from_tables({"local": {"lr": 1}}).local.lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"locl": {}}, r"no section \[locl\]; did you mean 'local'\?"),
        ({"zzz": {}}, r"no section \[zzz\]; choose from algorithm, attack, data, local, model, partition"),
        ({"local": 3}, r"local must be a section \[local\], got 3"),
        ({"local": {"stepss": 3}}, r"\[local\] has no field 'stepss'; did you mean 'steps'\?"),
        (
            {"run": {"qqq": 1}},
            r"\[run\] has no field 'qqq'; choose from compile, device, layout, precision, seed, threads, workers",
        ),
        ({"algorithm": {"name": 3}}, "algorithm.name must be a string, got 3"),
        ({"model": {"name": "resnet81"}}, "model.name cannot be 'resnet81'; did you mean 'resnet18'"),
        ({"model": {"norm": "layer"}}, "model.norm cannot be 'layer'; choose from batch, group"),
        ({"local": {"steps": 2.5}}, "local.steps must be a whole number, got 2.5"),
        ({"local": {"steps": True}}, "local.steps must be a whole number, got True"),
        ({"local": {"lr": "fast"}}, "local.lr must be a number, got 'fast'"),
        ({"local": {"lr": True}}, "local.lr must be a number, got True"),
        ({"data": {"root": 3}}, "data.root must be a string, got 3"),
        ({"partition": {"clients": "four"}}, "partition.clients must be a whole number, got 'four'"),
    ],
)
def test_a_wrong_name_or_type_is_named_with_the_fix(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_tables(tables)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.train_per_domain", 0),
        ("partition.clients", 0),
        ("partition.beta", 0.0),
        ("partition.beta", float("inf")),
        ("partition.min_samples", 0),
        ("model.width", 0),
        ("model.latent", -1),
        ("local.steps", 0),
        ("local.batch_size", 0),
        ("local.lr", float("nan")),
        ("local.lr", 0.0),
        ("local.lr", -0.1),
        ("local.momentum", 1.0),
        ("local.momentum", float("nan")),
        ("local.weight_decay", -1e-9),
        ("server.rounds", 0),
        ("server.active", 0),
        ("server.eval_every", 0),
        ("server.min_replies", 0),
        ("server.checkpoint_every", 0),
        ("run.seed", -1),
        ("run.threads", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(name: str, value: float) -> None:
    section, field = name.split(".")
    with pytest.raises(InputError, match=rf"^{name} must be .*, got {value}$"):
        config_from_tables({section: {field: value}})


@pytest.mark.parametrize("text", ["a = ", "[local]\nlr = 1\nlr = 2", None])
def test_a_config_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"cannot read the config .*mine\.toml"):
        read_toml(path)


def test_merged_takes_the_second_over_the_first_field_by_field() -> None:
    base = {"local": {"lr": 0.1, "steps": 5}, "run": {"seed": 1}}
    assert merge_tables(base, {"local": {"lr": 0.2}, "data": {"name": "arrays"}}) == {
        "local": {"lr": 0.2, "steps": 5},
        "run": {"seed": 1},
        "data": {"name": "arrays"},
    }
    assert base == {"local": {"lr": 0.1, "steps": 5}, "run": {"seed": 1}}


def test_merged_drops_the_fields_of_another_algorithm() -> None:
    base = {"algorithm": {"name": "fedprox", "mu": 0.5}}
    assert merge_tables(base, {"algorithm": {"name": "fedcir"}}) == {"algorithm": {"name": "fedcir"}}
    assert merge_tables(base, {"algorithm": {"name": "fedprox"}}) == base
    assert merge_tables(base, {"algorithm": {"mu": 0.9}}) == {"algorithm": {"name": "fedprox", "mu": 0.9}}


def test_merged_keeps_the_fields_of_the_default_algorithm_when_it_is_named() -> None:
    base = {"algorithm": {"anything": 0.1}}
    both = merge_tables(base, {"algorithm": {"name": DEFAULT_ALGORITHM}})
    assert config_from_tables(both).algorithm == AlgorithmConfig(DEFAULT_ALGORITHM, {"anything": 0.1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("local.lr=0.1", 0.1),
        ("local.lr = 5e-4", 5e-4),
        ("local.lr=7", 7),
        ("local.lr=true", True),
        ("local.lr=cosine", "cosine"),
        ("local.lr='quoted'", "quoted"),
        ("local.lr=[1, 2]", [1, 2]),
        ("local.lr=/data/a=b", "/data/a=b"),
        ("local.lr=", ""),
    ],
)
def test_an_assignment_is_read_as_toml_or_else_as_text(text: str, value: object) -> None:
    assert parse_assignment(text) == {"local": {"lr": value}}


@pytest.mark.parametrize("text", ["local.lr", "lr=1", ".lr=1", "local.=1", "=1", ""])
def test_an_assignment_without_its_parts_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"set takes section\.field=value, got '"):
        parse_assignment(text)


def test_a_path_in_a_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    text = '[data]\nname = "folders"\nroot = "images"\n[model]\nweights = "/weights/resnet18.pth"\n'
    (tmp_path / "project" / "mine.toml").write_text(text)
    for folder, root in ((tmp_path, "project/images"), (tmp_path / "project", "images")):
        monkeypatch.chdir(folder)
        config = ConfigRequest(file=(tmp_path / "project" / "mine.toml").relative_to(folder)).resolve()
        assert (config.data.root, config.model.weights) == (root, "/weights/resnet18.pth")


def test_the_name_of_a_dataset_on_the_hub_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[data]\nname = "hub"\nroot = "flwrlabs/pacs"\n')
    assert ConfigRequest(file=tmp_path / "mine.toml").resolve().data.root == "flwrlabs/pacs"
