"""Damaged files of a run: what a resume makes of them, and what it says of those that it cannot read."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from seven import Tiny, Train, lines, same_run, seven, snapshot

from fedcir.errors import InputError
from fedcir.runtime.run_folder import RunFolder


def test_a_line_that_was_cut_short_is_done_again(tiny: Tiny, train: Train, finished: Path, stopped: Path) -> None:
    rounds = stopped / "rounds.jsonl"
    rounds.write_bytes(rounds.read_bytes()[:-40])
    assert [record.round for record in RunFolder(stopped).records()] == [1, 2, 3, 4, 5, 6]
    assert same_run(train(seven(tiny), stopped, resume=True), finished)


def test_a_run_that_called_its_cross_entropy_fl_reads_and_resumes_as_one_of_today(
    tiny: Tiny, train: Train, finished: Path, stopped: Path
) -> None:
    old = [json.dumps({key: value for key, value in line.items() if key != "checksum"}) for line in lines(stopped)]
    (stopped / "rounds.jsonl").write_text("".join(line.replace('"ce"', '"fl"') + "\n" for line in old[:6]))
    assert RunFolder(stopped).records() == RunFolder(finished).records()[:6]
    assert same_run(train(seven(tiny), stopped, resume=True), finished)


def test_a_line_cut_within_a_letter_is_done_again(
    tiny: Tiny, train: Train, write_domain: Callable[..., Path], tmp_path: Path
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    write_domain(root / "señal.npz")
    write_domain(root / "图画.npz", seed=1)
    config = tiny("fedavg", f"data.root='{root}'", "server.checkpoint_every=1")
    run = train(config, tmp_path / "run")
    content = (run / "rounds.jsonl").read_bytes()
    (run / "rounds.jsonl").write_bytes(content[: content.rindex("图".encode()) + 1])
    (run / "summary.json").unlink()
    assert same_run(train(config, run, resume=True), train(config, tmp_path / "reference"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(os.urandom(1000))


def flip(path: Path) -> None:
    """Turn over a bit of the last tensor."""
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])


def flip_header(path: Path) -> None:
    """Give the first tensor another name."""
    in_text(path, "head.bias", "head.bjas")


def in_text(path: Path, old: str, new: str) -> None:
    content = path.read_bytes()
    assert old.encode() in content
    path.write_bytes(content.replace(old.encode(), new.encode(), 1))


def forget(path: Path) -> None:
    save_file({"shared/model/x": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    "spoil",
    [
        truncate,
        empty,
        garble,
        Path.unlink,
        forget,
        flip,
        flip_header,
    ],
)
def test_a_spoilt_checkpoint_falls_back_to_the_one_before(
    tiny: Tiny, train: Train, finished: Path, stopped: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(stopped / "checkpoint" / "round-000007.safetensors")
    state = RunFolder(stopped).load_checkpoint()
    assert state is not None
    assert state.round == 6
    assert same_run(train(seven(tiny), stopped, resume=True), finished)


def test_without_any_readable_checkpoint_a_run_begins_again(
    tiny: Tiny, train: Train, finished: Path, stopped: Path
) -> None:
    for path in (stopped / "checkpoint").iterdir():
        truncate(path)
    assert RunFolder(stopped).load_checkpoint() is None
    assert same_run(train(seven(tiny), stopped, resume=True), finished)


def test_a_checkpoint_whose_round_was_not_recorded_is_not_used(
    tiny: Tiny, train: Train, finished: Path, stopped: Path
) -> None:
    """A kill between the two leaves the checkpoint of round 7 beside the records of six."""
    rounds = stopped / "rounds.jsonl"
    rounds.write_text("".join(line + "\n" for line in rounds.read_text().splitlines()[:6]))
    state = RunFolder(stopped).load_checkpoint()
    assert state is not None
    assert state.round == 6
    assert same_run(train(seven(tiny), stopped, resume=True), finished)


@pytest.mark.parametrize("killed_in", ["model.safetensors", "summary.json"])
def test_a_run_killed_while_it_finished_is_finished_by_a_resume(
    tiny: Tiny, train: Train, finished: Path, stopped: Path, killed_in: str
) -> None:
    (stopped / f".{killed_in}.tmp").write_bytes(b"half")
    assert same_run(train(seven(tiny), stopped, resume=True), finished)
    assert not (stopped / f".{killed_in}.tmp").exists()


def test_half_written_files_of_a_kill_do_not_stay(tiny: Tiny, train: Train, stopped: Path) -> None:
    (stopped / "checkpoint" / ".round-000005.safetensors.tmp").write_bytes(b"half")
    train(seven(tiny), stopped, resume=True)
    assert not list(stopped.rglob("*.tmp"))


def test_a_run_killed_while_it_began_is_begun_again(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    run = train(tiny("fedavg", "server.rounds=1"), tmp_path / "run", until=0)
    (run / "config.toml").unlink()
    (run / ".config.toml.tmp").write_bytes(b"[fed")
    train(tiny("fedavg", "server.rounds=1"), run, resume=True)
    assert RunFolder(run).finished


@pytest.mark.parametrize("result", ["99", '"1.0"', None])
def test_another_format_is_refused(tiny: Tiny, train: Train, stopped: Path, result: str | None) -> None:
    path = stopped / "config.toml"
    path.write_text(path.read_text().replace("format = 1\n", "" if result is None else f"format = {result}\n"))
    before = snapshot(stopped)
    with pytest.raises(
        InputError, match=r"run-folder format (99|'1\.0'|'none'), but this fedcir reads format 1: use the version"
    ):
        train(seven(tiny), stopped, resume=True)
    assert snapshot(stopped) == before


@pytest.mark.parametrize("name", ["manifest.json", "config.toml"])
def test_a_file_that_does_not_read_is_named(tiny: Tiny, train: Train, stopped: Path, name: str) -> None:
    (stopped / name).write_text("{ [")
    with pytest.raises(InputError, match=f"cannot read .*{name}"):
        train(seven(tiny), stopped, resume=True)


def in_line(number: int, old: str, new: str) -> Callable[[Path], None]:
    """Damage to one line of rounds.jsonl."""

    def spoil(path: Path) -> None:
        content = path.read_text().splitlines(keepends=True)
        assert old in content[number - 1]
        content[number - 1] = content[number - 1].replace(old, new, 1)
        path.write_text("".join(content))

    return spoil


def doubled(number: int) -> Callable[[Path], None]:
    """A line of rounds.jsonl twice."""

    def spoil(path: Path) -> None:
        content = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*content[:number], *content[number - 1 :]]))

    return spoil


def holding(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


DAMAGED = [
    # file, damage, what the message names
    ("manifest.json", holding("{}"), r"manifest\.clients is missing; restore the file"),
    ("manifest.json", holding('{"clients": [{"id": 0}], "hash": ""}'), r"manifest\.clients\[0\]\.domain is missing"),
    ("manifest.json", Path.unlink, "No such file or directory; restore"),
    ("summary.json", holding("[]"), r"summary must be an object, got \[\]; delete summary\.json there"),
    ("summary.json", holding('{"final": 3}'), r"summary\.\w+ is missing; delete summary\.json there"),
    ("summary.json", empty, "Expecting value: line 1 column 1"),
    ("model.safetensors", Path.unlink, "No such file.*; resume the run"),
    ("model.safetensors", garble, "model.safetensors: .*; resume the run"),
    ("rounds.jsonl", in_line(3, '"bytes_up": ', '"bytes_up": "many", "x": '), "line 3 of .*'x'.*; delete this line"),
    ("rounds.jsonl", in_line(7, '"flops": ', '"flops": "many", "round": 7, "flopz": '), "line 7 of .*'flopz'"),
    ("rounds.jsonl", in_line(2, '"accuracy_mean": ', '"accuracy_mean": "high"}'), "line 2 of .*Extra data"),
    (
        "rounds.jsonl",
        in_line(4, '"round": 4', '"round": "four"'),
        "line 4 of .*round must be a whole number, got 'four'",
    ),
    ("rounds.jsonl", in_line(4, '"round": 4, ', ""), r"line 4 of .*round\.round is missing"),
    ("rounds.jsonl", doubled(5), "line 6 of .*it holds round 5"),
    ("rounds.jsonl", in_line(5, '"round": 5', '"round": 9'), r"line 5 of .*its checksum is \w{8}, but"),
    ("manifest.json", lambda path: in_text(path, "ink/train/000003", "ink/train/000004"), "its checksum is"),
    ("summary.json", lambda path: in_text(path, '"seed": 0', '"seed": 1'), "its checksum is .*; delete summary"),
    ("config.toml", lambda path: in_text(path, "lr = 0.01", "lr = 0.02"), "its checksum is .*; restore the file"),
    ("model.safetensors", flip, "its checksum is .*; resume the run"),
    ("rounds.jsonl", in_line(5, '{"round"', '"round"'), "line 5 of "),
    ("config.toml", lambda path: path.write_text("fedcir = 3") and None, "fedcir must be an object, got 3"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), DAMAGED)
def test_a_damaged_file_is_named_with_the_part_and_the_fix(
    finished: Path, tmp_path: Path, name: str, spoil: Callable[[Path], None], message: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    spoil(run / name)
    folder = RunFolder(run)
    read = {
        "manifest.json": folder.manifest,
        "summary.json": folder.summary,
        "model.safetensors": folder.weights,
        "rounds.jsonl": folder.records,
        "config.toml": folder.config,
    }[name]
    with pytest.raises(InputError, match=f"cannot read .*{name}: .*") as raised:
        read()
    assert re.search(message, str(raised.value))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["summary.json", "model.safetensors"])
def test_a_summary_or_a_model_that_is_lost_is_written_again_as_the_message_says(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path, name: str
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    empty(run / name)
    (run / "summary.json").unlink()
    assert same_run(train(seven(tiny), run, resume=True), finished)


def test_rounds_whose_lines_are_damaged_are_done_again_as_the_message_says(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    in_line(7, '"round": 7', '"round": "x"')(run / "rounds.jsonl")
    before = snapshot(run)
    with pytest.raises(InputError, match=r"line 7 of .*delete this line and all lines after it"):
        train(seven(tiny), run, resume=True)
    assert snapshot(run) == before
    (run / "rounds.jsonl").write_text("".join((run / "rounds.jsonl").read_text().splitlines(keepends=True)[:6]))
    assert same_run(train(seven(tiny), run, resume=True), finished)
