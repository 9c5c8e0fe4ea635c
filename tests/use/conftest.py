"""Pictures of three classes in two domains, and a finished run on them whose clients set images aside."""

from collections.abc import Callable
from pathlib import Path

import pytest
from bands import CLASSES, write_pictures

from fedcir.config import Config, config_from, merged, parse_assignment


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), ("day", "night"), CLASSES)


@pytest.fixture(scope="session")
def settings(pictures: Path) -> Callable[..., Config]:
    """A config on the pictures by `settings("fedavg", "server.rounds=5")`."""

    def make(algorithm: str = "fedavg", *assignments: str) -> Config:
        tables = {
            "data": {"name": "folders", "root": str(pictures), "image_size": 8, "val_fraction": 0.25},
            "model": {"width": 4},
            "local": {"steps": 6, "batch_size": 16, "lr": 0.1},
            "server": {"rounds": 5},
            "algorithm": {"name": algorithm},
            "run": {"device": "cpu", "workers": 1},
        }
        for assignment in assignments:
            tables = merged(tables, parse_assignment(assignment))
        return config_from(tables)

    return make


@pytest.fixture(scope="session")
def run(settings: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(), tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="session")
def plain(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run without images set aside, and without BatchNorm."""
    config = settings("fedavg", "data.val_fraction=0", "model.norm=group", "server.rounds=1")
    return train(config, tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="session")
def apart(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run whose clients have BatchNorm of their own."""
    return train(settings("fedbn"), tmp_path_factory.mktemp("runs") / "apart")


@pytest.fixture(scope="session")
def unfinished(
    settings: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return train(settings(), tmp_path_factory.mktemp("runs") / "unfinished", until=1)
