"""Fixtures for all tests: a dataset that trains in a fraction of a second, and three ways to start a run on it."""

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from fedcir.algorithms import find_algorithm
from fedcir.config import Config, config_from_tables, merge_tables, parse_assignment
from fedcir.data.domains import Domains
from fedcir.data.sources.minidigits import minidigits
from fedcir.plugins import FILE_MODULE
from fedcir.runtime.simulation import open_run
from warm_process import Output, WarmProcess

hypothesis.settings.register_profile("small", max_examples=25, deadline=None, database=None, derandomize=True)
hypothesis.settings.register_profile("large", max_examples=300, deadline=None, database=None)
hypothesis.settings.load_profile("small")  # `make test-slow` takes the large one: pytest --hypothesis-profile large


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cache decoded images in a folder of this test session, shared by its processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fedcir-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCIR_CACHE", str(folder))
        yield folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that none of them is left when all others are done."""
    items.sort(key=lambda item: item.path.name != "test_deployment.py")


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection."""
    gc.collect()
    gc.freeze()


def _write_domain(path: Path, *, seed: int = 0, classes: int = 3, train: int = 24, test: int = 12) -> Path:
    """Write a .npz of 8x8 noise in which the height of a bright band tells the class."""
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
    """Folder of three domains that all tests may read."""
    root = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("ink", "pen", "wax")):
        _write_domain(root / f"{name}.npz", seed=number)
    return root


@pytest.fixture(scope="session")
def digits() -> Domains:
    """The embedded dataset, drawn once: it takes seconds."""
    return minidigits()


@pytest.fixture(scope="session")
def tiny(data_root: Path) -> Callable[..., Config]:
    """Make a config: `tiny("fedavg", "server.rounds=5")`. The default is three rounds of two steps in one process."""

    def make(algorithm: str = "fedcir", *assignments: str) -> Config:
        tables = {
            "data": {"name": "arrays", "root": str(data_root)},
            "model": {"width": 2},
            "local": {"steps": 2, "batch_size": 8},
            "server": {"rounds": 3},
            "algorithm": {"name": algorithm},
            "run": {"device": "cpu", "workers": 1},
        }
        if "hidden" in {field.name for field in dataclasses.fields(find_algorithm(algorithm))}:
            tables["algorithm"]["hidden"] = 8
        for assignment in assignments:
            tables = merge_tables(tables, parse_assignment(assignment))
        return config_from_tables(tables)

    return make


@pytest.fixture(scope="session")
def train() -> Callable[..., Path]:
    """Run a config in a folder, to its end or until `until` rounds are done in total."""

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
    """Make the environment of processes that send themselves a signal at one moment, however busy the machine is.

    The moment is an event of Python's audit hooks with an argument that ends with `ending`: ("os.rename", ".json").
    Only processes whose command line contains `command` do so.
    """

    def make(command: str, event: str, ending: str, number: int) -> dict[str, str]:
        folder = tmp_path / "signalling"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SIGNALLING)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, "FEDCIR_TEST_SIGNAL": f"{command}|{event}|{ending}|{int(number)}"}

    return make


@pytest.fixture(scope="module")
def fast_processes(warm_process: WarmProcess) -> Iterator[None]:
    """Fork the runs of comparisons from the warm process in this module, instead of starting interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_process.python))
        yield


@pytest.fixture
def no_user_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the users' files that other tests imported: error messages name those that the process has imported."""
    for name in [name for name in sys.modules if name.startswith(FILE_MODULE)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def fedcir(
    warm_process: WarmProcess,
    no_user_modules: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Output]]:
    """Run the command in this process: `fedcir("run", "--rounds", 3)` returns its exit code and output."""
    from fedcir.cli import main
    from fedcir.cli.progress import Meter

    monkeypatch.setattr(Meter, "DELAY", 3600.0)  # show no progress, however busy the machine is
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Output:
        monkeypatch.setattr(sys, "argv", ["fedcir", *map(str, arguments)])
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(warm_process.python))  # for the runs that a comparison starts
            with pytest.raises(SystemExit) as ended:
                main()
        code = ended.value.code
        assert isinstance(code, int)
        return Output(code, *capfd.readouterr())

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    process = WarmProcess(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()


@pytest.fixture
def fork_fedcir(warm_process: WarmProcess, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Output]:
    """Run `fedcir` in a process forked from one that has imported torch: `fork_fedcir("run", cwd=folder)`."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return warm_process.run


@pytest.fixture(scope="session")
def options(data_root: Path) -> list[str]:
    """Options of the command line for the same tiny run."""
    text = "--dataset arrays --rounds 3 --local-steps 2 --batch-size 8 --device cpu --workers 1 --set model.width=2"
    return [*text.split(), "--no-report", "--data-root", str(data_root)]
