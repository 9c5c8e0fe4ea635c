"""Runs that the tests of this folder share."""

import shutil
from pathlib import Path

import pytest
from seven import Tiny, Train, seven


@pytest.fixture(scope="session")
def finished(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seven rounds with a checkpoint in each, for all tests to read."""
    return train(seven(tiny), tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of it as a kill after round 7 would leave it: all rounds, two checkpoints, neither model nor summary."""
    copy = tmp_path / "stopped"
    shutil.copytree(finished, copy)
    (copy / "summary.json").unlink()
    (copy / "model.safetensors").unlink()
    return copy
