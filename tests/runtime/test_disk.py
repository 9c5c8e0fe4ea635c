"""Writing a run: files that are replaced whole, full disks, and one process at a time in a folder."""

import contextlib
import fcntl
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from seven import Tiny, Train, same_run, seven, snapshot

from fedcir.errors import InputError
from fedcir.files import write_file
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run
from warm_process import Output

HURRY = 300
"""Seconds that a thread may take before a test gives up on it."""


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As on a full disk: the system refuses to write more than so many bytes to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_replaces_a_file_whole(tmp_path: Path) -> None:
    write_file(tmp_path / "file", "old, and longer")
    write_file(tmp_path / "file", "new: ä")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new: ä"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_write_on_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"old" * 100)
    with files_up_to(4096), pytest.raises(OSError, match="File too large"):
        write_file(tmp_path / "file", b"new" * 10_000)
    assert (tmp_path / "file").read_bytes() == b"old" * 100
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_run_that_filled_the_disk_goes_on_when_there_is_room(
    tiny: Tiny, train: Train, finished: Path, small_disk: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(400_000))
    run = small_disk / "run"
    with pytest.raises(OSError, match="No space left on device"):
        train(seven(tiny), run)  # three checkpoints of 240 kB, and the third has no room
    assert not list(run.rglob("*.tmp"))
    assert RunFolder(run).load_checkpoint() is not None
    filler.unlink()
    assert same_run(train(seven(tiny), run, resume=True), finished)


def test_a_run_whose_checkpoint_did_not_fit_goes_on_when_there_is_room(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path
) -> None:
    run = train(seven(tiny), tmp_path / "run", until=2)
    with files_up_to(100_000), pytest.raises(OSError, match="File too large"):
        train(seven(tiny), run, resume=True)
    assert not list(run.rglob("*.tmp"))
    state = RunFolder(run).load_checkpoint()
    assert state is not None
    assert state.round == 2
    assert same_run(train(seven(tiny), run, resume=True), finished)


def test_a_second_process_in_the_same_folder_is_refused(
    tiny: Tiny, options: list[str], fork_fedcir: Callable[..., Output], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with open_run(tiny("fedavg"), out) as (_, rounds):
        next(rounds)
        before = snapshot(out)
        second = fork_fedcir("run", *options, "--algorithm", "fedavg", "--resume", "-o", out)
        assert second.code == 2
        assert second.err == f"fedcir: another process is training in {out}: wait for it, or choose another folder\n"
        assert snapshot(out) == before
        assert [record.round for record in rounds] == [2, 3]


def test_where_nothing_was_written_neither_a_lock_nor_a_new_folder_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError), RunFolder(tmp_path / "new").lock():
        raise InputError("refused")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    with RunFolder(tmp_path / "mine").lock():
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_where_something_was_written_the_lock_stays(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").lock():
        (tmp_path / "run" / "manifest.json").touch()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"manifest.json", RunFolder.LOCK}


def _opened(path: Path) -> int:
    """How often this process has a file open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return links.count(str(path))


def test_who_waited_for_a_lock_that_was_then_removed_holds_the_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcir.files.LOCK_TIMEOUT", HURRY)
    folder, entered, leave = RunFolder(tmp_path / "run"), threading.Event(), threading.Event()

    def second() -> None:
        with folder.lock():
            entered.set()
            leave.wait(HURRY)

    thread = threading.Thread(target=second)
    with folder.lock():
        thread.start()
        deadline = time.monotonic() + HURRY
        while _opened(folder.path / RunFolder.LOCK) < 2:  # until it waits for the lock
            assert time.monotonic() < deadline
            time.sleep(0.01)
    try:
        assert entered.wait(HURRY)
        with open(folder.path / RunFolder.LOCK) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        leave.set()
        thread.join()


def test_the_lock_is_free_when_a_run_was_left(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = train(tiny("fedavg"), tmp_path / "run", until=1)
    train(tiny("fedavg"), run, resume=True)
    assert RunFolder(run).finished
