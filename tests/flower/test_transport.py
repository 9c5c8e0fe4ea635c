"""Runs across a grid are bit for bit those in process, and ask each node once in a round."""

import shutil
from pathlib import Path

import pytest
from crossing import NODES, Tiny, Train, across, dropped, header_of, model, rounds, shares
from flwr.app import MessageType
from grid import MemoryGrid, run_of_flower, site  # noqa: F401

import fedcir
from fedcir.errors import InputError
from fedcir.runtime.run_folder import RunFolder
from kinds import mark_others_slow


@pytest.mark.parametrize(("algorithm", "scheme"), [("fedcir", "domain"), ("fedsr", "dirichlet"), ("fedgen", "domain")])
def test_a_run_across_nodes_is_bit_for_bit_the_run_in_process(
    tiny: Tiny, train: Train, tmp_path: Path, algorithm: str, scheme: str
) -> None:
    dealt = {"domain": (), "dirichlet": ("partition.scheme=dirichlet", "partition.clients=5", "server.active=2")}
    config = tiny(algorithm, "server.rounds=2", "run.workers=1", *dealt[scheme])
    one = train(config, tmp_path / "one")
    grid = shares(tmp_path, (9, 8, 7, 6, 5)[: 3 if scheme == "domain" else 5])
    across(grid, config, tmp_path / "two", sites=len(grid.nodes))
    assert model(tmp_path / "two") == model(one)
    assert rounds(tmp_path / "two") == rounds(one)
    assert dropped(tmp_path / "two") == [{}, {}]


@pytest.mark.parametrize("form", mark_others_slow(["median", "trimmed-mean", "krum", "norm-clip"], ["krum"]))
def test_a_robust_form_across_nodes_is_bit_for_bit_that_in_process(
    tiny: Tiny, train: Train, tmp_path: Path, form: str
) -> None:
    config = tiny("fedcir", "server.rounds=2", "run.workers=1", f"server.aggregation={form}")
    one = train(config, tmp_path / "one")
    across(shares(tmp_path, (9, 8, 7)), config, tmp_path / "two")
    assert model(tmp_path / "two") == model(one)


