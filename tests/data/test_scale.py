"""Very many clients: who holds what is a few flat arrays, and all else is made when it is asked for."""

import gc
import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.config import PartitionConfig, config_from_tables
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.federation import Federation, open_federation
from fedcir.data.manifest import build_manifest, load_manifest, save_manifest
from fedcir.data.partition import ClientPartition, Partition, partition_labels
from fedcir.errors import InputError
from fedcir.rng import numpy_rng
from fedcir.server.accounting import sample_cohort, sample_poisson_cohort

LABELS = {
    "photo": np.arange(10).repeat(40),
    "sketch": np.arange(10).repeat(25)[np.random.default_rng(0).permutation(250)],
    "paint": np.arange(5).repeat(20),
}
GROUPS = {"photo": np.arange(400) // 3}
BEFORE: dict[str, tuple[dict[str, Any], int, str]] = {
    "dirichlet": ({"scheme": "dirichlet"}, 0, "c0218ff3da9985cc"),
    "skewed": ({"scheme": "dirichlet", "clients": 7, "beta": 0.05}, 0, "14003d00345a7f8d"),
    "topped up": ({"scheme": "dirichlet", "clients": 50, "beta": 0.05, "min_samples": 5}, 1, "1e8a19c84ea5b4aa"),
    "many": ({"scheme": "dirichlet", "clients": 200, "beta": 1.0}, 2, "77ba0face4bddd48"),
    "tiny beta": ({"scheme": "dirichlet", "clients": 40, "beta": 1e-300}, 3, "0551d800bb2d76c5"),
    "held out": ({"scheme": "dirichlet", "clients": 9, "hold_out": "sketch"}, 4, "ef298dcfb00515d2"),
    "capped": ({"scheme": "dirichlet", "clients": 9, "max_samples": 30}, 5, "0e639112da3c394f"),
    "groups": ({"scheme": "dirichlet", "clients": 9}, 6, "2486db18baa7cdd4"),
    "iid": ({"scheme": "iid", "clients": 11}, 0, "0d41b65326a21e71"),
    "iid many": ({"scheme": "iid", "clients": 700}, 1, "5f3d248a42ab51e4"),
    "iid capped": ({"scheme": "iid", "clients": 11, "max_samples": 20, "hold_out": "photo"}, 2, "5b2bdbb5a26b457d"),
    "iid groups": ({"scheme": "iid", "clients": 7}, 3, "00acbe1ffb93a7f6"),
    "domain": ({"scheme": "domain"}, 0, "c0218ff3da9985cc"),
    "domain capped": ({"scheme": "domain", "max_samples": 120}, 1, "d440d837910a466c"),
}
"""Settings, seed, and a hash of what the code gave that made a list of shares client by client."""
OWNERS = (
    *((f"sketch/{i}", "b") for i in range(20)),
    *((f"photo/{i}", "a") for i in range(7)),
    *((f"sketch/{i}", "a") for i in range(20, 50)),
    *((f"paint/{i}", "a") for i in range(9)),
    *((f"paint/{i}", "c") for i in range(9, 30)),
)


def digest(shares: Partition) -> str:
    message = hashlib.blake2b(digest_size=8)
    for share in shares:
        rows = [(name, rows.tolist()) for name, rows in share.rows.items()]
        message.update(repr((share.domain, share.name, rows)).encode())
    return message.hexdigest()


@pytest.mark.parametrize("case", BEFORE)
def test_a_partition_has_the_bits_that_it_had_client_by_client(case: str) -> None:
    settings, seed, expected = BEFORE[case]
    shares = partition_labels(PartitionConfig(**settings), LABELS, seed, groups=GROUPS if "groups" in case else {})
    assert digest(shares) == expected
    assert digest(Partition.from_clients(list(shares), list(LABELS))) == expected
    assert [list(share.rows) for share in shares] == [list(shares[n].rows) for n in range(len(shares))]


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, "c247a25af4120ed9"), ({"max_samples": 12}, "46b3d41f07185638"), ({"hold_out": "photo"}, "64ae5ad9fc441b93")],
)
def test_a_file_gives_clients_the_same_rows_in_the_same_order(
    tmp_path: Path, more: dict[str, Any], expected: str
) -> None:
    file = tmp_path / "owners.csv"
    file.write_text("path,client\n" + "".join(f"{name},{owner}\n" for name, owner in OWNERS), encoding="utf-8")
    ids = {name: [f"{name}/{i}" for i in range(len(values))] for name, values in LABELS.items()}
    assert digest(partition_labels(PartitionConfig("csv", file=str(file), **more), LABELS, 0, ids)) == expected


