"""`fedcir compare`: what goes wrong with one method or folder costs the others nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir import algorithms
from fedcir.experiments.batch import check_algorithms
from fedcir.runtime.run_folder import RunFolder

Command = Callable[..., Any]

FAULTY = '''"""Faulty: it raises."""

from dataclasses import dataclass

import fedcir


@dataclass(frozen=True)
class Faulty(fedcir.FedAvg):
    """Nobody, 2024. https://example.org"""

    def local_loss(self, modules, x, y, ctx):
        raise RuntimeError("it was never going to work")
'''

MENDED = FAULTY.replace(
    'raise RuntimeError("it was never going to work")', "return super().local_loss(modules, x, y, ctx)"
)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    return tmp_path


def refused(message: Any, *named: str, code: int = 2) -> None:
    assert (message.code, message.out, message.err.count("\n")) == (code, "", 1)
    for name in named:
        assert name in message.err


@pytest.mark.parametrize("baseline", [["fedavg", "fedprox"], pytest.param(["fedprox"], marks=pytest.mark.slow)])
def test_a_method_that_fails_leaves_the_others_their_table_and_report(
    fedcir: Command, options: list[str], workspace: Path, baseline: list[str]
) -> None:
    methods = ",".join(["./faulty.py", *baseline])
    command = [
        "compare",
        *options,
        "--report",
        "--rounds",
        2,
        "--algorithms",
        methods,
        "--seeds",
        "0,1",
        "--out",
        "all",
    ]
    output = fedcir(*command)
    assert output.code == 1
    last = output.err.splitlines()[-1]
    assert last.startswith("fedcir: 2 of ")
    assert "faulty-0: " in last
    assert "it was never going to work" in last
    assert [item["algorithm"] for item in json.loads((workspace / "all" / "comparison.json").read_text())] == baseline
    assert (workspace / "all" / "report.html").is_file()
    assert (workspace / "all" / "curves.png").is_file()
    assert "difference to" in output.out
    (workspace / "faulty.py").write_text(MENDED)
    assert fedcir(*command, "--resume").code == 0
    assert len(json.loads((workspace / "all" / "comparison.json").read_text())) == 1 + len(baseline)


def test_a_comparison_of_methods_that_all_fail_says_why(fedcir: Command, options: list[str], workspace: Path) -> None:
    output = fedcir("compare", *options, "--rounds", 2, "--algorithms", "./faulty.py", "--out", "all", "--quiet")
    refused(output, "1 of 1 runs failed", "it was never going to work", code=1)


def test_all_and_a_file_together_are_understood(workspace: Path) -> None:
    (workspace / "mine.py").write_text(MENDED)
    assert check_algorithms(["all", "./mine.py"]) == [*algorithms.list_algorithms(), "./mine.py"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("--seeds 0,0", "seeds names 0 twice"), ("--algorithms fedavg,fedavg", "algorithms names 'fedavg' twice")],
)
def test_a_seed_or_method_that_is_named_twice_is_refused(
    fedcir: Command, options: list[str], workspace: Path, arguments: str, named: str
) -> None:
    refused(fedcir("compare", *options, "--out", "all", *arguments.split()), named)
    assert not (workspace / "all").exists()


@pytest.mark.parametrize("command", [["compare"], ["reproduce", "table1", "--scale", "smoke"]])
def test_a_folder_of_something_else_is_refused_and_left_as_it_was(
    fedcir: Command, options: list[str], workspace: Path, command: list[str]
) -> None:
    (workspace / "thesis").mkdir()
    (workspace / "thesis" / "chapter.txt").write_text("one")
    refused(
        fedcir(*command, *options, "--out", "thesis"), "thesis holds other files and no runs", "choose another folder"
    )
    refused(fedcir(*command, *options, "--out", "faulty.py"), "faulty.py is a file", "choose another folder")
    assert [path.name for path in (workspace / "thesis").iterdir()] == ["chapter.txt"]


def test_a_comparison_of_other_data_is_refused_before_anything_starts(
    fedcir: Command, options: list[str], workspace: Path, write_domain: Callable[..., Path]
) -> None:
    """By its name, by its settings, and by what it holds."""
    assert fedcir("compare", "--out", "one", "--algorithms", "fedavg", *options, "--rounds", 1).code == 0
    before = sorted(workspace.rglob("*"))
    command = ["compare", "--resume", "--out", "one", "--algorithms"]
    other = ["--rounds", 1, "--dataset", "minidigits"]
    refused(fedcir(*command, "fedprox", *other), "one/fedavg-0 was started with data.name=arrays, not minidigits")
    capped = [*options, "--rounds", 1, "--set", "data.train_per_domain=6"]
    refused(fedcir(*command, "fedavg", *capped), "one/fedavg-0 was started with data.train_per_domain=None, not 6")
    (workspace / "data").mkdir()
    for number, name in enumerate(("ink", "pen", "wax")):
        write_domain(workspace / "data" / f"{name}.npz", seed=number + 3)
    output = fedcir(*command, "fedavg", *options, "--rounds", 2, "--data-root", "data")
    refused(output, "one/fedavg-0 was started on other data than arrays holds now")
    assert [path for path in sorted(workspace.rglob("*")) if "data" not in path.relative_to(workspace).parts] == before
    assert len(RunFolder(workspace / "one" / "fedavg-0").records()) == 1


def test_comparisons_without_out_are_numbered_and_resume_goes_on_with_the_last(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    command = ["compare", *options, "--rounds", 1, "--algorithms"]
    for folder in ("compare", "compare-2"):
        assert f"runs/{folder} holds " in fedcir(*command, "fedavg").out
    assert "runs/compare-2 holds " in fedcir(*command, "fedavg,fedprox", "--resume").out


@pytest.mark.parametrize("command", [["compare"], ["reproduce", "table1"], ["tune"]])
def test_resume_without_anything_to_continue_is_refused_and_trains_nothing(
    fedcir: Command, workspace: Path, command: list[str]
) -> None:
    refused(fedcir(*command, "--resume", "--out", "nowhere"), "nowhere holds no", "start without resume")
    assert not (workspace / "nowhere").exists()


def test_a_resumed_comparison_takes_the_options_that_it_was_started_with(
    fedcir: Command, options: list[str], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["compare", *options, "--rounds", 1, "--algorithms", "fedavg,fedprox", "--seeds", "3", "--set"]
    assert fedcir(*start, "algorithms.fedprox.mu=0.3", "--out", "one", "--no-report").code == 0
    model = (workspace / "one" / "fedprox-3" / "model.safetensors").read_bytes()
    shutil.rmtree(workspace / "one" / "fedprox-3")
    (workspace / "elsewhere").mkdir()
    monkeypatch.chdir(workspace / "elsewhere")  # paths that were relative then are the same folders now
    ended = fedcir("compare", "--resume", "--out", "../one", "--no-report")
    assert ended.code == 0, ended.err
    assert (workspace / "one" / "fedprox-3" / "model.safetensors").read_bytes() == model
    assert sorted(path.parent.name for path in (workspace / "one").glob("*/summary.json")) == ["fedavg-3", "fedprox-3"]


def test_a_resumed_comparison_runs_code_only_if_the_user_names_it_again(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    (workspace / "faulty.py").write_text(MENDED)
    start = ["compare", *options, "--rounds", 1, "--out", "one", "--no-report", "--algorithms", "fedavg,./faulty.py"]
    assert fedcir(*start).code == 0
    refused(
        fedcir("compare", "--resume", "--out", "one"), "one names code of its own, ./faulty.py", "give algorithms again"
    )
    named = ["compare", "--resume", "--out", "one", "--no-report", "--algorithms", "fedavg,./faulty.py"]
    assert fedcir(*named).code == 0


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    assert fedcir("run", *options, "--rounds", 1, "--algorithm", "fedavg", "--out", "run").code == 0
    refused(fedcir("report", "run", "--out", "nowhere/report.html"), "no folder nowhere")


def test_usual_methods_that_settings_refuse_are_left_out_in_a_line_each(
    fedcir: Command, options: list[str], workspace: Path
) -> None:
    (workspace / "mine.toml").write_text('algorithm.name = "fedprox"\nmodel.norm = "group"\nprivacy.clip = 1.0\n')
    output = fedcir("compare", "mine.toml", *options, "--rounds", 1, "--out", "all")
    assert output.code == 0
    notes = [line for line in output.err.splitlines() if line.startswith("note: left out")]
    assert notes == [
        "note: left out: centralized has all data in one place, so privacy.clip has no clients to protect: "
        "use another method, or no privacy.clip"
    ]
    made = [item["algorithm"] for item in json.loads((workspace / "all" / "comparison.json").read_text())]
    assert made == ["fedavg", "fedprox"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--algorithms fedavg,centralized --set privacy.clip=1 --set model.norm=group", "centralized has all data"),
        ("--algorithms fedavg,fedgen,centralized --set privacy.clip=1 --set model.norm=group", "fedgen uploads"),
        ("--algorithms fedavg,fedproto --hold-out wax", "fedproto needs training data at every client"),
        ("--algorithms fedavg,centralized --set attack.kind=scale", "centralized has all data in one place"),
        ("--set privacy.clip=1", "fedavg: privacy.clip cannot cover BatchNorm's running statistics"),
        ("--hold-out wax --set model.batchnorm=local", "fedavg: model.batchnorm=local needs training data"),
        ("--set server.aggregation=krum --set server.byzantine=2", "fedavg: server.aggregation=krum needs 7 active"),
    ],
)
def test_a_method_that_is_named_and_the_baseline_are_refused_before_anything_starts(
    fedcir: Command, options: list[str], workspace: Path, arguments: str, named: str
) -> None:
    refused(fedcir("compare", *options, "--out", "all", *arguments.split()), named)
    assert not (workspace / "all").exists()
