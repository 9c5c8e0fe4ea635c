"""Real federations on loopback. They take long to start, so that each serves several tests."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains of bars that lie or stand, brighter from one to the next."""
    root = tmp_path_factory.mktemp("bars")
    for number, domain in enumerate(("east", "north", "west")):
        rng = np.random.default_rng(number)
        parts = {}
        for part, samples in (("train", 48), ("test", 20)):
            labels = np.arange(samples) % 2
            images = rng.integers(0, 60 + 40 * number, (samples, 8, 8, 1), dtype=np.uint8)
            images[labels == 0, 3:5] += 60
            images[labels == 1, :, 3:5] += 60
            parts |= {f"x_{part}": images, f"y_{part}": labels}
        np.savez(root / f"{domain}.npz", **parts)
    return root


@pytest.fixture(scope="session")
def settings(shared_data: Path) -> str:
    """What all runs here have in common, as the run-config says it."""
    common = "data.name=arrays model.width=4 local.steps=3 local.batch_size=16 server.checkpoint_every=1"
    return f"data.root={shared_data} {common}"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What server and sites log; Flower's logger tells nobody above it."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a server, and sites that name no folder of their own, keep what is theirs."""
    monkeypatch.setenv("FEDCIR_STATE", str(tmp_path / "own-state"))
    return tmp_path / "own-state"


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process of a federation is alive when all its tests are over, nor a resident of one of its sites."""
    yield
    children, base = psutil.Process().children(recursive=True), str(tmp_path_factory.getbasetemp())
    assert not [child for child in children if any("flwr" in word or "flower" in word for word in child.cmdline())]
    assert not [process for process in psutil.process_iter() if _is_resident(process, base)]


def _is_resident(process: psutil.Process, base: str) -> bool:
    try:
        state = process.environ().get("FEDCIR_STATE", "")
        return state.startswith(base) and "fedcir.flower.client_app" in process.cmdline()
    except psutil.Error:
        return False
