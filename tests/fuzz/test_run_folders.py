"""Damaged run folders: they are read, or refused in one line, and no resume gives another model."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ended import HANG, Stuck, not_stuck
from mutate import batches, damaged_copy, outcomes

import fedcir
from fedcir.cli.application import describe_failure
from fedcir.config import Config
from fedcir.reporting.run_report import report
from fedcir.runs.reader import load_run
from fedcir.runtime.simulation import open_run


@pytest.fixture(scope="module")
def config(tiny: Callable[..., Config]) -> Config:
    """Clients keep something, and images are set aside for calibration."""
    few = ("server.rounds=3", "server.checkpoint_every=1", "local.steps=1", "run.workers=1", "data.val_fraction=0.2")
    return tiny("fedbn", *few)


@pytest.fixture(scope="module")
def whole(config: Config, train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def stopped(config: Config, train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config, tmp_path_factory.mktemp("stopped") / "run", until=2)


def fault(what: str, work: Callable[[], Any]) -> str | None:
    """What is wrong with how something ended, if anything is."""
    try:
        with not_stuck():
            work()
    except Stuck:
        return f"{what}: still busy after {HANG} s"
    except Exception as error:
        line, code = describe_failure(error)
        if "\n" in line or len(line) > 1500 or line.startswith("internal error") or code not in (1, 2):
            return f"{what}: {type(error).__name__}, {len(line)} characters: {line[:300]}"
    return None


def readers(run: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """All that a user does with the run of another."""

    def curves() -> None:
        result = load_run(run)
        result.curve("accuracy_mean")
        result.to_rows()

    return {
        "load_run": curves,
        "report": lambda: report(run, out=out / "report.html", samples=0),
        "model": lambda: load_run(run).model(domain="ink"),
        "Predictor": lambda: fedcir.Predictor(run, site="ink", device="cpu"),
    }


@batches(30)
def test_a_damaged_run_is_read_or_refused_in_one_line(whole: Path, tmp_path: Path, seeds: range) -> None:
    def attempt(rng: random.Random) -> str | None:
        damage = damaged_copy(whole, tmp_path / "run", rng)
        results = [fault(what, work) for what, work in readers(tmp_path / "run", tmp_path).items()]
        wrong = "; ".join(item for item in results if item)
        return f"{damage}: {wrong}" if wrong else None

    assert outcomes(seeds, attempt) == []


@batches(20)
def test_a_damaged_run_resumes_to_the_same_model_or_is_refused_in_one_line(
    config: Config, whole: Path, stopped: Path, tmp_path: Path, seeds: range
) -> None:
    model = (whole / "model.safetensors").read_bytes()
    out = tmp_path / "run"

    def resume() -> bool:
        with open_run(config, out, resume=True) as (_, rounds):
            for _ in rounds:
                pass
        return (out / "model.safetensors").read_bytes() == model

    def attempt(rng: random.Random) -> str | None:
        damage = damaged_copy(rng.choice((whole, stopped)), out, rng)
        same: list[bool] = []
        wrong = fault("resume", lambda: same.append(resume()))
        if same == [False]:
            wrong = "it ended in another model"
        return f"{damage}: {wrong}" if wrong else None

    try:
        assert outcomes(seeds, attempt) == []
    finally:
        shutil.rmtree(out, ignore_errors=True)
