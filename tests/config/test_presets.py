"""The presets hold the paper's table of settings."""

import pytest

from fedcir.algorithms import make_algorithm
from fedcir.config import Config, ConfigRequest, config_from_tables, merge_tables
from fedcir.config.toml import list_presets, read_preset
from fedcir.errors import InputError

# FedProx mu; FedGen kd, reg; FedSR l2r, cmi; FedAlign's and FedCiR's align (FedReg's and FedCiR's reg is 0.5)
PAPER = {
    "domainnet": (0.1, 1.0, 0.5, 0.0, 5e-7, 1e-6),
    "pacs": (0.1, 1.0, 0.5, 0.0, 1e-6, 5e-7),
    "office-caltech-10": (0.5, 0.5, 1.0, 0.0, 1e-6, 5e-7),
    "camelyon17": (0.9, 1.0, 1.0, 0.0, 5e-7, 5e-7),
    "iwildcam": (0.1, 1.0, 1.0, 0.0, 5e-7, 1e-6),
}


def configured(preset: str, algorithm: str) -> Config:
    return ConfigRequest(preset, options={"algorithm": algorithm}).resolve()


def test_there_is_one_preset_for_each_dataset_of_the_paper() -> None:
    assert list_presets() == sorted(PAPER)


@pytest.mark.parametrize("preset", sorted(PAPER))
def test_a_preset_holds_the_papers_settings_of_every_method(preset: str) -> None:
    mu, kd, reg, l2r, cmi, align = PAPER[preset]

    def method(name: str) -> object:
        return make_algorithm(configured(preset, name).algorithm)

    assert method("fedprox").mu == mu
    assert (method("fedgen").lambda_kd, method("fedgen").lambda_reg) == (kd, reg)
    assert (method("fedsr").alpha_l2r, method("fedsr").alpha_cmi) == (l2r, cmi)
    assert method("fedreg").lambda_reg == 0.5
    assert method("fedalign").lambda_align == align
    assert (method("fedcir").lambda_reg, method("fedcir").lambda_align) == (0.5, align)
    assert method("fedcir").generator_steps == 5


@pytest.mark.parametrize("preset", sorted(PAPER))
def test_a_preset_holds_the_papers_training(preset: str) -> None:
    config = configured(preset, "fedavg")
    local = config.local
    assert (local.steps, local.batch_size, local.lr, local.momentum, local.weight_decay) == (20, 32, 0.01, 0.9, 5e-4)
    assert (config.server.rounds, config.model.name, config.data.name) == (300, "resnet18", preset)


def test_any_field_of_a_preset_can_be_overridden() -> None:
    fields = ["algorithms.fedgen.lambda_kd=3", "algorithm.lambda_reg=0.25"]
    config = ConfigRequest("pacs", options={"algorithm": "fedgen", "rounds": 5}, assignments=fields).resolve()
    assert config.server.rounds == 5
    assert config.algorithm.fields == {"lambda_kd": 3, "lambda_reg": 0.25}


def test_fields_of_other_methods_do_not_reach_a_method() -> None:
    assert (
        config_from_tables(merge_tables(read_preset("pacs"), {"algorithm": {"name": "fedavg"}})).algorithm.fields == {}
    )


def test_a_preset_of_another_dataset_is_refused_and_ones_own_data_is_not() -> None:
    with pytest.raises(InputError, match="preset 'pacs' is for the dataset pacs, not minidigits"):
        ConfigRequest("pacs", options={"dataset": "minidigits"}).resolve()
    assert ConfigRequest("pacs", options={"dataset": "arrays"}).resolve().data.name == "arrays"


def test_a_preset_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(InputError, match="no preset 'pac'; did you mean 'pacs'"):
        ConfigRequest("pac").resolve()
