"""The run of another: nothing that opens it runs the code that it names, unless the user says so."""

import shutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcir
from fedcir.config import AlgorithmConfig, Config, ModelConfig, dump_toml
from fedcir.errors import InputError
from fedcir.experiments.tuning import SearchPlan

Said = Callable[..., Any]
HEAD = "import os\nfrom pathlib import Path\n\nPath(os.environ['RAN']).touch()\n\n"
MINE = HEAD + "import fedcir\n\n\nclass Mine(fedcir.FedAvg):\n    pass\n"
NET = HEAD + "from torch import nn\n\n\ndef make(seed=0):\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))\n"


@pytest.fixture(scope="module")
def runs(
    tiny: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """A finished run of a method of a file, and one of a model of a file; the files are gone."""
    folder = tmp_path_factory.mktemp("theirs")
    few = ("server.rounds=1", "local.steps=1", "run.workers=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAN", str(folder / "ran"))
        (folder / "mine.py").write_text(MINE)
        (folder / "net.py").write_text(NET)
        own = {
            "algorithm": tiny(str(folder / "mine.py"), *few),
            "model": replace(tiny("fedavg", *few), model=ModelConfig(f"{folder / 'net.py'}:make")),
        }
        made = {what: train(config, folder / what) for what, config in own.items()}
        (folder / "mine.py").unlink()
        (folder / "net.py").unlink()
        yield made


@pytest.fixture
def ran(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once code of a run has run."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ran"


def opened(run: Path, out: Path, **trust: bool) -> dict[str, Callable[[], Any]]:
    """All that opens the run of another."""
    image = np.zeros((8, 8, 3), np.uint8)
    return {
        "load_run": lambda: fedcir.load_run(run, **trust).model(),
        "Predictor": lambda: fedcir.Predictor(run, device="cpu", **trust)([image]),
        "evaluate": lambda: fedcir.evaluate(run, device="cpu", **trust),
        "export": lambda: fedcir.export(run, out / "model.safetensors", format="safetensors", **trust),
        "diagnose": lambda: fedcir.diagnose(run, samples=8, out=None, **trust),
        "report": lambda: fedcir.report(run, out=out / "report.html", samples=8, **trust),
    }


@pytest.mark.parametrize("what", ["algorithm", "model"])
def test_nothing_that_opens_a_run_runs_its_code(runs: dict[str, Path], ran: Path, tmp_path: Path, what: str) -> None:
    for reader, open_ in opened(runs[what], tmp_path).items():
        if reader == "report":  # the numbers are told, and what was left out
            (note,) = open_().notes
            assert note.startswith(f"distances not measured: the {what} of {runs[what]} is code of its own, ")
            assert note.endswith(", which was not run: if you trust it, set trust_code")
        else:
            with pytest.raises(InputError, match="trust_code"):
                open_()
        assert not ran.exists(), reader


@pytest.mark.parametrize("what", ["algorithm", "model"])
def test_trusted_code_is_the_copy_in_the_folder(runs: dict[str, Path], ran: Path, tmp_path: Path, what: str) -> None:
    """The file that config.toml names is no longer there."""
    for reader, open_ in opened(runs[what], tmp_path, trust_code=True).items():
        open_()
        assert ran.exists(), reader
        ran.unlink()


def test_a_callable_of_a_package_is_code_too(
    tiny: Callable[..., Config], train: Callable[..., Path], ran: Path, tmp_path: Path
) -> None:
    """config.toml could name any function of any package that is installed, with arguments of its choice."""
    out = train(tiny("fedavg", "server.rounds=1", "local.steps=1", "run.workers=1"), tmp_path / "run")
    tables = tomllib.loads((out / "config.toml").read_text())
    tables["fedcir"].pop("checksum")
    tables["model"] = {"name": "os:mkdir", "arguments": {"path": str(ran)}}
    (out / "config.toml").write_text(dump_toml(tables))
    assert fedcir.report(out, out=tmp_path / "report.html", samples=8).notes[0].endswith("set trust_code")
    with pytest.raises(InputError, match=r"the model of .* is code of its own, os:mkdir, which was not run"):
        fedcir.diagnose(out, samples=8, out=None)
    assert not ran.exists()


@pytest.mark.parametrize("what", ["algorithm", "model"])
def test_a_resume_runs_the_code_of_a_run_only_if_the_user_names_or_trusts_it(
    fedcir: Said, runs: dict[str, Path], ran: Path, tmp_path: Path, what: str
) -> None:
    out = shutil.copytree(runs[what], tmp_path / "run")
    (out / "summary.json").unlink()
    command = ["run", "--resume", "--out", out, "--no-report", "--quiet"]
    refused = fedcir(*command)
    assert refused.code == 2
    assert refused.err.endswith("which was not run: if you trust it, set trust_code (--trust-code)\n")
    assert not ran.exists()
    assert fedcir(*command, "--trust-code").code == 0
    assert ran.exists()
    (out / "summary.json").unlink()
    mine = shutil.copy(out / ("mine.py" if what == "algorithm" else "net.py"), tmp_path)
    assert fedcir(*command, f"--{what}", mine if what == "algorithm" else f"{mine}:make").code == 0


def test_a_copy_that_was_exchanged_is_not_resumed(
    fedcir: Said, runs: dict[str, Path], ran: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(runs["algorithm"], tmp_path / "run")
    mine = shutil.copy(out / "mine.py", tmp_path)
    (out / "mine.py").write_text(MINE + "\n")
    refused = fedcir("run", "--resume", "--out", out, "--algorithm", mine, "--quiet")
    assert refused.code == 2
    assert refused.err == (
        f"fedcir: {out}/mine.py has changed since the run was started: restore it, or choose another folder\n"
    )


def test_trials_of_another_do_not_run_their_code(tiny: Callable[..., Config], ran: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "tuned").mkdir()
    config = replace(tiny("fedavg"), algorithm=AlgorithmConfig(str(tmp_path / "mine.py")))
    SearchPlan(config, {"local.lr": "0.1,0.2"}, 1).save(tmp_path / "tuned")
    with pytest.raises(InputError, match=r"mine\.py, which was not run: if it is yours, name it again"):
        fedcir.tune(out=tmp_path / "tuned", resume=True)
    assert not ran.exists()
