"""A folder from somebody else that holds links: no command writes or deletes anything through them."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.files import open_append, write_file
from fedcir.runs.reader import load_run
from fedcir.runtime.run_folder import RunFolder

Said = tuple[int, str, str]

FILES = [
    "config.toml", "manifest.json", "rounds.jsonl", "summary.json", "model.safetensors", "calibration.json", ".lock",
    "releases", "report.html", ".config.toml.tmp", ".rounds.jsonl.tmp", ".summary.json.tmp", ".model.safetensors.tmp",
    ".calibration.json.tmp", ".report.html.tmp", "checkpoint/round-000002.safetensors",
    "checkpoint/.round-000003.safetensors.tmp", "clients/0/round-000002.safetensors",
    "clients/0/.round-000003.safetensors.tmp", "evaluation/.evaluation.html.tmp", "audit/.audit.json.tmp",
    "track/mlflow.db",
]  # fmt: skip
FOLDERS = ["checkpoint", "clients", "clients/0", "evaluation", "audit", "track"]
COMPARED = ["settings", "settings/.arrays-fedavg-0.toml.tmp", "fedavg-0", "fedavg-0/.lock", "fedavg-0/checkpoint"]
COMPARED += [".comparison.json.tmp", ".curves.png.tmp"]
TUNED = [".lock", "trials.jsonl", "study.journal", "settings.toml", ".settings.toml.tmp"]
TUNED += [".best.toml.tmp", ".trials.png.tmp"]
SMALL = ("server.checkpoint_every=1", "local.steps=1", "run.workers=1", "data.val_fraction=0.2")


@pytest.fixture(scope="module")
def stopped(tiny: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two of three rounds; its clients keep tensors of their own."""
    return train(tiny("fedbn", *SMALL), tmp_path_factory.mktemp("stopped") / "run", until=2)


