"""Exports of a private run name its guarantee, and carry nothing that was measured without noise."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

import fedcir
from fedcir.config import Config
from fedcir.inference.exporting import export, make_metadata
from fedcir.inference.model import open_model
from fedcir.inference.model_card import CARD
from fedcir.runtime.run_folder import RunFolder
from fedcir.server.accounting import Accountant

Settings = Callable[..., Config]
ON = ("privacy.clip=1", "privacy.noise=1", "model.norm=group", "server.rounds=4", "local.steps=2")


@pytest.fixture(scope="module")
def private(settings: Settings, train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with noise whose clients set images aside, with a checkpoint of every round."""
    config = settings("fedavg", *ON, "server.checkpoint_every=1")
    return train(config, tmp_path_factory.mktemp("runs") / "private")


def guarantee() -> dict[str, object]:
    return {
        **{"epsilon": Accountant(1.0, 1e-5).epsilon(4), "delta": 1e-5, "unit": "client", "place": "server"},
        **{"adjacency": "zero-out", "randomness": "seed"},
    }


def test_the_files_of_a_private_run_name_its_guarantee(private: Path, tmp_path: Path) -> None:
    made = export(private, tmp_path / "model.safetensors")
    with safe_open(made.path, framework="pt") as file:
        card = json.loads(file.metadata()["fedcir"])
    assert card["privacy"] == guarantee()
    assert card["temperature"] == 1.0
    assert RunFolder(private).card()["privacy"] == guarantee()


def test_the_metadata_of_onnx_and_torch_files_names_the_guarantee(private: Path) -> None:
    """By the entries that both get, since torch's exporters take long to import."""
    entries = make_metadata(open_model(private, device="cpu"))
    assert json.loads(entries["privacy"]) == guarantee()
    assert (entries["temperature"], entries["calibrated_on"]) == ("1.0", "0")


def test_the_card_of_a_private_run_holds_no_number_without_noise(private: Path, tmp_path: Path) -> None:
    export(private, tmp_path / "model.safetensors")
    text = (tmp_path / CARD).read_text(encoding="utf-8")
    message = "epsilon 10.7 at delta 1e-05, for a client with all its training images"
    assert message in " ".join(text.split())
    assert "Adjacency is `zero-out`" in text
    assert "it protects nobody" in text
    assert "model-index" not in text
    assert "seed 0" not in text
    assert "%" not in text
    final = fedcir.load_run(private).summary["final"]  # type: ignore[index]
    shown = {f"{100 * value:.1f}" for value in (final["accuracy_mean"], *final["accuracy"].values())}
    assert not shown & set(re.findall(r"\d+\.\d+", text))
    assert "training images |" not in text


def test_clients_of_a_private_run_send_no_sums_for_a_calibration(private: Path) -> None:
    assert not (private / "calibration.json").exists()
    assert not open_model(private, device="cpu").calibrated
    assert fedcir.load_run(private).records[-1].validation is not None, "images were set aside"


def test_a_calibration_of_an_earlier_version_is_not_used(private: Path, run: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(private, tmp_path / "copy")
    saved = json.loads((run / "calibration.json").read_text(encoding="utf-8"))
    del saved["checksum"]
    (copy / "calibration.json").write_text(json.dumps({**saved, "round": 4}), encoding="utf-8")
    assert RunFolder(copy).calibration() is not None
    assert open_model(copy, device="cpu").calibration.temperature == 1.0


def test_no_checkpoint_is_kept_for_its_accuracy(private: Path) -> None:
    assert RunFolder(private).checkpoint_rounds() == [3, 4]


def test_a_summary_of_an_earlier_version_gets_the_epsilon_of_replaced_data(settings: Settings, private: Path) -> None:
    from dataclasses import replace

    from fedcir.inference.model_card import guarantee_of

    run = fedcir.load_run(private)
    assert run.summary is not None
    old = {**run.summary, "privacy": {"epsilon": 1.0, "delta": 1e-5, "unit": "client", "place": "client"}}
    config = settings("fedavg", *ON, "privacy.place=client")
    result = guarantee_of(replace(run, config=config, summary=old))
    assert result is not None
    assert result["adjacency"] == "replace-one"
    assert result["epsilon"] == Accountant(0.5, 1e-5).epsilon(4)


def test_a_site_of_its_own_is_said_to_be_outside_the_guarantee(
    settings: Settings, train: Callable[..., Path], tmp_path: Path
) -> None:
    config = settings("fedbn", "privacy.clip=1", "privacy.noise=1", "server.rounds=1", "local.steps=1")
    out = train(config, tmp_path / "apart")
    made = export(out, tmp_path / "model.safetensors", site="day")
    with safe_open(made.path, framework="pt") as file:
        assert json.loads(file.metadata()["fedcir"])["privacy"]["epsilon"] is None
    assert "so no epsilon covers it: do not give it to others" in made.card.read_text(encoding="utf-8")


def test_a_run_without_noise_says_nothing_of_privacy(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model.safetensors")
    text = (tmp_path / CARD).read_text(encoding="utf-8")
    assert "rivacy" not in text
    assert "privacy" not in RunFolder(run).card()
    assert "Probabilities are calibrated by a temperature" in text
