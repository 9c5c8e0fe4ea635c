"""`fedcir run --resume --out X`: X knows what it is, and nothing is started that was not asked for."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir.config import Config
from fedcir.runtime.run_folder import RunFolder

Tiny = Callable[..., Config]
Train = Callable[..., Path]
Command = Callable[..., Any]

OWN = '''"""Own: FedAvg with a weight on its loss."""

from dataclasses import dataclass

import fedcir
from fedcir import Losses


@dataclass(frozen=True)
class Own(fedcir.FedAvg):
    """Nobody, 2024. https://example.org"""

    def local_loss(self, modules, x, y, ctx):
        losses = super().local_loss(modules, x, y, ctx)
        return Losses(WEIGHT * losses.total, losses.terms)
'''


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def refused(message: Any, *named: str) -> None:
    assert (message.code, message.out, message.err.count("\n")) == (2, "", 1)
    for name in named:
        assert name in message.err


@pytest.mark.parametrize("stop", [0, 1])
def test_resume_takes_the_settings_of_the_run_that_it_continues(
    fedcir: Command, tiny: Tiny, train: Train, tmp_path: Path, stop: int
) -> None:
    config = tiny("fedprox", "run.seed=1", "algorithm.mu=0.3", "partition.scheme=dirichlet", "partition.clients=5")
    out = train(config, tmp_path / "run", until=stop)
    assert fedcir("run", "--resume", "--out", out, "--no-report").code == 0
    assert model(out) == model(train(config, tmp_path / "whole"))


def test_options_beside_resume_must_agree_or_be_ones_that_may_change(
    fedcir: Command, tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    out = train(tiny("fedprox", "run.seed=1", "partition.scheme=iid", "partition.clients=4"), tmp_path / "run", until=1)
    for options, named in (
        ("--seed 2", "was started with run.seed=1, not 2"),
        ("--algorithm fedavg", "was started with algorithm.name=fedprox, not fedavg"),
        ("--set algorithm.mu=0.2", "was started with algorithm.mu=0.1, not 0.2"),
        ("--set algorithms.fedprox.mu=0.2", "was started with algorithm.mu=0.1, not 0.2"),
        ("--clients 5", "was started with partition.clients=4, not 5"),
        ("--rounds 2", "was started with 3 rounds, so it cannot end after 2"),
    ):
        refused(fedcir("run", "--resume", "--out", out, *options.split()), named)
    agreeing = ["--seed", 1, "--algorithm", "fedprox", "--clients", 4, "--set", "algorithms.fedprox.mu=0.1"]
    assert fedcir("run", "--resume", "--out", out, "--rounds", 4, "--no-report", *agreeing).code == 0
    assert len(RunFolder(out).records()) == 4


@pytest.mark.parametrize("command", [["run"], ["deploy", "local"]])
def test_resume_without_a_run_says_so_and_starts_nothing(fedcir: Command, workspace: Path, command: list[str]) -> None:
    (workspace / "empty").mkdir()
    for out in ("nowhere", "empty"):
        refused(fedcir(*command, "--resume", "--out", out), f"{out} holds no run to continue", "without --resume")
    refused(fedcir(*command, "--resume"), "--out")
    assert [path.name for path in workspace.rglob("*")] == ["empty"]


def test_runs_without_out_are_numbered(fedcir: Command, options: list[str], workspace: Path) -> None:
    for folder in ("arrays-fedavg-0", "arrays-fedavg-0-2", "arrays-fedavg-0-3"):
        output = fedcir("run", *options, "--algorithm", "fedavg", "--rounds", 1)
        assert output.code == 0
        assert f"saved in runs/{folder}\n" in output.out
        assert RunFolder(workspace / "runs" / folder).finished


def test_a_run_keeps_a_copy_of_its_method_and_refuses_another(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    Path("own.py").write_text(OWN.replace("WEIGHT", "1.0"))
    command = ["run", *options, "--algorithm", "./own.py", "--out", "run"]
    assert fedcir(*command).code == 0
    assert Path("run/own.py").read_bytes() == Path("own.py").read_bytes()
    before = model(workspace / "run")
    Path("own.py").write_text(OWN.replace("WEIGHT", "2.0"))
    resume = [*command, "--resume", "--rounds", 5]
    refused(fedcir(*resume), "own.py has changed since run was started", "choose another folder", "run/own.py")
    assert model(workspace / "run") == before
    shutil.move("run/own.py", "own.py")  # it may lie elsewhere
    Path("elsewhere").mkdir()
    shutil.move("own.py", "elsewhere/own.py")
    assert fedcir("run", "--resume", "--out", "run", "--algorithm", "elsewhere/own.py", "--rounds", 5).code == 0


def test_compare_refuses_a_method_that_has_changed_since(fedcir: Command, options: list[str], workspace: Path) -> None:
    Path("own.py").write_text(OWN.replace("WEIGHT", "1.0"))
    command = ["compare", *options, "--rounds", 1, "--algorithms", "fedavg,./own.py", "--out", "both"]
    assert fedcir(*command).code == 0
    Path("own.py").write_text(OWN.replace("WEIGHT", "2.0"))
    refused(fedcir(*command, "--resume"), "own.py has changed since both/own-0 was started")


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_a_finished_run_whose_model_is_damaged_writes_it_again(
    fedcir: Command, tiny: Tiny, train: Train, tmp_path: Path, damage: str
) -> None:
    out = train(tiny("fedcir"), tmp_path / "run")
    whole, summary = model(out), (out / "summary.json").read_bytes()
    if damage == "missing":
        (out / "model.safetensors").unlink()
    else:
        (out / "model.safetensors").write_bytes(whole[:-9] if damage == "cut" else b"")
    output = fedcir("run", "--resume", "--out", out, "--no-report")
    assert output.code == 0
    assert "model.safetensors was missing or damaged, and was written again from the last checkpoint" in output.err
    assert model(out) == whole
    assert (out / "summary.json").read_bytes() == summary
