"""Optimisers, warm-up and clipping of local steps, and the end of a run that no longer improves."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fedcir.client.local_update import learning_rate
from fedcir.config import Config, LocalConfig
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.models.optimizers import find_optimizer, make_optimizer
from fedcir.runtime.rounds import SerialTransport
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]
Train = Callable[..., Path]
STALLED = ("data.val_fraction=0.25", "server.patience=2", "server.rounds=30", "local.lr=0.3")


def step_once(name: str, gradient: list[float], **rates: float) -> list[float]:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make_optimizer(name, [parameter])
    parameter.grad = torch.tensor(gradient)
    optimizer.step(**{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, **rates})
    return parameter.tolist()


def test_adams_first_step_is_the_sign_of_the_gradient_times_the_rate() -> None:
    assert step_once("adam", [5.0, -0.01]) == pytest.approx([0.9, -1.9], abs=1e-5)


def test_adamw_decays_weights_apart_from_the_gradient() -> None:
    decayed = [1.0 * (1 - 0.1 * 0.5) - 0.1, -2.0 * (1 - 0.1 * 0.5) + 0.1]
    assert step_once("adamw", [5.0, -0.01], weight_decay=0.5) == pytest.approx(decayed, abs=1e-5)


def test_any_class_of_torch_is_found_in_any_case() -> None:
    assert find_optimizer("RMSPROP") is torch.optim.RMSprop
    assert step_once("Adagrad", [5.0, -5.0]) == pytest.approx([0.9, -1.9], abs=1e-5)


@pytest.mark.parametrize("name", ["adamm", "lbfgs", "optimizer", "__doc__"])
def test_an_optimiser_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(InputError, match=r"local\.optimizer cannot be .*adam"):
        find_optimizer(name)


def test_a_restarted_optimiser_has_no_memory() -> None:
    def run(restart: bool) -> list[float]:
        parameter = nn.Parameter(torch.tensor([1.0]))
        optimizer = make_optimizer("adam", [parameter])
        if restart:
            parameter.grad = torch.tensor([3.0])
            optimizer.step(0.1, 0.9, 0.0)
            parameter.data.fill_(1.0)
            optimizer.restart()
        for gradient in (1.0, -2.0):
            parameter.grad = torch.tensor([gradient])
            optimizer.step(0.1, 0.9, 0.0)
        return parameter.tolist()

    assert run(restart=True) == run(restart=False)


def test_the_rate_grows_over_the_rounds_of_the_warm_up() -> None:
    local = LocalConfig(lr=1.0, warmup=4)
    assert [learning_rate(local, round, 100) for round in (1, 2, 4, 5, 6)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    cosine = LocalConfig(lr=1.0, warmup=1, schedule="cosine")
    assert learning_rate(cosine, 2, 4) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_a_clipped_step_is_as_long_as_the_rate_times_the_limit(tiny: Tiny) -> None:
    settings = ("local.steps=1", "server.rounds=1", "local.momentum=0", "local.weight_decay=0", "partition.clients=3")
    with open_run(tiny("fedavg", *settings, "local.clip_norm=0.001", "local.lr=0.5")) as (session, _):
        clients = open_federation(session.config).clients
        reply = next(SerialTransport(session.make_trainer(), clients).train(session.state, [0]))
        before, after = session.model, reply.tensors["model"]
        names = [name for name, _ in session.modules["model"].named_parameters()]
    norm = math.sqrt(sum(float((after[name].double() - before[name].double()).square().sum()) for name in names))
    assert norm == pytest.approx(0.5 * 0.001, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop"])
def test_equal_seeds_give_equal_bits_with_every_optimiser(
    tiny: Tiny, train: Train, tmp_path: Path, optimizer: str
) -> None:
    settings = (f"local.optimizer={optimizer}", "local.lr=0.001", "local.warmup=1", "local.clip_norm=1")
    one = train(tiny("fedcir", *settings), tmp_path / "one", until=2)
    train(tiny("fedcir", *settings), one, resume=True)
    two = train(tiny("fedcir", *settings, "run.workers=2"), tmp_path / "two")
    plain = train(tiny("fedcir"), tmp_path / "plain")
    files = [(run / "model.safetensors").read_bytes() for run in (one, two, plain)]
    assert files[0] == files[1] != files[2]


def test_scaffold_refuses_other_optimisers_than_sgd(tiny: Tiny) -> None:
    with (
        pytest.raises(InputError, match=r"local\.optimizer=adam: scaffold .*set local\.optimizer=sgd"),
        open_run(tiny("scaffold", "local.optimizer=adam")),
    ):
        pass


def test_a_run_ends_after_its_patience_and_is_finished(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    out = train(tiny("fedavg", *STALLED), tmp_path / "run")
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    means = [sum(line["validation"].values()) / len(line["validation"]) for line in lines]
    best = means.index(max(means)) + 1
    assert len(lines) == best + 2 < 30
    folder = RunFolder(out)
    assert folder.finished
    assert folder.summary()["rounds"] == folder.summary()["final"]["round"] == best + 2
    assert folder.hits() is not None
    assert folder.calibration() is not None
    files = [(out / name).read_bytes() for name in ("model.safetensors", "summary.json", "rounds.jsonl")]
    train(tiny("fedavg", *STALLED), out, resume=True)
    assert files == [(out / name).read_bytes() for name in ("model.safetensors", "summary.json", "rounds.jsonl")]


def test_an_interrupted_run_ends_in_the_same_round(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    whole = train(tiny("fedavg", *STALLED), tmp_path / "whole")
    parts = train(tiny("fedavg", *STALLED), tmp_path / "parts", until=1)
    train(tiny("fedavg", *STALLED), parts, resume=True)
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert RunFolder(whole).summary()["rounds"] == RunFolder(parts).summary()["rounds"]


def test_patience_needs_validation_images(tiny: Tiny) -> None:
    with (
        pytest.raises(InputError, match=r"server\.patience=2 picks a round on validation images.*data\.val_fraction"),
        open_run(tiny("fedavg", "server.patience=2")),
    ):
        pass
