"""FedCiRPlus: FedAvg with the settings that it is made for, which a user may take back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir import FedAvg, FedCiRPlus
from fedcir.algorithms import list_algorithms, resolve_config
from fedcir.config import Config, ConfigRequest, config_to_tables, dump_toml
from fedcir.experiments.reference import describe_algorithm


def made_for(config: Config) -> tuple[str, str]:
    return config.model.norm, config.local.prior


def plus(**given: Any) -> ConfigRequest:
    return ConfigRequest(**given).with_options(algorithm="fedcirplus")


def test_without_its_prior_it_is_fedavg_bit_for_bit(
    trained: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    assert same_model(trained(FedCiRPlus(), prior="none"), trained(FedAvg()))
    assert same_model(trained(FedCiRPlus()), trained(FedAvg(), prior="client"))


def test_its_defaults_count_over_the_packages_and_over_a_preset() -> None:
    assert made_for(resolve_config(plus())) == ("invariant", "client")
    config = resolve_config(plus(preset="pacs"))
    assert made_for(config) == ("invariant", "client")
    assert config.model.name == "resnet18"


@pytest.mark.parametrize("how", ["file", "options", "assignments"])
def test_what_a_user_sets_counts_over_its_defaults(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[model]\nnorm = "batch"\n[local]\nprior = "none"\n')
    given = {
        "file": {"file": tmp_path / "mine.toml"},
        "options": {"options": {"norm": "batch", "prior": "none"}},
        "assignments": {"assignments": ("model.norm=batch", "local.prior=none")},
    }
    assert made_for(resolve_config(plus(**given[how]))) == ("batch", "none")


def test_a_file_may_name_the_algorithm_and_what_an_experiment_varies_counts_over_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[algorithm]\nname = "fedcirplus"\n')
    assert made_for(resolve_config(ConfigRequest(file=file))) == ("invariant", "client")
    assert made_for(resolve_config(ConfigRequest(file=file), {"model": {"norm": "group"}})) == ("group", "client")


def test_other_methods_stay_on_the_papers_settings() -> None:
    for name in list_algorithms():
        config = resolve_config(ConfigRequest(preset="pacs", options={"algorithm": name}))
        assert made_for(config) == (("invariant", "client") if name == "fedcirplus" else ("batch", "none"))


def test_a_saved_run_keeps_its_settled_values(tmp_path: Path) -> None:
    saved = resolve_config(plus(options={"norm": "batch"}))
    assert made_for(plus().resolve_over(saved)) == ("batch", "client")
    (tmp_path / "config.toml").write_text(dump_toml(config_to_tables(saved)))
    assert resolve_config(ConfigRequest(file=tmp_path / "config.toml")) == saved


def test_it_tells_what_it_is_made_for() -> None:
    assert describe_algorithm(FedCiRPlus)["defaults"] == {"model.norm": "invariant", "local.prior": "client"}
