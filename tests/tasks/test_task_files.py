"""Tasks in a user's file: a run keeps a copy, and no file of a run, and no message, makes code run without trust."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcir as package
from fedcir import InputError
from fedcir.data.agreement import Agreement, DataSummary
from fedcir.tasks.classification import read_task
from fedcir.tasks.task import find_task, make_task

TASK = """
from dataclasses import dataclass
from pathlib import Path
from fedcir import Regression
Path("imported").touch()
@dataclass(frozen=True)
class Halved(Regression):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) / 2
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedcir: Callable[..., Any]) -> Path:
    """A run of two sites whose task is a file."""
    monkeypatch.chdir(tmp_path)
    Path("halved.py").write_text(TASK, encoding="utf-8")
    Path("sites").mkdir()
    rng = np.random.default_rng(0)
    for site in "ab":
        rows = [f"{x:.3f},{2 * x:.3f}" for x in rng.normal(size=20)]
        Path(f"sites/{site}.csv").write_text("\n".join(["x,y", *rows]), encoding="utf-8")
    settings = ["--set", "data.target=y", "--set", "task.name=./halved.py", "--model", "linear", "--rounds", 1]
    options = ["--dataset", "csv", "--data-root", "sites", "--algorithm", "fedavg", "--out", "run", "--quiet"]
    assert fedcir("run", *options, *settings).code == 0
    Path("imported").unlink()
    return Path("run")


def test_a_finished_run_brings_its_task_if_it_is_trusted(run: Path) -> None:
    Path("halved.py").unlink()
    task = package.load_run(run, trust_code=True).task
    assert (task.name, task.names) == ("halved", ("y",))
    assert package.load_run(run, trust_code=True).model().head.out_features == 1


def test_no_command_on_a_run_imports_its_files_without_trust(run: Path, fedcir: Callable[..., Any]) -> None:
    assert package.load_run(run).curve("rmse_mean")[0] == [1]
    with pytest.raises(InputError, match=r"code of its own, halved.py:Halved, which was not run.* set trust_code"):
        package.load_run(run).model()
    again = ["run", "--resume", "--out", run, "--rounds", 2, "--quiet"]
    refused = fedcir(*again)
    assert refused.code == 2
    assert "code of its own, ./halved.py, which was not run" in refused.err
    assert not Path("imported").exists()
    assert fedcir(*again, "--trust-code").code == 0
    assert Path("imported").exists()


def test_no_command_on_a_run_imports_the_file_of_its_dataset_without_trust(
    run: Path, fedcir: Callable[..., Any]
) -> None:
    settings = (run / "config.toml").read_text(encoding="utf-8").replace('name = "csv"', 'name = "./halved.py"')
    (run / "config.toml").write_text(re.sub(r"(?m)^checksum.*\n", "", settings), encoding="utf-8")
    for command in ("audit", "diagnose"):
        assert "./halved.py, which was not run" in fedcir(command, run).err
    assert not Path("imported").exists()


def test_evaluating_a_classifier_imports_no_task_that_its_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedcir: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("halved.py").write_text(TASK, encoding="utf-8")
    data = ["--dataset", "minidigits", "--image-size", 16]
    quick = ["--rounds", 1, "--local-steps", 1, "--set", "model.width=2", "--device", "cpu", "--quiet"]
    assert fedcir("run", *data, "--algorithm", "fedavg", *quick, "--out", "run").code == 0
    settings = Path("run/config.toml").read_text(encoding="utf-8")
    settings = re.sub(r"(?m)^checksum.*\n", "", settings).replace("[task]\n", '[task]\nname = "./halved.py"\n')
    Path("run/config.toml").write_text(settings, encoding="utf-8")
    assert '"./halved.py"' in settings
    assert "./halved.py, which was not run" in fedcir("evaluate", "run", "--dataset", "minidigits").err
    assert not Path("imported").exists()


@pytest.mark.parametrize("name", ["./halved.py", "./halved.py:Halved"])
def test_no_card_or_message_makes_a_file_run(name: str, run: Path) -> None:
    card = {"name": name, "names": ["y"]}
    for read in (
        lambda: read_task({"classes": [], "task": card}),
        lambda: DataSummary.from_card({"task": card, "columns": [], "targets": []}),
        lambda: Agreement.from_card({"task": card}),
    ):
        with pytest.raises(InputError, match="which was not run"):
            read()
    assert not Path("imported").exists()


def test_a_card_names_the_file_of_its_task(run: Path) -> None:
    card = find_task("./halved.py")(("y",)).to_card()
    assert card["name"] == "halved.py:Halved"
    assert make_task(card, Path()).names == ("y",)
