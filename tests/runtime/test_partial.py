"""Runs in which parts of the encoder, or adapters on it, train: only these travel and are stored."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcir
from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.config import Config
from fedcir.conformance import CHECKS, Subject, it_trains_on_any_task_or_needs_classes
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.models.builder import make_image_builder
from fedcir.models.tensors import snapshot
from fedcir.runs.reader import load_run
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run
from fedcir.tensor_files import unpack_groups
from kinds import mark_others_slow

Tiny = Callable[..., Config]
Train = Callable[..., Path]

PARTLY, LORA = "model.train=fc", "model.adapter=lora"
SETTINGS = {
    "partly": {"model.train": "convs.2,norms.2,fc"},
    "lora": {"model.train": "norms.*", "model.adapter": "lora"},
}
STEPS = [name for name in list_algorithms() if not find_algorithm(name).one_shot]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", mark_others_slow(STEPS, fast=["fedavg", "fedbn", "scaffold"]))
def test_every_method_keeps_every_guarantee_with_a_partly_frozen_encoder(name: str, kind: str) -> None:
    subject = Subject(find_algorithm(name)(), SETTINGS[kind])
    for check in CHECKS:
        if check is not it_trains_on_any_task_or_needs_classes:  # on encoders with other parts
            check(subject)


HEAD_BYTES = 4 * (3 * 128 + 3)
WIDTHS = (3, 2, 4, 8)
"""Channels of the CNN of `tiny`, whose last layer has 16 * 8 inputs and 128 outputs."""


@pytest.mark.parametrize(
    ("setting", "trained"),
    [
        (PARTLY, 4 * (128 * 128 + 128)),
        ("model.train=head", 0),
        ("model.train=norms.2", 4 * (4 * 8) + 8),  # weight, bias, mean, variance, and a counter of 64 bits
        (LORA, 4 * 8 * (sum(9 * a + b for a, b in pairwise(WIDTHS)) + 128 + 128)),
    ],
)
def test_only_what_trains_travels(setting: str, trained: int, tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedavg", setting, "server.checkpoint_every=1"), tmp_path / "run")
    record = load_run(out).records[-1]
    assert record.bytes_up == record.bytes_down == 3 * (trained + HEAD_BYTES)
    *_, newest = sorted((out / "checkpoint").glob("round-*"))
    groups, _ = unpack_groups(newest, "shared", "private")
    assert sum(t.numel() * t.element_size() for t in groups["shared"]["model"].values()) == trained + HEAD_BYTES


@pytest.mark.parametrize("name", ["moon", "ditto", "fedproto", "fedbn"])
def test_what_clients_keep_holds_no_frozen_tensor(name: str, tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny(name, "model.train=norms.2,fc"), tmp_path / "run")
    groups, _ = unpack_groups(out / "clients" / "0" / "round-000003.safetensors", "kept")
    names = {tensor for bag in groups["kept"].values() for tensor in bag}
    assert any("norms.2" in tensor for tensor in names)
    assert not any("convs" in tensor or "norms.0" in tensor for tensor in names)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedproto"])
@pytest.mark.parametrize("setting", [PARTLY, LORA])
def test_the_models_file_holds_all_it_takes_to_predict(
    name: str, setting: str, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    """Weights of a file are the frozen ones, and the file is gone when the model is used."""
    weights, config = tmp_path / "weights.pth", tiny(name, setting)
    donor = make_image_builder(config.model, 3, 3, 99).make_encoder()
    torch.save(donor.state_dict(), weights)
    out = train(tiny(name, setting, f"model.weights={weights}"), tmp_path / "run")
    weights.unlink()
    result = load_run(out)
    model = result.model(domain=None if name == "fedavg" else "pen")
    assert torch.equal(model.state_dict()["encoder.network.convs.0.weight"], donor.state_dict()["convs.0.weight"]) == (
        setting == PARTLY  # adapters were added into it
    )
    assert {n.removeprefix("encoder.network.") for n in model.state_dict() if "head" not in n} == {*donor.state_dict()}
    evaluated = fedcir.evaluate(out)
    measured = result.records[-1].accuracy
    assert measured is not None
    predicted = {part.domain: part.accuracy for part in evaluated.domains}
    assert predicted == pytest.approx(measured)


def test_a_model_with_adapters_is_exported_with_plain_weights(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    out = train(tiny("fedavg", LORA, "local.lr=0.1"), tmp_path / "run")
    exported = fedcir.export(out, tmp_path / "model.safetensors")
    assert exported.difference <= 1e-6
    tensors = load_file(exported.path)
    plain = tiny("fedavg")
    names = open_federation(plain).builder.classifier().state_dict().keys()
    assert {name.replace("encoder.network.", "encoder.") for name in tensors} == names
    saved = load_run(out).weights()
    base, up, down = (
        saved[f"encoder.network.fc.parametrizations.weight.{name}"] for name in ("original", "0.up", "0.down")
    )
    assert up.any()
    torch.testing.assert_close(tensors["encoder.network.fc.weight"], base + 2 * up @ down)
    program = fedcir.export(out, tmp_path / "model.pt2")
    assert program.difference <= 1e-6


@pytest.mark.parametrize("setting", [PARTLY, LORA])
@pytest.mark.parametrize(
    "more",
    [
        ("privacy.clip=1", "privacy.noise=0.5"),
        ("privacy.clip=1", "privacy.noise=0.5", "privacy.place=client"),
        ("privacy.clip=1", "privacy.noise=0.5", "privacy.unit=example"),
        ("server.upload=int8",),
        ("server.upload=bfloat16",),
        ("server.aggregation=median",),
        ("server.aggregation=krum",),
        ("server.aggregation=norm-clip", "attack.kind=sign-flip"),
        ("model.batchnorm=pooled", "model.train=norms.2,fc"),
        ("model.batchnorm=local", "model.train=norms.2,fc"),
        ("model.batchnorm=frozen",),
        ("local.optimizer=adam", "local.clip_norm=1"),
        ("run.layout=channels_last",),
        ("model.name=resnet18", "model.width=16", "model.train=layer4"),
    ],
    ids=" ".join,
)
def test_it_goes_with(setting: str, more: tuple[str, ...], tiny: Tiny, tmp_path: Path) -> None:
    with open_run(tiny("fedavg", setting, "server.rounds=2", *more), tmp_path / "run") as (session, rounds):
        start = snapshot(session.modules["model"])
        for record in rounds:
            assert not record.dropped
        end, frozen = session.model, session.model.keys() - session.state.shared["model"].keys()
    kept = {name for name in frozen if "norms.2" not in name}  # which batchnorm=local leaves with clients
    assert len(kept) > 5
    assert all(torch.equal(end[name], start[name]) for name in kept)
    assert any(not torch.equal(end[name], start[name]) for name in session.state.shared["model"])


def test_a_run_of_adapters_resumes_and_is_extended_to_the_same_bytes(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    whole = train(tiny("scaffold", LORA, PARTLY, "server.rounds=4"), tmp_path / "whole")
    short = train(tiny("scaffold", LORA, PARTLY, "server.rounds=2"), tmp_path / "short")
    train(tiny("scaffold", LORA, PARTLY, "server.rounds=4"), short, resume=True)
    assert (whole / "model.safetensors").read_bytes() == (short / "model.safetensors").read_bytes()


def test_a_run_cannot_be_resumed_with_another_rank(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedavg", LORA, "server.rounds=2"), tmp_path / "run")
    with pytest.raises(InputError, match=r"started with model\.adapter_rank=None, not 4"):
        train(tiny("fedavg", LORA, "model.adapter_rank=4"), out, resume=True)


LOADS_ITSELF = """
import torch
from torch import nn