def test_cohorts_are_drawn_as_from_a_list_of_all_clients() -> None:
    for count, active in ((50, 7), (20_000, 10), (20_000, 900)):
        listed = numpy_rng(3, "cohort", 2).choice(list(range(count)), size=active, replace=False)
        assert sample_cohort(range(count), active, seed=3, round=2) == sorted(listed.tolist())
    drawn = numpy_rng(0).random(1000)
    assert sample_poisson_cohort(range(1000), 0.1, numpy_rng(0)) == [n for n, item in enumerate(drawn) if item < 0.1]


@pytest.fixture
def manifest() -> dict[str, Any]:
    split = Split(np.zeros((6, 8, 8, 1), dtype=np.uint8), np.arange(6) % 2, ["a", "b\\", 'c"', "d\n", "é", "f"])
    numbered = Split(split.images, split.labels, 'q"uote/ü/')
    domains = Domains(
        "arrays", ("0", "1"), (Domain("b", split, split.take([1])), Domain("é", numbered, split.take([])))
    )
    clients = [
        ClientPartition("b", {"b": np.array([4, 1])}, "north"),
        ClientPartition("é", {"é": np.array([5, 2, 0])}),
        ClientPartition("é", {}),
    ]
    return build_manifest(domains, clients)


def plain(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "clients": list(manifest["clients"])}


def test_a_manifest_names_samples_and_hashes_its_json(manifest: dict[str, Any]) -> None:
    assert manifest["clients"][0] == {"id": 0, "name": "north", "domain": "b", "train": ["é", "b\\"]}
    assert manifest["clients"][1]["train"] == [f'q"uote/ü/00000{i}' for i in (5, 2, 0)]
    text = json.dumps({key: value for key, value in plain(manifest).items() if key != "hash"}, sort_keys=True)
    assert manifest["hash"] == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def test_a_large_manifest_is_saved_as_arrays_and_reads_as_a_small_one(
    manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for folder in (small, large):
        folder.mkdir()
    save_manifest(small, manifest)
    monkeypatch.setattr("fedcir.data.manifest.MAX_JSON_SAMPLES", 1)
    save_manifest(large, manifest)
    assert "clients" not in json.loads((large / "manifest.json").read_text(encoding="utf-8"))
    assert plain(load_manifest(small)) == plain(load_manifest(large)) == plain(manifest)
    save_manifest(small, load_manifest(large))
    assert plain(load_manifest(small)) == plain(manifest)


def test_damage_to_the_arrays_is_an_error(
    manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcir.data.manifest.MAX_JSON_SAMPLES", 1)
    save_manifest(tmp_path, manifest)
    arrays = tmp_path / "manifest.safetensors"
    content = arrays.read_bytes()
    arrays.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(InputError, match=r"manifest\.safetensors.*checksum"):
        load_manifest(tmp_path)
    arrays.unlink()
    with pytest.raises(InputError, match="restore the file"):
        load_manifest(tmp_path)


def opened(root: Path, clients: int) -> Federation:
    tables = {
        "data": {"name": "arrays", "root": str(root)},
        "partition": {"scheme": "dirichlet", "clients": clients, "beta": 1.0},
        "server": {"active": 10},
        "run": {"device": "cpu"},
    }
    return open_federation(config_from_tables(tables))


def test_a_client_more_takes_next_to_no_memory(tmp_path: Path) -> None:
    """Both open the same 40,000 images; as objects of their own, a client and its names took over 1,000 bytes."""
    for domain in ("ink", "pen"):
        images, labels = np.zeros((20_000, 8, 8), dtype=np.uint8), np.arange(20_000) % 10
        few = {"x_test": images[:20] + 1, "y_test": labels[:20]}
        np.savez(tmp_path / f"{domain}.npz", x_train=images, y_train=labels, **few)
    held, objects = [], []
    for clients in (200, 10_200):
        gc.collect()
        before = len(gc.get_objects())
        tracemalloc.start()
        federation = opened(tmp_path, clients)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        objects.append(len(gc.get_objects()) - before)
        assert len(federation.clients) == len(federation.trainers) == clients
        assert federation.evaluators == {0: "ink", clients // 2: "pen"}
        last = federation.clients[clients - 1]
        assert last.train is not None
        assert len(last.train) == len(federation.manifest["clients"][-1]["train"]) == federation.images(clients - 1)
    assert held[1] - held[0] < 100 * 10_000
    assert objects[1] - objects[0] < 1000