@pytest.fixture(scope="module")
def whole(tiny: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny("fedavg", *SMALL), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The files of a user, some of them with names that a run folder has too."""
    folder = tmp_path / "home" / "folder"
    (folder / "0").mkdir(parents=True)
    names = ["../notes.txt", ".old.tmp", "round-000001.safetensors", "0/round-000001.safetensors"]
    for name in names:
        (folder / name).write_text(f"{name} is mine")
    return tmp_path / "home"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def linked_copies(source: Path, name: str, home: Path, to: Path) -> Iterator[tuple[Path, str]]:
    """Copies of a folder in which one file or folder is a link: to its own content, to a user's, to nothing yet."""
    own = home / "own"
    original = source / name
    if original.is_dir():
        shutil.copytree(original, own)
    elif original.exists():
        shutil.copyfile(original, own)
    like_folder = original.is_dir() or name in FOLDERS
    for number, target in enumerate([own, home / ("folder" if like_folder else "notes.txt"), home / "new"]):
        if target == own and not own.exists():
            continue
        copy = to / f"copy{number}"
        shutil.copytree(source, copy)
        path = copy / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        yield copy, f"{name} as a link to {target.name}"


def attacked(
    copies: Iterator[tuple[Path, str]],
    home: Path,
    commands: Callable[[Path], list[list[object]]],
    fedcir: Callable[..., Said],
) -> list[str]:
    """Run commands on folders with a link; gives those that changed a user's file, or did not refuse the link."""
    faults = []
    for copy, what in copies:
        for command in commands(copy):
            before = contents(home)
            code, _, err = fedcir(*command)
            changed = contents(home) != before
            if tries := os.environ.get("FEDCIR_LINK_TRIES"):
                with open(tries, "a", encoding="utf-8") as file:
                    file.write(f"{command[0]}\t{what}\t{'changed' if changed else 'unchanged'}\t{code}\n")
            named = " is a link" in err or what.endswith("to new")  # which may as well be missing
            if changed or code != 2 or len(err.splitlines()) != 1 or not named:
                faults.append(f"{command[0]} with {what}: changed {changed}, exit code {code}, {err}")
    return faults


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize(
    "every",
    [False, pytest.param(True, marks=pytest.mark.slow, id="every command")],  # 500 of them
)
def test_a_link_in_a_finished_run_is_refused(
    name: str, every: bool, whole: Path, home: Path, fedcir: Callable[..., Said], tmp_path: Path
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")

    def commands(run: Path) -> list[list[object]]:
        return [
            ["evaluate", run, "--quiet"],
            ["run", "--resume", "--out", run, "--rounds", 4, "--quiet"],
            ["audit", run, "--steps", 0, "--samples", 10, "--quiet"],
            ["report", run, "--samples", 0, "--out", run / "report.html"],
            ["export", run, "--out", run / "export.safetensors"],
            ["predict", run, tmp_path / "image.png"],
            ["diagnose", run, "--samples", 8, "--out", run / "diagnosis.png", "--quiet"],
        ][: None if every or name == "config.toml" else 2]

    copies = linked_copies(whole, name, home, tmp_path)
    assert attacked(copies if every else islice(copies, 1), home, commands, fedcir) == []


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_in_a_stopped_run_is_refused_by_a_resume(
    name: str, stopped: Path, home: Path, fedcir: Callable[..., Said], tmp_path: Path
) -> None:
    def resume(run: Path) -> list[list[object]]:
        return [["run", "--resume", "--out", run, "--quiet"]]

    assert attacked(linked_copies(stopped, name, home, tmp_path), home, resume, fedcir) == []


@pytest.mark.parametrize("name", COMPARED)
def test_a_link_beside_compared_runs_is_refused(
    name: str, whole: Path, home: Path, options: list[str], fedcir: Callable[..., Said], tmp_path: Path
) -> None:
    source = tmp_path / "compared"
    shutil.copytree(whole, source / "fedavg-0")
    (source / "settings").mkdir()

    def resume(out: Path) -> list[list[object]]:
        return [["compare", "--resume", "--out", out, "--algorithms", "fedavg", "--workers", 1, "--quiet", *options]]

    assert attacked(linked_copies(source, name, home, tmp_path), home, resume, fedcir) == []


@pytest.mark.parametrize("name", TUNED)
def test_a_link_beside_trials_is_refused(
    name: str, home: Path, options: list[str], fedcir: Callable[..., Said], tmp_path: Path
) -> None:
    pytest.importorskip("optuna")
    source = tmp_path / "tuned"
    source.mkdir()
    (source / "settings.toml").write_text("")
    (source / "trials.jsonl").write_text("")
    without = [option for option in options if option != "--no-report"]

    def resume(out: Path) -> list[list[object]]:
        return [["tune", "--resume", "--out", out, "--algorithm", "fedavg", "--trials", 1, "--quiet", *without]]

    assert attacked(linked_copies(source, name, home, tmp_path), home, resume, fedcir) == []


def test_a_run_folder_may_be_reached_through_a_link(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(whole.parent)
    (tmp_path / "latest").symlink_to(whole)
    assert load_run(tmp_path / "runs" / "run").finished
    assert load_run(tmp_path / "latest").finished


def test_links_that_a_tracker_makes_in_its_own_folder_are_no_fault(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "track" / "wandb" / "run-1").mkdir(parents=True)
    (run / "track" / "wandb" / "latest-run").symlink_to("run-1")
    (run / "track" / "wandb" / "run-1" / "logs").mkdir()
    (run / "track" / "wandb" / "run-1" / "logs" / "debug-core.log").symlink_to(tmp_path / "service.log")
    assert load_run(run).finished
    (run / "track" / "wandb" / "other").symlink_to(tmp_path)
    with pytest.raises(InputError, match="other is a link"):
        load_run(run)


def test_what_is_added_to_a_hard_link_does_not_reach_the_other_file(home: Path, tmp_path: Path) -> None:
    os.link(home / "notes.txt", tmp_path / "rounds.jsonl")
    with pytest.raises(InputError, match=r"rounds\.jsonl is the same file as another"):
        open_append(tmp_path / "rounds.jsonl")
    write_file(tmp_path / "rounds.jsonl", "new")
    assert (home / "notes.txt").read_text() == "../notes.txt is mine"


def test_a_lock_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    with RunFolder(tmp_path).lock():
        assert (tmp_path / ".lock").read_text() == "mine"


def test_a_file_can_be_written_where_the_system_has_no_folder_handles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())
    write_file(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
