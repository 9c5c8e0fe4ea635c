"""After kill -9 of what started a federation: no process of it lives on, and its keys are gone."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from fedcir.flower.local_federation import end_abandoned

HURRY = 300
PARENT = """
import os, subprocess, sys, time
from pathlib import Path
from fedcir.flower.local_federation import watch

folder = Path(sys.argv[1])
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
with watch(folder):
    child = subprocess.Popen(
        [sys.executable, "-c", stubborn],
        env={**os.environ, "FLWR_HOME": str(folder / "flwr")},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    child.stdout.readline()
    print(child.pid, flush=True)
    if sys.argv[2] == "killed":
        time.sleep(600)
    child.kill()
    child.wait()
"""


@pytest.mark.parametrize("ends", [pytest.param("killed", marks=pytest.mark.slow), "in order"])
def test_what_a_killed_federation_leaves_is_ended_and_removed(tmp_path: Path, ends: str) -> None:
    """A process in a session of its own, which ignores SIGTERM; after an end in order, the folder is its owner's."""
    (tmp_path / "work" / "nodes").mkdir(parents=True)
    (tmp_path / "work" / "nodes" / "0.key").write_text("secret")
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "FLWR_HOME": str(tmp_path / "works")}
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "work"), ends], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if ends == "killed":
            parent.send_signal(signal.SIGKILL)
        parent.wait(HURRY)
        until = time.monotonic() + HURRY
        while ends == "killed" and (tmp_path / "work").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert not _lives(child)
        assert (tmp_path / "work").exists() == (ends == "in order")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        parent.kill()
        parent.wait()
        parent.stdout.close()  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_is_left_where_the_watcher_was_killed_too_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder whose owner and watcher were killed, and one whose owner lives."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parents, children = [], []
    for name in ("fedcir-dead", "fedcir-alive"):
        (tmp_path / name / "certs").mkdir(parents=True)
        command = [sys.executable, "-c", PARENT, str(tmp_path / name), "killed"]
        parents.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        children.append(int(parents[-1].stdout.readline()))  # type: ignore[union-attr]
    try:
        (watcher,) = [p for p in psutil.Process(parents[0].pid).children() if p.pid != children[0]]
        watcher.kill()
        parents[0].kill()
        parents[0].wait(HURRY)
        assert (tmp_path / "fedcir-dead").exists()
        end_abandoned()
        assert [path.name for path in tmp_path.iterdir()] == ["fedcir-alive"]
        assert [item for item in children if _lives(item)] == [children[1]]
    finally:
        for parent in parents:
            parent.kill()
            parent.communicate()


def _lives(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
