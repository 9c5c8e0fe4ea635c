"""What clients keep between rounds: found again by round, pruned no further than a resume may go back."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcir.client.state import ClientStore
from fedcir.errors import InputError
from fedcir.types import Groups

Make = Callable[..., ClientStore]


def bag(value: float) -> Groups:
    return {"reference": {"mean": torch.full((2, 3), value), "count": torch.tensor(int(value))}}


def value(groups: Groups) -> float | None:
    """The round that a bag was made in; None for nothing."""
    return float(groups["reference"]["mean"][0, 0]) if groups else None


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def open_(*generations: int) -> ClientStore:
        return ClientStore(tmp_path / "clients" if request.param == "disk" else None, *generations)

    return open_


def test_load_gives_the_newest_before_the_round(make: Make) -> None:
    store = make(10)
    for round in (2, 5, 7):
        store.save(0, round, bag(round))
    assert [value(store.load(0, round)) for round in range(1, 10)] == [None, None, 2, 2, 2, 5, 5, 7, 7]


def test_any_name_of_a_group_comes_back(make: Make) -> None:
    names = ["a", "a/b", "a/b/c", "a%2Fb", "control-3", "", "/", "Größe 1"]
    kept = {group: {name: torch.tensor(i) for name in ("x", "b/x", "b/c/x")} for i, group in enumerate(names)}
    store = make()
    store.save(0, 1, kept)
    got = store.load(0, 2)
    assert got.keys() == kept.keys()
    assert all(got[g].keys() == kept[g].keys() and int(got[g][n]) == int(t) for g in kept for n, t in kept[g].items())


def test_a_client_that_has_not_trained_has_kept_nothing(make: Make) -> None:
    store = make()
    store.save(0, 1, bag(1))
    assert store.load(1, 5) == {}
    assert store.load(0, 1) == {}


def test_what_was_kept_comes_back_bit_for_bit(make: Make) -> None:
    kept = {
        "reference": {"mean": torch.randn(4, 3), "scale": torch.tensor(0.1)},
        "batchnorm": {"norms.0.running_var": torch.rand(2), "norms.0.num_batches_tracked": torch.tensor(7)},
    }
    store = make()
    store.save(3, 1, kept)
    got = store.load(3, 2)
    assert got.keys() == kept.keys()
    for group, arrays in kept.items():
        assert got[group].keys() == arrays.keys()
        for name, tensor in arrays.items():
            assert torch.equal(got[group][name], tensor)
            assert got[group][name].dtype == tensor.dtype


def test_clients_do_not_see_what_others_kept(make: Make) -> None:
    store = make()
    for client in (0, 1, 10):
        store.save(client, 1, bag(client + 100))
    assert [value(store.load(client, 2)) for client in (0, 1, 10)] == [100, 101, 110]


def test_a_round_that_is_done_again_overwrites_what_was_kept(make: Make) -> None:
    store = make(4)
    store.save(0, 1, bag(1))
    store.save(0, 2, bag(2))
    store.save(0, 2, bag(9))
    assert value(store.load(0, 3)) == 9
    assert value(store.load(0, 2)) == 1


def test_rounds_are_ordered_by_number_not_by_name(make: Make) -> None:
    store = make(10**7)
    for round in (9, 10, 999_999, 1_000_000):
        store.save(0, round, bag(round))
    assert [value(store.load(0, round)) for round in (10, 11, 1_000_000, 1_000_001)] == [9, 10, 999_999, 1_000_000]


def test_pruning_keeps_the_last_rounds_and_the_newest_before_them(make: Make) -> None:
    store = make(3)
    for round in (1, 2, 4, 5, 6, 7, 8):
        store.save(0, round, bag(round))
    # A resume may go back to the state after round 5, so 5 is the oldest that can be asked for.
    assert [value(store.load(0, round)) for round in range(6, 10)] == [5, 6, 7, 8]
    assert store.load(0, 5) == {}


def test_what_a_client_kept_long_ago_stays_until_it_trains_again(make: Make) -> None:
    store = make(2)
    store.save(0, 1, bag(1))
    for round in range(2, 50):
        store.save(1, round, bag(round))
    assert value(store.load(0, 50)) == 1
    store.save(0, 50, bag(50))
    assert value(store.load(0, 50)) == 1  # a resume may still do round 50 again
    assert value(store.load(0, 51)) == 50


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_resume_from_the_last_two_checkpoints_finds_what_it_needs(make: Make, every: int) -> None:
    store, rng = make(2 * every), np.random.default_rng(every)
    trained: dict[int, list[int]] = {client: [] for client in range(3)}
    for round in range(1, 25):
        for client, rounds in trained.items():
            if rng.random() < 0.4:
                store.save(client, round, bag(round))
                rounds.append(round)
        last = (round - 1) // every * every  # the round under way is not saved yet
        for checkpoint in {max(last - every, 0), last}:
            for client, rounds in trained.items():
                want = max((each for each in rounds if each <= checkpoint), default=None)
                assert value(store.load(client, checkpoint + 1)) == want


def test_the_store_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, 3)
    for round in range(1, 30):
        store.save(0, round, bag(round))
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == [
        f"round-{round:06d}.safetensors" for round in (26, 27, 28, 29)
    ]


def test_memory_and_disk_agree_through_any_history(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    memory, disk = ClientStore(None, 4), ClientStore(tmp_path / "clients", 4)
    for round in range(1, 30):
        for client in rng.choice(4, size=2, replace=False).tolist():
            for store in (memory, disk):
                store.save(client, round, bag(round))
        for client in range(4):
            for settings in range(1, round + 2):
                assert value(memory.load(client, settings)) == value(disk.load(client, settings))


def test_what_is_on_disk_is_there_for_the_next_process(tmp_path: Path) -> None:
    ClientStore(tmp_path / "clients").save(2, 3, bag(3))
    assert value(ClientStore(tmp_path / "clients").load(2, 4)) == 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_write_that_was_cut_short_is_not_taken_for_a_round(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.save(0, 1, bag(1))
    (tmp_path / "0" / ".round-000002.safetensors.tmp").write_bytes(b"half")
    assert value(store.load(0, 5)) == 1


def test_a_damaged_file_of_a_client_is_named(tmp_path: Path) -> None:
    ClientStore(tmp_path).save(3, 1, bag(1))
    (tmp_path / "3" / "round-000001.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"cannot read .*3/round-000001\.safetensors: .*; restore the file"):
        ClientStore(tmp_path).load(3, 2)


def test_nothing_to_keep_writes_nothing(make: Make, tmp_path: Path) -> None:
    store = make()
    store.save(0, 1, {})
    assert store.load(0, 2) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_method_that_keeps_nothing_has_no_folder_of_clients(
    tiny: Callable[..., object], train: Callable[..., Path], tmp_path: Path
) -> None:
    out = train(tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    assert not (out / "clients").exists()
