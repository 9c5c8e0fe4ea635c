"""Training that starts from the head that fedcirone fits in closed form (model.start)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcir import Config, InputError, load_run
from fedcir.config import AlgorithmConfig, DataConfig, LocalConfig, ModelConfig, ServerConfig
from fedcir.models.adapters import load_trained
from fedcir.runtime.simulation import open_run


def outputs(config: Config, rounds_to_run: int) -> torch.Tensor:
    """Logits of the first client's training images after some rounds; the encoder of a frozen one is included."""
    with open_run(config) as (session, rounds):
        for _ in range(rounds_to_run):
            next(rounds)
        client, modules = session.roster.clients[0], session.algorithm.build(session.roster.builder)
        load_trained(modules["model"], session.state.shared["model"])
        modules["model"].eval()
        x, _ = client.train.batch(np.arange(len(client.train)), torch.device("cpu"), torch.contiguous_format)
        with torch.inference_mode():
            return session.algorithm.predict(modules, x, session._local_context())


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("fedavg", "model.freeze=true"),
        ("fedavg", "model.freeze=false"),
        ("fedavg", "model.adapter=lora"),
        ("fedavg", "model.train=head"),
        ("scaffold", "model.freeze=false"),
        ("fedadam", "model.freeze=true"),
    ],
)
def test_round_1_starts_from_the_closed_form_head_on_the_encoders_features(
    tiny: Callable[..., Config], method: str, setting: str
) -> None:
    split = "data.val_fraction=0.2"
    closed = tiny("fedcirone", "model.freeze=true", "algorithm.standardise=federation", split)
    started = tiny(method, "server.active=2", split, setting, "model.start=fedcirone")
    torch.testing.assert_close(outputs(started, 0), outputs(closed, 1), rtol=1e-3, atol=1e-3)


def test_a_resumed_run_has_the_same_bits_and_the_setting_is_not_part_of_the_model(
    tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny("fedbn", "model.start=fedcirone", "local.lr=0.0001", "server.checkpoint_every=1")
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", until=1)
    parts = train(config, tmp_path / "parts", resume=True)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert "start" not in load_run(whole).card["model"]
    assert load_run(whole).model(domain="ink") is not None


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        ("fedcir", "", "which fedcir has not: leave it out"),
        ("fedproto", "", "which fedproto has not"),
        ("fedsr", "", "which fedsr has not"),
        ("fedcirone", "model.freeze=true", "which fedcirone has not"),
        ("fedavg", "privacy.clip=1", "which privacy.clip does not protect"),
    ],
)
def test_what_cannot_start_from_a_head_is_refused_before_anything_is_written(
    tiny: Callable[..., Config], tmp_path: Path, method: str, setting: str, message: str
) -> None:
    config = tiny(method, "model.start=fedcirone", *([setting] if setting else []))
    with pytest.raises(InputError, match=message), open_run(config, tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["model.hidden=8", "model.norm=group"])
def test_a_changed_encoder_is_refused(tiny: Callable[..., Config], setting: str) -> None:
    freeze = ["model.freeze=true"] if "hidden" in setting else []
    with pytest.raises(InputError, match=r"fits a head on the encoder as it comes: leave out model\.(hidden|norm)"):
        tiny("fedavg", *freeze, "model.start=fedcirone", setting)


def test_training_on_a_table_can_start_from_a_head(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in "ab":
        rows = [f"{x:.3f},{int(x > 0)}" for x in rng.normal(size=60)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["x,y", *rows]), encoding="utf-8")
    data, local = DataConfig("csv", str(tmp_path), target="y"), LocalConfig(steps=1, lr=1e-6)
    model = ModelConfig("linear", start="fedcirone")
    algorithm, server = AlgorithmConfig("fedavg"), ServerConfig(rounds=1)
    config = Config(data, model=model, local=local, server=server, algorithm=algorithm)
    with open_run(config) as (_, rounds):
        assert (next(rounds).accuracy_mean or 0) > 0.8
