"""Pictures of three classes in two domains, and a finished run on them whose clients set images aside."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bands import CLASSES, FURTHER_METHODS, write_pictures

from fedcir.config import Config, config_from_tables, merge_tables, parse_assignment
from fedcir.runs.reader import Run, load_run


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
            tables = merge_tables(tables, parse_assignment(assignment))
        return config_from_tables(tables)

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


@pytest.fixture(scope="session")
def method_run(
    tiny: Callable[..., Config],
    write_domain: Callable[..., Path],
    train: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Run]:
    """A finished run of each method, trained once: two domains with 90 test images each."""
    data = tmp_path_factory.mktemp("data")
    for seed, domain in enumerate(("one", "two")):
        write_domain(data / f"{domain}.npz", seed=5 * seed, train=40, test=90)
    runs: dict[str, Run] = {}

    def make(name: str) -> Run:
        if name not in runs:
            method, *further = FURTHER_METHODS.get(name, (name,))
            common = (f"data.root={json.dumps(str(data))}", "data.val_fraction=0.25", "run.workers=1", "local.lr=0.05")
            config = tiny(method, *common, "server.rounds=2", *further)
            runs[name] = load_run(train(config, tmp_path_factory.mktemp("runs") / name))
        return runs[name]

    return make