def test_the_calibration_across_nodes_is_that_in_process(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    config = tiny("fedavg", "server.rounds=1", "run.workers=1", "data.val_fraction=0.25")
    one = train(config, tmp_path / "one")
    across(shares(tmp_path, (9, 8, 7)), config, tmp_path / "two", sites=3)
    assert (tmp_path / "two" / "calibration.json").read_bytes() == (one / "calibration.json").read_bytes()
    assert dropped(tmp_path / "two") == [{}]


@pytest.mark.parametrize(
    "name", mark_others_slow(["scaffold", "moon", "feddyn", "fedbn", "fedrep", "ditto", "fednova"], ["moon"])
)
def test_what_a_client_keeps_across_nodes_is_what_it_keeps_in_process(
    tiny: Tiny, train: Train, tmp_path: Path, name: str
) -> None:
    method = str(tmp_path / f"{name}.py")  # a file at each site, as a method of one's own is
    shutil.copyfile(Path(fedcir.__file__).parent / "algorithms" / f"{name}.py", method)
    config = tiny(method, "server.rounds=3", "run.workers=1")
    one = train(config, tmp_path / "one")
    states = [str(tmp_path / "state" / str(number)) for number in range(3)]
    nodes = {
        node: site(partition_id=i, state=states[i], device="cpu", algorithm=method) for i, node in enumerate(NODES)
    }
    across(MemoryGrid(nodes), config, tmp_path / "two")
    assert model(tmp_path / "two") == model(one)
    assert rounds(tmp_path / "two") == rounds(one)


def test_what_a_method_keeps_at_a_site_lies_there_under_the_key_of_the_run(tiny: Tiny, tmp_path: Path) -> None:
    across(shares(tmp_path), tiny("fedsr", "server.rounds=1"), tmp_path / "run")
    key = RunFolder(tmp_path / "run").manifest()["key"]
    kept = sorted(
        path.relative_to(tmp_path / "state").as_posix() for path in (tmp_path / "state").rglob("*.safetensors")
    )
    assert kept == [f"{number}/{key}/{number}/round-000001.safetensors" for number in range(3)]


@pytest.mark.parametrize("algorithm", ["fedgen", "fedproto"])
def test_a_round_is_one_message_for_each_node_and_after_the_last_one_is_only_to_test(
    tiny: Tiny, tmp_path: Path, algorithm: str
) -> None:
    grid = shares(tmp_path)
    across(grid, tiny(algorithm, "server.rounds=2"), tmp_path / "run")
    assert grid.asked(MessageType.QUERY) == sorted(NODES)
    assert [grid.asked(MessageType.TRAIN).count(node) for node in NODES] == [2, 2, 2]
    assert [grid.asked(MessageType.EVALUATE).count(node) for node in NODES] == [1, 1, 1]


def test_under_privacy_nobody_trains_before_the_round_is_counted(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    across(grid, tiny("fedavg", "server.rounds=2", "privacy.clip=1", "model.norm=group"), tmp_path / "run")
    assert [grid.asked(kind) for kind in (MessageType.TRAIN, MessageType.EVALUATE)] == [sorted(NODES) * 2] * 2
    assert not any(header_of(message).tests for message in grid.sent)


def test_clients_that_only_test_and_those_that_only_train_are_asked_for_that(
    tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    some = ("partition.scheme=dirichlet", "partition.clients=5", "server.active=2", "partition.hold_out=wax")
    config = tiny("fedavg", "server.rounds=4", "run.workers=1", *some)
    one = train(config, tmp_path / "one")
    clients = len(RunFolder(one).manifest()["clients"])
    grid = shares(tmp_path, tuple(range(1, clients + 1)))
    across(grid, config, tmp_path / "two", sites=clients)
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)
    settings = [(m.metadata.message_type, bool(header_of(m).tests)) for m in grid.sent[clients:]]
    assert set(settings) == {("train", False), ("train", True), ("evaluate", False)}


def test_a_round_that_is_not_evaluated_sends_nothing_to_test(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    across(grid, tiny("fedcir", "server.eval_every=2"), tmp_path / "run")
    orders = [header_of(message) for message in grid.sent[3:]]
    assert [(order.round, order.tests) for order in orders[::3]] == [(1, ()), (2, ()), (3, (0, 1, 2)), (3, ())]
    assert len(orders) == 4 * 3


def test_who_is_sampled_does_not_depend_on_the_numbers_of_nodes(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    config = tiny("fedavg", "server.active=1", "server.rounds=4", "run.workers=1")
    chosen = []
    for name, nodes in {"one": (10, 20, 30), "two": (30, 10, 20), "three": (7, 2**60, 1)}.items():
        grid = shares(tmp_path / name, nodes)
        across(grid, config, tmp_path / name / "run")
        chosen.append([nodes.index(node) for node in grid.asked(MessageType.TRAIN)])
        assert model(tmp_path / name / "run") == model(tmp_path / "one" / "run")
    assert chosen[0] == chosen[1] == chosen[2]
    assert len(chosen[0]) == 4
    assert len(set(chosen[0])) > 1
    assert model(train(config, tmp_path / "process")) == model(tmp_path / "one" / "run")


def test_statistics_of_ones_own_stay_at_the_sites(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    config = tiny("fedavg", "model.batchnorm=local", "server.rounds=2", "run.workers=1")
    one = train(config, tmp_path / "one")
    grid = shares(tmp_path)
    across(grid, config, tmp_path / "two")
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)
    assert not any(
        "running" in name for message in grid.sent for r in message.content.array_records.values() for name in r
    )


def test_the_best_rounds_model_across_nodes_is_that_in_process(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    best = ("server.keep=best", "data.val_fraction=0.25", "local.lr=0.3", "server.rounds=4")
    config = tiny("fedavg", *best)
    across(shares(tmp_path), config, tmp_path / "flower")
    here = train(config, tmp_path / "here")
    assert model(tmp_path / "flower") == model(here)
    assert (tmp_path / "flower" / "calibration.json").read_bytes() == (here / "calibration.json").read_bytes()


def test_the_best_round_is_not_kept_where_sites_have_a_part_of_the_model(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedproto", "server.keep=best", "data.val_fraction=0.25")
    with pytest.raises(InputError, match=r"cannot bring back what sites keep of fedproto's model"):
        across(shares(tmp_path), config, tmp_path / "flower")
