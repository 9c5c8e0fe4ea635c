"""`fedcir reproduce`: every table and figure at smoke scale, killed, resumed and refused."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedcir.experiments.paper import EXPERIMENTS
from fedcir.runtime.run_folder import RunFolder

Command = Callable[..., Any]


@pytest.fixture
def smoke(data_root: Path) -> list[str]:
    """The tiny data, instead of the embedded ones that take seconds to make."""
    return ["--scale", "smoke", "--dataset", "arrays", "--data-root", str(data_root), "--device", "cpu"]


@pytest.mark.slow
def test_every_table_and_figure_is_made_and_shares_its_runs(fedcir: Command, smoke: list[str], tmp_path: Path) -> None:
    out = tmp_path / "all"
    for id in ["table1", *(id for id in EXPERIMENTS if id != "table1")]:
        runs = {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
        output = fedcir("reproduce", id, *smoke, *(["--resume"] * out.exists()), "--out", out)
        assert output.code == 0, output.err
        assert {n: (out / n / "summary.json").stat().st_mtime_ns for n in runs} == runs, "a run was done again"
        rows = list(csv.reader((out / f"{id}.csv").read_text().splitlines()))
        assert len(rows) > 1
        assert all(len(row) == len(rows[0]) for row in rows)
        assert (out / f"{id}.md").read_text().count("|") > 4
        assert "\\toprule" in (out / f"{id}.tex").read_text()
        heads = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
        for end, head in heads.items():
            assert (out / f"{id}.{end}").read_bytes().startswith(head)
        assert id in (out / "report.html").read_text()
        assert f"{id}: " in output.out
    accuracy = RunFolder(out / "arrays-fedcir-0").summary()["final"]["accuracy_mean"]
    first = {row["method"]: row for row in csv.DictReader((out / "table1.csv").read_text().splitlines())}
    assert len(first) == 9
    assert float(first["fedcir"]["accuracy"]) == pytest.approx(100 * accuracy, rel=1e-5)


def test_a_plan_says_what_there_is_to_do_and_does_nothing(fedcir: Command, smoke: list[str], tmp_path: Path) -> None:
    output = fedcir("reproduce", "table1", *smoke, "--plan", "--out", tmp_path / "out")
    assert output.code == 0
    assert "9 runs in" in output.err
    assert "about 1 min for the rest" in output.err
    assert not (tmp_path / "out").exists()


def test_others_may_do_the_runs_of_a_plan(fedcir: Command, smoke: list[str], tmp_path: Path) -> None:
    settings = ["reproduce", "fig-risk", *smoke, "--out", tmp_path / "out", "--no-report"]
    runs = json.loads(fedcir(*settings, "--plan", "--json").out)
    assert [Path(run["out"]).name for run in runs] == ["arrays-fedavg-0", "arrays-fedcir-0"]
    assert all(run["seconds"] > 0 and not Path(run["out"]).exists() for run in runs)
    for run in runs:
        assert run["command"][0] == "fedcir"
        assert fedcir(*run["command"][1:]).code == 0
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/summary.json")}
    assert len(done) == 2
    assert json.loads(fedcir(*settings, "--plan", "--json").out) == []
    output = fedcir(*settings, "--resume")
    assert output.code == 0, output.err
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert (tmp_path / "out" / "fig-risk.csv").exists()


def test_methods_of_the_paper_that_settings_refuse_are_left_out(
    fedcir: Command, smoke: list[str], tmp_path: Path
) -> None:
    private = ["--set", "privacy.clip=1", "--set", "model.norm=group", "--plan", "--out", tmp_path / "out"]
    output = fedcir("reproduce", "table1", *smoke, *private)
    assert output.code == 0
    left_out = [line.split()[3] for line in output.err.splitlines() if line.startswith("note: left out: ")]
    assert left_out == ["centralized", "fedproc", "fedgen"]
    assert "6 runs in" in output.err


@pytest.mark.slow
def test_a_sweep_that_is_killed_is_resumed_to_the_same_bits(
    fedcir: Command, smoke: list[str], tmp_path: Path, signalling: Callable[..., dict[str, str]]
) -> None:
    """Its runs stop where they would put their third checkpoint into its place."""
    arguments = ["reproduce", "fig-risk", *smoke, "--rounds", "5", "--set", "server.checkpoint_every=1", "--no-report"]
    command = [sys.executable, "-m", "fedcir", *arguments, "--out", str(tmp_path / "killed")]
    env = signalling("fedcir", "os.rename", "round-000003.safetensors", signal.SIGSTOP)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env)
    until = time.monotonic() + 300
    stopped: list[psutil.Process] = []
    while not stopped:
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
        runs = psutil.Process(process.pid).children(recursive=True)
        stopped = [run for run in runs if run.status() == psutil.STATUS_STOPPED]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for run in runs:
        with contextlib.suppress(psutil.NoSuchProcess):
            run.resume()  # one that stands still cannot end
    psutil.wait_procs(runs, timeout=300)
    assert not [run for run in runs if run.is_running() and run.status() != psutil.STATUS_ZOMBIE], "a run goes on"
    assert not (tmp_path / "killed" / "fig-risk.md").exists()
    for name in ("killed", "whole"):
        output = fedcir(*arguments, *(["--resume"] if name == "killed" else []), "--out", tmp_path / name)
        assert output.code == 0, output.err
    for name in ("arrays-fedavg-0", "arrays-fedcir-0"):
        models = [(tmp_path / item / name / "model.safetensors").read_bytes() for item in ("killed", "whole")]
        assert models[0] == models[1]
    assert (tmp_path / "killed" / "fig-risk.csv").read_text() == (tmp_path / "whole" / "fig-risk.csv").read_text()


def test_one_failed_run_is_named_and_the_rest_is_shown(fedcir: Command, smoke: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        '"""Broken: fails."""\nimport fedcir\n\n\nclass Broken(fedcir.FedAvg):\n    """Nobody."""\n\n'
        "    def local_loss(self, modules, x, y, ctx):\n        raise SystemExit(3)\n"
    )
    out = tmp_path / "out"
    output = fedcir("reproduce", "fig-convergence", *smoke, "--algorithms", f"fedavg,{broken}", "--out", out)
    assert output.code == 1
    assert output.err.splitlines()[-1].startswith("fedcir: 1 of 2 runs failed, resume to try them again: arrays-br")
    rows = list(csv.DictReader((out / "fig-convergence.csv").read_text().splitlines()))
    assert {row["method"] for row in rows} == {"fedavg"}
    assert (out / "report.html").exists()


def test_json_is_alone_on_standard_output(fedcir: Command, smoke: list[str], tmp_path: Path) -> None:
    output = fedcir(
        "reproduce", "fig-risk", *smoke, "--algorithms", "fedavg", "--json", "-o", tmp_path / "o", "--no-report"
    )
    message = json.loads(output.out)
    assert message["id"] == "fig-risk"
    assert message["rows"][1][:2] == ["arrays", "fedavg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tabel1", "did you mean 'table1'?"),
        ("table1 --scale huge", "no scale 'huge'; choose from paper, small, smoke"),
        ("table1 --scale small", "data.root is missing: give a folder that holds domainnet, pacs"),
        ("table1 --scale small --data-root nowhere", "data.root nowhere is not a folder"),
        ("table1 --scale small --data-root .", "holds no folder domainnet or pacs"),
        ("table1 --scale smoke --dataset pasc", "did you mean 'pacs'?"),
        ("table1 --target 0.5", "only table3 takes a target"),
        ("table3 --target 60", "target must be between 0 and 1 for accuracy, got 60"),
        ("table1 --scale smoke --seeds x", "--seeds takes whole numbers"),
        ("table2 --scale smoke --algorithms fedavg", "takes only fedcir, not 'fedavg'"),
        ("fig-local-steps --scale smoke --local-steps 9", "local.steps=9 is not one of its points: E 1; E 4"),
        ("table1 --scale smoke --workers 0", "run.workers must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    fedcir: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    output = fedcir("reproduce", *arguments.split())
    assert output.code == 2
    assert words in output.err
    assert output.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