def make(file):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    network.load_state_dict(torch.load(file))
    return network
"""


@pytest.mark.parametrize("setting", ["model.train=2", LORA, "model.freeze=true"])
def test_a_run_cannot_be_resumed_with_other_frozen_weights(
    setting: str, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOADS_ITSELF)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    config = tiny("fedavg", setting)
    model = replace(config.model, name=f"{tmp_path}/mine.py:make", width=None)
    config = replace(config, model=replace(model, arguments={"file": str(tmp_path / "weights.pth")}))
    out = train(config, tmp_path / "run", until=1)
    train(config, out, resume=True, until=2)
    network[0].weight.data[0, 0, 0, 0] += 1
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(InputError, match="was started with other weights in the frozen part of its encoder"):
        train(config, out, resume=True)


def test_the_card_of_other_models_says_nothing_of_adapters(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    assert "adapter" not in RunFolder(train(tiny("fedavg"), tmp_path / "plain")).card()["model"]
    assert RunFolder(train(tiny("fedavg", LORA), tmp_path / "lora")).card()["model"]["adapter"] == "lora"


def test_train_takes_the_settings_for_an_encoder_of_its_caller(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 3
    pairs = [
        (torch.utils.data.TensorDataset(data, labels),) * 2
        for data in (torch.randn(24, 5, generator=rng) + 2 * torch.eye(5)[labels] for _ in range(2))
    ]
    encoder = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU())
    options: dict[str, Any] = {"encoder": encoder, "num_classes": 3, "rounds": 3, "workers": 1, "algorithm": "ditto"}
    result = fedcir.train(pairs, **options, set={"model.adapter": "lora", "model.train": "2"}, out=tmp_path / "run")
    trained = 8 * (5 + 6) + 7 * 6 + 7 + 3 * 7 + 3
    assert result.records[-1].bytes_up == 2 * 4 * trained
    model, personal = result.model, result.model_of("client-1")
    for merged in (model, personal):
        weights = merged.state_dict()
        assert torch.equal(weights["encoder.network.0.bias"], encoder[0].bias)
        assert not torch.equal(weights["encoder.network.0.weight"], encoder[0].weight)
    assert not torch.equal(model.state_dict()["head.weight"], personal.state_dict()["head.weight"])
    read = fedcir.load_run(tmp_path / "run").model(encoder=encoder).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(InputError, match=r"no settings of \[model\]"):
        fedcir.train(pairs, **options, set={"model.norm": "group"})


def test_frozen_parts_have_neither_gradients_nor_momentum(tiny: Tiny) -> None:
    with open_run(tiny("fedavg", "model.train=fc")) as (session, rounds):
        trainer = session.make_trainer()
        list(rounds)
    assert sum(p.numel() for p in trainer.optimizer.parameters) == 128 * 128 + 128 + 3 * 128 + 3
    assert np.isfinite(session.records[-1].accuracy_mean or np.nan)


def test_the_example_of_the_docs_uploads_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text(encoding="utf-8")
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "model.adapter" in code)
    exec(example, {})
    said = re.search(r"# 4 bytes \* (.*)$", example, re.MULTILINE)
    assert said is not None
    assert capsys.readouterr().out == f"{4 * eval(said[1].replace('clients', ''))}\n"
