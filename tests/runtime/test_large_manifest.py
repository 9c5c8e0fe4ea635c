"""Manifests in run folders: damage is reported, and runs resume whichever format they were saved in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.errors import InputError
from fedcir.files import add_checksum
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.workers import LOOKAHEAD, ProcessTransport

Make = Callable[..., Config]


@pytest.fixture
def folder(tiny: Make, tmp_path: Path) -> RunFolder:
    config = tiny("fedavg", "partition.scheme=dirichlet", "partition.clients=7")
    there = RunFolder(tmp_path / "run")
    there.create(config, open_federation(config).manifest)
    return there


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ink/train/000003", "ink/train/000004", "its checksum is"),
        ('"id": 2', '"id": "two"', r"manifest\.clients\[2\]\.id must be"),
        ('"hash"', '"hush"', r"manifest\.hash is missing"),
        ("}", "", "restore the file"),
    ],
)
def test_damage_to_a_manifest_is_named(folder: RunFolder, old: str, new: str, message: str) -> None:
    path = folder.path / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        folder.manifest()


def test_a_run_with_a_manifest_of_arrays_resumes_with_the_same_bits_and_also_after_a_change_of_format(
    tiny: Make, train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["partition.scheme=dirichlet", "partition.clients=7"]
    whole = train(tiny("fedavg", *settings, "server.rounds=2"), tmp_path / "whole")
    monkeypatch.setattr("fedcir.data.manifest.MAX_JSON_SAMPLES", 1)
    run = train(tiny("fedavg", *settings, "server.rounds=1"), tmp_path / "run")
    monkeypatch.undo()
    train(tiny("fedavg", *settings, "server.rounds=2"), run, resume=True)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert RunFolder(run).manifest()["hash"] == RunFolder(whole).manifest()["hash"]


@pytest.mark.parametrize("with_checksum", [True, False])
def test_a_run_whose_manifest_was_written_in_one_piece_goes_on(
    tiny: Make, train: Callable[..., Path], tmp_path: Path, with_checksum: bool
) -> None:
    settings = ["partition.scheme=dirichlet", "partition.clients=7"]
    run = train(tiny("fedavg", *settings, "server.rounds=1"), tmp_path / "run")
    path = run / "manifest.json"
    streamed = path.read_text(encoding="utf-8")
    plain = json.loads(streamed)
    del plain["checksum"]
    written = json.dumps(add_checksum(plain) if with_checksum else plain, indent=1, ensure_ascii=False)
    if with_checksum:
        assert written == streamed
    path.write_text(written, encoding="utf-8")
    train(tiny("fedavg", *settings, "server.rounds=2"), run, resume=True)
    assert len(RunFolder(run).records()) == 2
    assert path.read_text(encoding="utf-8") == streamed


def test_clients_train_close_to_their_order_so_that_few_replies_wait(tiny: Make) -> None:
    federation = open_federation(tiny("fedavg", "partition.scheme=dirichlet", "partition.clients=60"))
    transport = ProcessTransport.__new__(ProcessTransport)  # without networks or processes
    transport.clients, transport._workers = federation.clients, []
    order = list(transport._sort_by_size("train", range(60)))
    assert sorted(order) == list(range(60))
    assert all(abs(index - client) < LOOKAHEAD for index, client in enumerate(order))
    sizes = [len(federation.clients[client].train or ()) for client in order]
    assert sizes[:LOOKAHEAD] == sorted(sizes[:LOOKAHEAD], reverse=True)
