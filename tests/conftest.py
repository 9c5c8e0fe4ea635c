"""A dataset so small that a run takes a fraction of a second, and the two ways to start one."""

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedcir.algorithms import algorithm_class
from fedcir.config import Config, config_from, merged, parse_assignment
from fedcir.engine.simulate import open_run


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared images go into a folder of this test session, which its processes share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fedcir-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCIR_CACHE", str(folder))
        yield folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that none of them is left when all others are done."""
    items.sort(key=lambda item: item.path.name != "test_deployment.py")


def pytest_collection_finish() -> None:
    """What was imported stays, so that no look for garbage goes through it again."""
    gc.collect()
    gc.freeze()


def _write_domain(path: Path, *, seed: int = 0, classes: int = 3, train: int = 24, test: int = 12) -> Path:
    """A .npz of 8x8 noise in which each class has a bright band at a height of its own."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, count in (("train", train), ("test", test)):
        labels = np.arange(count) % classes
        images = rng.integers(0, 60 + 20 * seed, (count, 8, 8, 3))
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 120
        arrays |= {f"x_{part}": images.astype(np.uint8), f"y_{part}": labels}
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="session")
def write_domain() -> Callable[..., Path]:
    return _write_domain


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains, for all tests to read."""
    root = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("ink", "pen", "wax")):
        _write_domain(root / f"{name}.npz", seed=number)
    return root


@pytest.fixture(scope="session")
def tiny(data_root: Path) -> Callable[..., Config]:
    """A config by `tiny("fedavg", "server.rounds=5")`: three rounds of two steps if not said otherwise."""

    def make(algorithm: str = "fedcir", *assignments: str) -> Config:
        tables = {
            "data": {"name": "arrays", "root": str(data_root)},
            "model": {"width": 2},
            "local": {"steps": 2, "batch_size": 8},
            "server": {"rounds": 3},
            "algorithm": {"name": algorithm},
            "run": {"device": "cpu"},
        }
        if "hidden" in {field.name for field in dataclasses.fields(algorithm_class(algorithm))}:
            tables["algorithm"]["hidden"] = 8
        for assignment in assignments:
            tables = merged(tables, parse_assignment(assignment))
        return config_from(tables)

    return make


@pytest.fixture(scope="session")
def train() -> Callable[..., Path]:
    """Run a config in a folder, to its end or until so many rounds are done in all."""

    def run(config: Config, out: Path, *, resume: bool = False, until: int | None = None) -> Path:
        with open_run(config, out, resume) as (session, rounds):
            while session.state.round != until and next(rounds, None) is not None:
                pass
        return out

    return run


SIGNALLING = """
import os, sys

command, event, ending, number = os.environ["FEDCIR_TEST_SIGNAL"].split("|")

def signal_itself(name, arguments):
    if name == event and any(str(argument).endswith(ending) for argument in arguments):
        os.kill(os.getpid(), int(number))

if command in " ".join(sys.orig_argv):
    sys.addaudithook(signal_itself)
"""


@pytest.fixture
def signalling(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The environment of processes that send themselves a signal at one moment, however busy the machine is.

    The moment is an event of Python's audit hooks with an argument that ends as given, such as ("os.rename", ".json").
    Only processes whose command line holds `command` do so.
    """

    def make(command: str, event: str, ending: str, number: int) -> dict[str, str]:
        folder = tmp_path / "signalling"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SIGNALLING)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, "FEDCIR_TEST_SIGNAL": f"{command}|{event}|{ending}|{int(number)}"}

    return make


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def fedcir(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Said]]:
    """The command, in this process: `fedcir("run", "--rounds", 3)` gives its exit code and what it said."""
    from fedcir.cli import main
    from fedcir.cli.progress import Meter

    monkeypatch.setattr(Meter, "PATIENCE", 3600.0)  # no progress is shown, however busy the machine is
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedcir", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Said(code, *capfd.readouterr())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def options(data_root: Path) -> list[str]:
    """The same tiny run as options of the command line."""
    text = "--dataset arrays --rounds 3 --local-steps 2 --batch-size 8 --device cpu --set model.width=2"
    return [*text.split(), "--no-report", "--data-root", str(data_root)]
