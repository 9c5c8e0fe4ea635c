"""When a SuperLink has died, its user is told why, and no process is left. A shell stands for Flower here."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedcir.errors import RunError
from fedcir.flower.local_federation import LocalFederation, _follow_rounds
from fedcir.runtime.run_folder import RunFolder

BOX = """Loading
╭─ Error ─────────────────────╮
│ Connection to the SuperLink │
│ is unavailable.             │
╰─────────────────────────────╯
"""


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[LocalFederation]:
    """A SuperLink that has started a process of its own, in another session, and a run that waits for it."""
    flower = LocalFederation(tmp_path, [])
    (tmp_path / "logs").mkdir()
    flower.superlink = flower.start("superlink", "sh", "-c", "setsid sleep 600 & echo serving; wait")
    yield flower
    flower.stop()


def wait_for_child(process: "subprocess.Popen[bytes]") -> psutil.Process:
    while True:
        if children := psutil.Process(process.pid).children():
            return children[0]


def test_when_the_superlink_is_killed_the_run_says_so_and_no_process_is_left(federation: LocalFederation) -> None:
    assert federation.superlink is not None
    orphan = wait_for_child(federation.superlink)
    streaming = federation.start("run", "sleep", "600")
    federation.superlink.kill()
    federation.superlink.wait()
    with pytest.raises(RunError, match=r"Flower's SuperLink has ended: signal 9$"):
        list(_follow_rounds(federation, streaming, RunFolder(federation.folder / "out")))
    federation.stop()
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    streaming.wait()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (BOX, "Error Connection to the SuperLink is unavailable."),
        ("one\ntwo\n\n", "two"),
        ("", "its log is empty"),
    ],
)
def test_the_reason_is_what_a_log_says_and_not_the_border_of_a_box(tmp_path: Path, log: str, words: str) -> None:
    flower = LocalFederation(tmp_path, [])
    flower.log("run").parent.mkdir()
    flower.log("run").write_text(log, encoding="utf-8")
    assert flower.read_last_line("run") == words
