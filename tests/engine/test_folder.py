"""The run folder: what it holds, and that no accident on the way leaves it unreadable."""

import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fedcir
from fedcir.config import Config
from fedcir.engine.files import write
from fedcir.engine.folder import FORMAT, RunFolder
from fedcir.engine.simulate import open_run
from fedcir.types import InputError

Tiny = Callable[..., Config]
Train = Callable[..., Path]

HURRY = 60
"""Seconds that a thread may take before a test gives up on it."""

ROUND_KEYS = [
    "round",
    "losses",
    "accuracy",
    "accuracy_mean",
    "accuracy_weighted",
    "accuracy_worst",
    "bytes_down",
    "bytes_up",
    "flops",
    "seconds",
    "dropped",
    "risk",  # where a round was evaluated
    "checksum",
]


@pytest.fixture(scope="module")
def finished(tiny: Tiny, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seven rounds with a checkpoint in each, for all tests to read."""
    return train(seven(tiny), tmp_path_factory.mktemp("runs") / "finished")


def seven(tiny: Tiny) -> Config:
    return tiny("fedcir", "server.rounds=7", "server.checkpoint_every=1")


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of it as a kill after round 7 would leave it: all rounds, two checkpoints, neither model nor summary."""
    copy = tmp_path / "stopped"
    shutil.copytree(finished, copy)
    (copy / "summary.json").unlink()
    (copy / "model.safetensors").unlink()
    return copy


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


def but_seconds(value: Any) -> Any:
    """The same JSON without what no two runs share."""
    if isinstance(value, dict):
        return {key: but_seconds(each) for key, each in value.items() if key not in ("seconds", "peak_memory")}
    return [but_seconds(each) for each in value] if isinstance(value, list) else value


def same_run(a: Path, b: Path) -> bool:
    """Equal to the byte, or to the value where a file holds times."""
    return (
        (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
        and but_seconds(lines(a)) == but_seconds(lines(b))
        and but_seconds(json.loads((a / "summary.json").read_text()))
        == but_seconds(json.loads((b / "summary.json").read_text()))
        and (a / "manifest.json").read_bytes() == (b / "manifest.json").read_bytes()
    )


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As on a full disk: the system refuses to write more than so many bytes to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_finished_run_holds_the_files_of_the_contract_and_no_others(finished: Path) -> None:
    names = {path.relative_to(finished).as_posix() for path in finished.rglob("*") if path.name != RunFolder.LOCK}
    assert names == {
        "config.toml",
        "manifest.json",
        "rounds.jsonl",
        "summary.json",
        "model.safetensors",
        "checkpoint",
        "checkpoint/round-000006.safetensors",
        "checkpoint/round-000007.safetensors",
    }


def test_config_toml_is_resolved_and_says_which_versions_wrote_it(finished: Path) -> None:
    tables = tomllib.loads((finished / "config.toml").read_text(encoding="utf-8"))
    about = tables.pop("fedcir")
    assert len(about.pop("checksum")) == 8
    assert about == {"format": 1, "version": fedcir.__version__, "torch": torch.__version__}
    assert tables.keys() == {"data", "partition", "model", "local", "server", "algorithm", "run", "attack", "privacy"}
    assert tables["server"]["active"] == 3
    assert tables["algorithm"]["lambda_reg"] == 0.5
    settled = {"seed": 0, "threads": 1, "device": "cpu", "layout": "channels_last"}
    assert tables["run"] == {**settled, "precision": "float32", "compile": False}  # and nothing of workers


def test_a_run_of_before_domains_were_told_apart_still_reads(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    """It has a mean over all domains and does not say which of them nobody trains on."""
    run = train(tiny("fedavg", "partition.hold_out=pen"), tmp_path / "run")
    new = ("unseen", "accuracy_unseen", "checksum")
    old = [{key: value for key, value in line.items() if key not in new} for line in lines(run)]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    records = RunFolder(run).records()
    assert len(records) == 3
    assert (records[-1].unseen, records[-1].accuracy_unseen) == (None, None)
    assert records[-1].risk is not None
    assert records[-1].risk_mean == pytest.approx(sum(records[-1].risk.values()) / 3)


def test_the_config_of_a_run_starts_the_same_run(finished: Path, train: Train, tmp_path: Path) -> None:
    assert same_run(train(RunFolder(finished).config(), tmp_path / "again"), finished)


def test_the_manifest_names_every_sample_of_every_client_and_has_a_hash(finished: Path) -> None:
    manifest = json.loads((finished / "manifest.json").read_text(encoding="utf-8"))
    assert [(client["id"], client["domain"]) for client in manifest["clients"]] == [(0, "ink"), (1, "pen"), (2, "wax")]
    for client in manifest["clients"]:
        assert client["train"] == [f"{client['domain']}/train/{i:06d}" for i in range(24)]
    assert {name: len(ids) for name, ids in manifest["test"].items()} == {"ink": 12, "pen": 12, "wax": 12}
    assert len(manifest["hash"]) == 32


def test_clients_that_share_domains_hold_every_sample_once(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    config = tiny("fedavg", "server.rounds=1", "partition.scheme=dirichlet", "partition.clients=5")
    manifest = RunFolder(train(config, tmp_path / "run")).manifest()
    held = [sample for client in manifest["clients"] for sample in client["train"]]
    assert sorted(held) == [f"{name}/train/{i:06d}" for name in ("ink", "pen", "wax") for i in range(24)]


def test_rounds_jsonl_has_a_line_a_round_from_1_with_exactly_the_keys_of_the_contract(finished: Path) -> None:
    records = lines(finished)
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    for record in records:
        assert list(record) == ROUND_KEYS
        assert record["accuracy"].keys() == {"ink", "pen", "wax"}
        assert all(0 <= value <= 1 for value in record["accuracy"].values())
        assert "total" in record["seconds"]
        assert record["flops"] > 0
        assert record["dropped"] == {}
    assert records[0]["losses"].keys() == {"ce", "total"}
    assert records[1]["losses"].keys() == {"ce", "reg", "align", "total"}


def test_the_summary_has_the_keys_of_the_contract_and_agrees_with_the_rounds(finished: Path) -> None:
    summary, records = json.loads((finished / "summary.json").read_text(encoding="utf-8")), lines(finished)
    assert summary.keys() == {"algorithm", "dataset", "seed", "rounds", "final", "best", "cost", "model", "checksum"}
    assert [summary[key] for key in ("algorithm", "dataset", "seed", "rounds")] == ["fedcir", "arrays", 0, 7]
    accuracies = ("round", "accuracy_mean", "accuracy_weighted", "accuracy_worst", "accuracy")
    assert summary["final"] == {key: records[-1][key] for key in accuracies}
    best = max(records, key=lambda record: record["accuracy_mean"])  # the first of equals
    assert summary["best"] == {**{key: best[key] for key in accuracies}, "picked_on": "test"}
    for name in ("bytes_down", "bytes_up", "flops"):
        assert summary["cost"][name] == sum(record[name] for record in records)
    assert summary["cost"]["seconds"]["total"] == pytest.approx(sum(record["seconds"]["total"] for record in records))


def test_the_model_says_how_to_use_it(finished: Path) -> None:
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) >= {"head.weight", "head.bias"}
        assert all(name.startswith(("encoder.", "head.")) for name in file.keys())  # noqa: SIM118 (not a dict)
    card = json.loads(metadata.pop("fedcir"))
    assert metadata == {}
    assert card["format"] == FORMAT
    assert card["classes"] == ["0", "1", "2"]
    assert (card["image_size"], card["channels"]) == (8, 3)
    assert (card["mean"], card["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert card["model"] == {"name": "cnn", "width": 2, "norm": "batch", "batchnorm": "average", "freeze": False}
    assert card["algorithm"]["name"] == "fedcir"


def test_the_model_tells_no_time_path_worker_count_or_version(finished: Path, data_root: Path) -> None:
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        text = json.dumps(file.metadata())
    for private in (fedcir.__version__, torch.__version__, str(data_root), str(finished.parent), "workers", "threads"):
        assert private not in text


def test_the_model_of_an_own_algorithm_does_not_tell_where_its_file_lay(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    models = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        mine = tmp_path / folder / "mine.py"
        mine.write_text("import fedcir\n\n\nclass Mine(fedcir.FedAvg):\n    pass\n")
        config = tiny(str(mine), "server.rounds=1")
        models.append((train(config, tmp_path / folder / "run") / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_equal_runs_are_equal_files(tiny: Tiny, train: Train, finished: Path, tmp_path: Path) -> None:
    again = train(seven(tiny), tmp_path / "again")
    assert same_run(again, finished)
    assert (again / "config.toml").read_bytes() == (finished / "config.toml").read_bytes()
    for path in (finished / "checkpoint").iterdir():
        with safe_open(path, "pt") as a, safe_open(again / "checkpoint" / path.name, "pt") as b:
            assert all(torch.equal(a.get_tensor(key), b.get_tensor(key)) for key in a.keys())  # noqa: SIM118


@pytest.mark.parametrize("change", ["run.seed=1", "local.lr=0.02", "algorithm.lambda_reg=0.4"])
def test_other_settings_give_another_model(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path, change: str
) -> None:
    other = train(tiny("fedcir", "server.rounds=7", change), tmp_path / "other")
    assert (other / "model.safetensors").read_bytes() != (finished / "model.safetensors").read_bytes()


def test_a_model_does_not_depend_on_how_often_it_was_saved(
    tiny: Tiny, train: Train, finished: Path, tmp_path: Path
) -> None:
    seldom = train(tiny("fedcir", "server.rounds=7", "server.checkpoint_every=4"), tmp_path / "seldom")
    assert same_run(seldom, finished)
    assert sorted(path.name for path in (seldom / "checkpoint").iterdir()) == [
        "round-000004.safetensors",
        "round-000007.safetensors",
    ]


def test_no_file_of_a_run_is_a_pickle(finished: Path) -> None:
    for path in finished.rglob("*"):
        if path.is_dir() or path.name == RunFolder.LOCK:
            continue
        content = path.read_bytes()
        if path.suffix == ".safetensors":
            assert content[8:10] == b'{"'  # after the length of its header
            with safe_open(path, framework="pt") as file:
                assert file.keys()
        elif path.suffix == ".toml":
            assert tomllib.loads(content.decode())
        else:
            assert path.suffix in {".json", ".jsonl"}
            assert all(json.loads(part) for part in (content.splitlines() if path.suffix == ".jsonl" else [content]))


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


@pytest.mark.parametrize("found", ["99", '"1.0"', None])
def test_another_format_is_refused(tiny: Tiny, train: Train, stopped: Path, found: str | None) -> None:
    path = stopped / "config.toml"
    path.write_text(path.read_text().replace("format = 1\n", "" if found is None else f"format = {found}\n"))
    before = snapshot(stopped)
    with pytest.raises(
        InputError, match=r"run-folder format (99|1\.0|none), but this fedcir reads format 1: use the version"
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


def test_the_reader_of_rounds_may_look_at_any_moment_of_a_write(finished: Path, tmp_path: Path) -> None:
    content = (finished / "rounds.jsonl").read_bytes()
    start = content.index(b"\n") + 1
    for end in range(start, content.index(b"\n", start) + 1):
        (tmp_path / "rounds.jsonl").write_bytes(content[:end])
        assert [record.round for record in RunFolder(tmp_path).records()] == [1]


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's content and time of change, but for the lock, which has none."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != RunFolder.LOCK
    }


def test_write_replaces_a_file_whole(tmp_path: Path) -> None:
    write(tmp_path / "file", "old, and longer")
    write(tmp_path / "file", "new: ä")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new: ä"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_write_on_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "file", b"old" * 100)
    with files_up_to(4096), pytest.raises(OSError, match="File too large"):
        write(tmp_path / "file", b"new" * 10_000)
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


def test_a_second_process_in_the_same_folder_is_refused(tiny: Tiny, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with open_run(tiny("fedavg"), out) as (_, rounds):
        next(rounds)
        before = snapshot(out)
        command = [sys.executable, "-m", "fedcir", "run", *options, "--algorithm", "fedavg", "--resume", "-o", str(out)]
        second = subprocess.run(command, check=False, capture_output=True, text=True)
        assert second.returncode == 2
        assert second.stderr == (
            f"fedcir: another process is training in {out}: wait for it, or choose another folder\n"
        )
        assert snapshot(out) == before
        assert [record.round for record in rounds] == [2, 3]


def test_where_nothing_was_written_neither_a_lock_nor_a_new_folder_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError), RunFolder(tmp_path / "new").locked():
        raise InputError("refused")
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    with RunFolder(tmp_path / "mine").locked():
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_where_something_was_written_the_lock_stays(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").locked():
        (tmp_path / "run" / "manifest.json").touch()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"manifest.json", RunFolder.LOCK}


def test_who_waited_for_a_lock_that_was_then_removed_holds_the_one_in_its_place(tmp_path: Path) -> None:
    folder, entered, leave = RunFolder(tmp_path / "run"), threading.Event(), threading.Event()

    def second() -> None:
        with folder.locked():
            entered.set()
            leave.wait(HURRY)

    thread = threading.Thread(target=second)
    with folder.locked():
        thread.start()
        time.sleep(0.2)  # it has come to wait for the lock by then
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
