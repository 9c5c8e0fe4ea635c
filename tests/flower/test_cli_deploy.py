"""`fedcir deploy`: what can be said before anything is started, and one run as its user sees it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedcir.runtime.run_folder import RunFolder

Fedcir = Callable[..., Any]

REFUSED = [
    (["--algorithm", "centralized"], "centralized trains on all data in one place, not across sites"),
    (["--sites", "9"], "sites must be from 1 to 3, the number of clients, got 9"),
    (["--sites", "0"], "sites must be from 1 to 3, the number of clients, got 0"),
    (["--timeout", "0"], "timeout must be above 0, got 0"),
    (["--profile"], "--profile measures this process"),
    (["--algorithm", "fedavgg"], "did you mean 'fedavg'?"),
    (["--set", "model.weights=x.pth", "--set", "model.batchnorm=local"], "leave one of them out"),
    (["--data-root", "nowhere"], "no folder nowhere"),
]


@pytest.mark.parametrize(
    ("more", "words"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_run_is_said_in_one_line_before_anything_is_started(
    fedcir: Fedcir, options: list[str], tmp_path: Path, more: list[str], words: str
) -> None:
    output = fedcir("deploy", "local", *options, *more, "--out", tmp_path / "run")
    assert output.code == 2
    assert words in output.err
    assert output.err.count("\n") == 1
    assert not list(tmp_path.glob("run/*.toml"))


def test_a_folder_with_a_run_is_refused_and_one_that_is_finished_is_shown_again(
    fedcir: Fedcir, options: list[str], tmp_path: Path
) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    output = fedcir("deploy", "local", *options, "--out", tmp_path / "run")
    assert output.code == 2
    assert "already holds a run" in output.err
    output = fedcir("deploy", "local", *options, "--resume", "--out", tmp_path / "run")
    assert output.code == 0
    assert "is already finished, after round 3" in output.err


def test_certificates_are_made_and_never_over_others(fedcir: Fedcir, tmp_path: Path) -> None:
    output = fedcir("deploy", "certs", "fl.example.org", "--out", tmp_path / "certs")
    assert output.code == 0
    assert "give it to every site" in output.out
    shown = fedcir("deploy", "certs", "--out", tmp_path / "certs")
    assert (shown.code, shown.err, shown.out.count("is valid until")) == (0, "", 2)
    soon = fedcir("deploy", "certs", "--renew", "--days", "9", "--out", tmp_path / "certs")
    assert (soon.code, soon.err.count("\n")) == (0, 1)
    assert "server.crt ends in 8 days: make a new one with `fedcir deploy certs --renew`" in soon.err
    assert fedcir("deploy", "certs", "--out", tmp_path / "none").code == 2
    before = (tmp_path / "certs" / "server.key").read_bytes()
    again = fedcir("deploy", "certs", "fl.example.org", "--out", tmp_path / "certs")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert (tmp_path / "certs" / "server.key").read_bytes() == before
    assert fedcir("deploy", "certs", "https://fl.example.org", "--out", tmp_path / "other").code == 2
    assert not (tmp_path / "other").exists()


def test_the_app_is_written(fedcir: Fedcir, tmp_path: Path) -> None:
    output = fedcir("deploy", "app", tmp_path / "mine")
    assert output.code == 0
    assert "[tool.flwr.app.config]" in (tmp_path / "mine" / "pyproject.toml").read_text(encoding="utf-8")
    assert fedcir("deploy", "app", tmp_path / "mine").code == 2


def test_without_flower_it_says_how_to_get_it(fedcir: Fedcir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    output = fedcir("deploy", "certs", "localhost")
    assert output == (2, "", "fedcir: `fedcir deploy` needs Flower: pip install 'fedcir[flower]'\n")


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_resume_goes_on_to_the_same_bits(
    fedcir: Fedcir, options: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "fedcir", "deploy", "local", *options, "--eval-every", "3"]
    command += ["--set", "server.checkpoint_every=5", "--out", str(tmp_path / "flower")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folder = RunFolder(tmp_path / "flower")
    end = time.monotonic() + 600
    while not folder.records():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.5)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "continue with: fedcir deploy local --resume" in message
    assert not [item for item in family if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]
    done = subprocess.run([*command, "--resume", "--json"], capture_output=True, text=True, check=True)
    fedcir("run", *options, "--eval-every", "3", "--set", "server.checkpoint_every=5", "--out", tmp_path / "here")
    assert json.loads(done.stdout)["final"] == RunFolder(tmp_path / "here").summary()["final"]
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("flower", "here")]
    assert models[0] == models[1]
