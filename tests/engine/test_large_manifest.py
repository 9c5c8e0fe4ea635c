"""A large manifest: its clients stay text until they are asked for, and are checked all the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcir.config import Config
from fedcir.data.federation import open_federation
from fedcir.engine import packed
from fedcir.engine.files import sealed
from fedcir.engine.folder import RunFolder
from fedcir.engine.packed import Packed
from fedcir.engine.transports.processes import AHEAD, ProcessTransport
from fedcir.types import InputError

Make = Callable[..., Config]


@pytest.fixture
def folder(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of which the manifest counts as large."""
    config = tiny("fedavg", "partition.scheme=dirichlet", "partition.clients=7")
    there = RunFolder(tmp_path / "run")
    there.create(config, open_federation(config).manifest)
    monkeypatch.setattr(packed, "LARGE", 0)
    return there


def test_a_large_manifest_reads_as_a_small_one(folder: RunFolder) -> None:
    found = folder.manifest()
    assert isinstance(found["clients"], Packed)
    plain = json.loads((folder.path / "manifest.json").read_text(encoding="utf-8"))
    del plain["checksum"]
    assert found == plain
    assert list(found["clients"][6]) == ["id", "domain", "train"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ink/train/000003", "ink/train/000004", "its checksum is"),
        ('"id": 2', '"id": "two"', r"manifest\.clients\[2\]\.id must be"),
        ('"hash"', '"hush"', r"manifest\.hash is missing"),
        ("}", "", "restore the file"),
    ],
)
def test_damage_to_a_large_manifest_is_named(folder: RunFolder, old: str, new: str, said: str) -> None:
    path = folder.path / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=said):
        folder.manifest()


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
    written = json.dumps(sealed(plain) if with_checksum else plain, indent=1, ensure_ascii=False)
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
    order = list(transport._in_order("train", range(60)))
    assert sorted(order) == list(range(60))
    assert all(abs(place - client) < AHEAD for place, client in enumerate(order))
    sizes = [len(federation.clients[client].train or ()) for client in order]
    assert sizes[:AHEAD] == sorted(sizes[:AHEAD], reverse=True)
