"""Runs across a grid, with the real ClientApp at its nodes: equal to those in process, whatever single nodes do."""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from grid import MemoryGrid, Node, context_of, passed, pem, run_of_flower, site  # noqa: F401
from PIL import Image

import fedcir
from fedcir.config import Config, config_from, config_tables, dump_toml, merged, parse_assignment
from fedcir.engine.folder import RunFolder
from fedcir.engine.session import Session
from fedcir.flower import server_app
from fedcir.flower.keys import fingerprint
from fedcir.flower.server_app import Settings, open_deployment
from fedcir.flower.wire import Order
from fedcir.types import InputError, RunError

Tiny = Callable[..., Config]
Train = Callable[..., Path]
Change = Callable[[RecordDict], None]

NODES = (5000, 17, 903)
"""Of the clients 0, 1 and 2."""
BIAS = "model/head.bias"


def shares(folder: Path, nodes: tuple[int, ...] = NODES) -> MemoryGrid:
    """A node for each share of the dataset, which keeps what is its own in a folder of its own."""
    return MemoryGrid(
        {
            node: site(partition_id=number, state=str(folder / "state" / str(number)), device="cpu")
            for number, node in enumerate(nodes)
        }
    )


def across(
    grid: MemoryGrid,
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    timeout: float = 60.0,
    sites: int = 3,
    until: int | None = None,
    new_keys: tuple[str, ...] = (),
) -> Session:
    """A run across a grid, to its end or until so many rounds are done in all."""
    with open_deployment(grid, Settings(config, out, resume, sites, 0.0, timeout, True, new_keys)) as (session, rounds):
        while session.state.round != until and next(rounds, None) is not None:
            pass
    return session


def model(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def rounds(run: Path) -> list[dict[str, Any]]:
    """The records without their times."""
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def dropped(run: Path) -> list[dict[str, str]]:
    return [record["dropped"] for record in rounds(run)]


def instead(node: Node, kind: str, reply: Node) -> Node:
    """The same node, but for messages of a kind."""
    return lambda message: (reply if message.metadata.message_type == kind else node)(message)


def altered(node: Node, kind: str, change: Change) -> Node:
    """The same node, whose replies of a kind are changed on their way."""

    def answer(message: Message) -> Message:
        reply = node(message)
        assert reply is not None
        content = reply.content
        change(content)
        return Message(content, reply_to=message)

    return instead(node, kind, answer)


@pytest.mark.parametrize("algorithm", ["fedcir", "fedsr", "fedgen"])
@pytest.mark.parametrize("scheme", ["domain", "dirichlet"])
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


@pytest.mark.parametrize("form", ["median", "trimmed-mean", "krum", "norm-clip"])
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


@pytest.mark.parametrize("name", ["scaffold", "moon", "feddyn", "fedbn"])
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


def poison(content: RecordDict) -> None:
    content.array_records["arrays"][BIAS] = Array(np.array([0, np.nan, 0], np.float32))


def rename(content: RecordDict) -> None:
    arrays = content.array_records["arrays"]
    arrays["model/head.biases"] = arrays.pop(BIAS)


def scramble(content: RecordDict) -> None:
    content.array_records["arrays"][BIAS] = Array("float32", (3,), "numpy.ndarray", b"\x80\x05garbage")


def leave_nothing(content: RecordDict) -> None:
    for name in {*content} - {"tests"}:  # it was asked for too, and counts
        del content[name]
    content["other"] = ConfigRecord({"x": 1})


def boast(content: RecordDict) -> None:
    content.metric_records["metrics"]["num-examples"] = 0


FAULTS: dict[Change, str] = {
    poison: f"{BIAS} is not finite; a lower local.lr may help",
    rename: f"{BIAS} is missing",
    scramble: f"{BIAS} is not an array",
    leave_nothing: "model/encoder.",
    boast: "num_examples must be at least 1, got 0",
}


def told(**values: float) -> Change:
    """Metrics that are other than they should be."""

    def change(content: RecordDict) -> None:
        content.metric_records["metrics"].update(values)

    return change


@pytest.mark.parametrize(("change", "reason"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_node_whose_replies_cannot_be_used_is_dropped_and_named_and_the_run_goes_on(
    tiny: Tiny, tmp_path: Path, change: Change, reason: str
) -> None:
    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], MessageType.TRAIN, change)
    across(grid, tiny("fedcir", "server.rounds=2"), tmp_path / "run")
    for record in rounds(tmp_path / "run"):
        assert list(record["dropped"]) == ["1"]
        assert record["dropped"]["1"].startswith(reason)
        assert len(record["accuracy"]) == 3
    assert RunFolder(tmp_path / "run").finished


def negate(content: RecordDict) -> None:
    arrays = content.array_records["arrays"]
    name = next(name for name in arrays if name.endswith("running_var"))
    arrays[name] = Array(-1 - arrays[name].numpy())


LIES: dict[str, tuple[str, Change, str]] = {
    "images to train on": ("train", told(**{"num-examples": 10**18}), f"num_examples is {10**18}, expected 24"),
    "a variance": ("train", negate, "model/encoder"),
    "half an image": ("evaluate", told(correct=0.5, count=0.5), "evaluation: its counts are invalid"),
    "images to test on": ("evaluate", told(correct=1e308, count=1e308), "evaluation: count is 1e+308, expected 12"),
}


@pytest.mark.parametrize(("kind", "lie", "reason"), LIES.values(), ids=LIES)
def test_a_site_that_lies_about_its_numbers_is_dropped_and_named_and_changes_nothing(
    tiny: Tiny, tmp_path: Path, kind: str, lie: Change, reason: str
) -> None:
    config = tiny("fedavg", "server.rounds=1", "server.weighting=samples")
    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], kind, lie)
    across(grid, config, tmp_path / "run")
    (record,) = rounds(tmp_path / "run")
    assert list(record["dropped"]) == ["1"]
    assert record["dropped"]["1"].startswith(reason)
    assert all(value < 100 for value in record["losses"].values())
    assert all(value <= 1 for value in record["accuracy"].values())
    json.dumps(record, allow_nan=False)


def forged(node: Node, **changes: Any) -> Node:
    """The same node, whose replies in training say something else of themselves."""

    def answer(message: Message) -> Message | None:
        reply = node(message)
        assert reply is not None
        reply.metadata.__dict__.update({f"_{name}": value for name, value in changes.items()})
        return reply

    return instead(node, MessageType.TRAIN, answer)


@pytest.mark.parametrize("changes", [{"src_node_id": 903}, {"group_id": "1"}], ids=["another's", "another round's"])
def test_a_reply_of_another_node_or_to_another_message_is_refused(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any]
) -> None:
    grid = shares(tmp_path)
    grid.nodes[17] = forged(grid.nodes[17], **changes)
    across(grid, tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    assert dropped(tmp_path / "run") == [{"1": "another node has answered in its place"}]


def test_a_resumed_run_knows_its_sites_by_their_keys_unless_it_is_told_of_new_ones(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.keys = {node: pem(node) for node in NODES}
    across(grid, tiny("fedavg"), tmp_path / "run", until=1)
    bound = [client["node_key"] for client in RunFolder(tmp_path / "run").manifest()["clients"]]
    assert bound == [fingerprint(pem(node)) for node in NODES]
    grid.keys[17] = pem(99)
    across(grid, tiny("fedavg"), tmp_path / "run", resume=True, sites=2, until=2)
    assert list(dropped(tmp_path / "run")[1]) == ["1"]
    assert "it claims the name '1' with the key SHA256:" in dropped(tmp_path / "run")[1]["1"]
    across(grid, tiny("fedavg"), tmp_path / "run", resume=True, new_keys=("1",))
    assert dropped(tmp_path / "run")[2] == {}
    clients = RunFolder(tmp_path / "run").manifest()["clients"]
    assert clients[1]["node_key"] == fingerprint(pem(99))


def test_a_run_leaves_a_report_and_one_that_cannot_be_written_is_a_note(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    settings, page = tmp_path / "run.toml", tmp_path / "run" / "report.html"
    settings.write_text(dump_toml(config_tables(tiny("fedavg", "server.rounds=1"))), encoding="utf-8")
    context = context_of({})
    context.run_config = {"config": str(settings), "out": str(tmp_path / "run"), "sites": 3}
    log.set_level(logging.INFO)
    server_app.main(shares(tmp_path), context)
    assert "Distances between domains" in page.read_text(encoding="utf-8")
    assert log.messages[-1] == f"saved in {tmp_path / 'run'}, with a report.html to open"
    page.unlink()
    page.mkdir()
    context.run_config["resume"] = True
    server_app.main(shares(tmp_path), context)
    assert log.messages[-2].startswith("note: cannot write report.html: ")
    assert log.messages[-1] == f"saved in {tmp_path / 'run'}"


def test_a_node_that_does_not_answer_in_time_is_dropped_and_named(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.nodes[903] = instead(grid.nodes[903], MessageType.TRAIN, lambda message: None)
    across(grid, tiny("fedavg", "server.rounds=1"), tmp_path / "run", timeout=1)
    assert dropped(tmp_path / "run") == [{"2": "no reply in time"}]


def test_a_node_that_went_away_is_dropped_and_takes_part_again_once_it_is_back(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    with open_deployment(grid, Settings(tiny("fedavg"), tmp_path / "run", False, 3, 0.0, 60.0)) as (_, going):
        next(going)
        away = grid.nodes.pop(17)
        next(going)
        grid.nodes[2**62] = away
        next(going)
        assert next(going, None) is None
    assert dropped(tmp_path / "run") == [{}, {"1": "evaluation: its node is not connected"}, {}]


def test_a_round_without_one_node_is_the_round_of_the_others(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedavg", "server.rounds=1")
    grid = shares(tmp_path)
    grid.nodes[903] = altered(grid.nodes[903], MessageType.TRAIN, poison)
    session = across(grid, config, tmp_path / "three")
    two = across(shares(tmp_path, NODES[:2]), config, tmp_path / "two", sites=2)
    for name, tensor in two.state.shared["model"].items():
        assert session.state.shared["model"][name].equal(tensor), name


@pytest.mark.parametrize("algorithm", ["fedcir", "fedsr"])
def test_below_min_replies_the_run_stops_and_a_resume_ends_as_if_it_had_not(
    tiny: Tiny, tmp_path: Path, algorithm: str
) -> None:
    config = tiny(algorithm, "server.min_replies=3")
    across(shares(tmp_path / "a"), config, tmp_path / "whole")
    out, grid = tmp_path / "run", shares(tmp_path / "b")
    healthy = grid.nodes[17]

    def from_round_2(message: Message) -> Message | None:
        first = Order.from_json(str(message.content.config_records["config"]["fedcir"])).round == 1
        return (healthy if first else altered(healthy, MessageType.TRAIN, rename))(message)

    grid.nodes[17] = instead(healthy, MessageType.TRAIN, from_round_2)
    with pytest.raises(
        RunError, match=f"round 2: 2 of 3 replies are usable, 3 are needed .client 1: {BIAS} is missing"
    ):
        across(grid, config, out)
    saved = RunFolder(out).load_checkpoint()
    assert saved is not None
    assert (saved.round, len(rounds(out)), RunFolder(out).finished) == (1, 1, False)

    again = MemoryGrid(dict(zip((1, 2, 3), (grid.nodes[903], healthy, grid.nodes[5000]), strict=True)))
    across(again, config, out, resume=True)
    assert model(out) == model(tmp_path / "whole")
    assert rounds(out) == rounds(tmp_path / "whole")


def test_a_server_that_was_killed_while_sites_trained_ahead_goes_back_two_checkpoints_to_the_same_bits(
    tiny: Tiny, tmp_path: Path
) -> None:
    config = tiny("fedsr", "server.rounds=4", "server.checkpoint_every=1")
    across(shares(tmp_path / "a"), config, tmp_path / "whole")
    out, grid = tmp_path / "run", shares(tmp_path / "b")
    there = grid.nodes[17]

    def kill(message: Message) -> Message | None:
        reply = there(message)
        if _order(message).round == 4:  # all have tested round 3, and some have trained
            raise KeyboardInterrupt
        return reply

    grid.nodes[17] = instead(there, MessageType.TRAIN, kill)
    with pytest.raises(KeyboardInterrupt):
        across(grid, config, out)
    assert RunFolder(out).saved() == [1, 2]
    (out / "checkpoint" / "round-000002.safetensors").write_bytes(b"damaged")
    grid.nodes[17] = there
    across(grid, config, out, resume=True)
    assert rounds(out) == rounds(tmp_path / "whole")
    assert model(out) == model(tmp_path / "whole")


def test_a_run_that_was_stopped_and_resumed_keeps_its_manifest(tiny: Tiny, tmp_path: Path) -> None:
    across(shares(tmp_path), tiny("fedavg"), tmp_path / "run", until=1)
    before = RunFolder(tmp_path / "run").manifest()
    across(shares(tmp_path, (1, 2, 3)), tiny("fedavg"), tmp_path / "run", resume=True, sites=2)
    assert RunFolder(tmp_path / "run").manifest() == before
    assert RunFolder(tmp_path / "run").finished


def test_a_run_that_was_begun_in_process_does_not_go_on_across_sites(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    train(tiny("fedavg"), tmp_path / "run", until=1)
    with pytest.raises(InputError, match="was started on one machine, not across sites: choose another folder"):
        across(shares(tmp_path), tiny("fedavg"), tmp_path / "run", resume=True)


def test_a_folder_that_holds_a_run_is_refused_before_any_site_is_waited_for(tiny: Tiny, tmp_path: Path) -> None:
    across(shares(tmp_path), tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    with pytest.raises(InputError, match="already holds a run"):
        across(MemoryGrid({}), tiny("fedavg", "server.rounds=1"), tmp_path / "run")


def test_a_run_that_is_refused_leaves_nothing_where_it_would_have_been(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="0 of 3 sites are connected"):
        across(MemoryGrid({}), tiny("fedavg"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def metrics(**values: float) -> Change:
    def change(content: RecordDict) -> None:
        content["metrics"] = MetricRecord({"num-examples": 12, **values})

    return change


COUNTS = {
    "more correct than counted": metrics(correct=13, count=12),
    "no counts": metrics(loss=0.5),
    "nothing counted": metrics(correct=0, count=0),
    "fewer than none": metrics(correct=-1, count=12),
    "not a number": metrics(correct=float("nan"), count=12),
}


@pytest.mark.parametrize("change", COUNTS.values(), ids=COUNTS)
def test_an_evaluation_whose_counts_make_no_sense_is_dropped(tiny: Tiny, tmp_path: Path, change: Change) -> None:
    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], MessageType.EVALUATE, change)
    across(grid, tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    (record,) = rounds(tmp_path / "run")
    assert record["dropped"] == {"1": "evaluation: its counts are invalid"}
    assert record["accuracy"].keys() == {"ink", "wax"}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedcir", "fedsr", "fedgen", "fedproc", "fedproto", "fpl"])
def test_a_round_is_one_message_for_each_node_and_after_the_last_one_is_only_to_test(
    tiny: Tiny, tmp_path: Path, algorithm: str
) -> None:
    grid = shares(tmp_path)
    across(grid, tiny(algorithm, "server.rounds=2"), tmp_path / "run")
    assert grid.asked(MessageType.QUERY) == sorted(NODES)
    assert [grid.asked(MessageType.TRAIN).count(node) for node in NODES] == [2, 2, 2]
    assert [grid.asked(MessageType.EVALUATE).count(node) for node in NODES] == [1, 1, 1]


def test_a_node_that_does_not_answer_when_asked_to_test_and_to_train_is_dropped_from_both(
    tiny: Tiny, tmp_path: Path
) -> None:
    grid = shares(tmp_path)
    there = grid.nodes[903]

    def node(message: Message) -> Message | None:
        return None if _order(message).tests else there(message)

    grid.nodes[903] = node
    across(grid, tiny("fedavg", "server.rounds=2"), tmp_path / "run", timeout=1)
    assert dropped(tmp_path / "run") == [{"2": "evaluation: no reply in time"}, {"2": "no reply in time"}]


@pytest.mark.parametrize(
    ("part", "told"),
    [("evaluate", [{"1": "evaluation: full"}, {}, {}]), ("train", [{}, {"1": "full"}, {"1": "full"}])],
)
def test_what_goes_wrong_with_one_of_two_things_that_were_asked_for_does_not_touch_the_other(
    tiny: Tiny, tmp_path: Path, part: str, told: list[dict[str, str]]
) -> None:
    def fail(content: RecordDict) -> None:
        if "tests" in content:
            content["faults"] = ConfigRecord({part: "full"})
            if part == "evaluate":
                told[1] = {"1": "evaluation: full"}

    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], MessageType.TRAIN, fail)
    across(grid, tiny("fedavg", "server.rounds=3"), tmp_path / "run")
    assert dropped(tmp_path / "run") == told


def test_under_privacy_nobody_trains_before_the_round_is_counted(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    across(grid, tiny("fedavg", "server.rounds=2", "privacy.clip=1", "model.norm=group"), tmp_path / "run")
    assert [grid.asked(kind) for kind in (MessageType.TRAIN, MessageType.EVALUATE)] == [sorted(NODES) * 2] * 2
    assert not any(_order(message).tests for message in grid.sent)


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
    asked = [(m.metadata.message_type, bool(_order(m).tests)) for m in grid.sent[clients:]]
    assert set(asked) == {("train", False), ("train", True), ("evaluate", False)}


def _order(message: Message) -> Order:
    return Order.from_json(str(message.content.config_records["config"]["fedcir"]))


def test_a_round_that_is_not_evaluated_sends_nothing_to_test(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    across(grid, tiny("fedcir", "server.eval_every=2"), tmp_path / "run")
    orders = [_order(message) for message in grid.sent[3:]]
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


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites' images, of which each lacks one class of four but the last."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for domain, lacks in (("north", "cat"), ("east", "dog"), ("south", "")):
        for number, label in enumerate(("cat", "dog", "fox", "owl")):
            for image in range(0 if label == lacks else 10):
                path = root / domain / label / f"{image}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(60 * number, 60 * number + 40, (16, 16, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(path)
    return root


def own(root: Path, state: Path) -> MemoryGrid:
    """A node for each folder, with nothing but that."""
    return MemoryGrid(
        {
            number: site(domain=path.name, data_root=str(path), state=str(state / path.name), device="cpu")
            for number, path in enumerate(sorted(root.iterdir(), reverse=True), 1)
        }
    )


def of_folders(config: Config, *assignments: str, root: Path | None = None) -> Config:
    tables: dict[str, Any] = {**config_tables(config), "data": {"name": "folders", "image_size": 16}}
    for assignment in assignments:
        tables = merged(tables, parse_assignment(assignment))
    return config_from(merged(tables, {"data": {"root": str(root)}}) if root else tables)


@pytest.mark.parametrize(
    "settings", [("partition.max_samples=9",), ("partition.hold_out=north",), ("data.classes=cat,fox,owl",)], ids=str
)
def test_sites_with_folders_of_their_own_train_as_domains_of_one_folder_would(
    tiny: Tiny, train: Train, pictures: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    config = tiny("fedcir", "server.rounds=2", "run.workers=1")
    one = train(of_folders(config, *settings, root=pictures), tmp_path / "one")
    across(own(pictures, tmp_path), of_folders(config, *settings), tmp_path / "two")
    assert dropped(tmp_path / "two") == [{}, {}]
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


def listed(root: Path, sites: Sequence[str]) -> None:
    """A table of the images of these sites, in the folder that holds them."""
    lines = ["path;label;site;group"]
    for name in sites:
        for path in (path for path in root.rglob("*.png") if name in path.parts):
            patient = int(path.stem) // 2
            lines.append(f"{path.relative_to(root)};{path.parent.name};{name};{name}-{path.parent.name}-{patient}")
    (root / "labels.csv").write_text("\n".join(lines), encoding="utf-8")


def test_sites_with_tables_of_their_own_train_as_those_of_one_table_would(
    tiny: Tiny, train: Train, pictures: Path, tmp_path: Path
) -> None:
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    for root in (whole, apart):
        shutil.copytree(pictures, root)
    sites = [path.name for path in apart.iterdir()]
    listed(whole, sites)
    for name in sites:
        listed(apart / name, [name])
    config = of_folders(tiny("fedavg", "server.rounds=1", "run.workers=1"))
    together = replace(config, data=replace(config.data, name="table", root=str(whole)))
    one = train(together, tmp_path / "one")
    across(own(apart, tmp_path), config, tmp_path / "two")
    assert rounds(tmp_path / "two") == rounds(one)
    assert model(tmp_path / "two") == model(one)


def test_a_site_with_a_folder_of_its_own_comes_back_under_another_number(
    tiny: Tiny, pictures: Path, tmp_path: Path
) -> None:
    grid = own(pictures, tmp_path)
    settings = Settings(of_folders(tiny("fedavg", "server.rounds=3")), tmp_path / "run", False, 3, 0.0, 60.0)
    with open_deployment(grid, settings) as (session, going):
        next(going)
        grid.nodes[99] = grid.nodes.pop(2)
        next(going)
        next(going)
    assert [record.dropped for record in session.records] == [{}, {}, {}]
    assert 99 in grid.asked(MessageType.TRAIN)


def ask(node: Node, config: Config) -> Message:
    """What a node answers when it is asked who it is, as the server sees it."""
    content = RecordDict({"config": ConfigRecord({"fedcir": Order(config, {}).to_json()})})
    reply = node(Message(content, 1, MessageType.QUERY))
    assert reply is not None
    return passed(reply)


def broken(folder: Path) -> None:
    """An image that cannot be read, among others."""
    for label in ("cat", "dog"):
        for number in range(5):
            (folder / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(folder / label / f"{number}.png")
    (folder / "dog" / "patient-4711.png").write_bytes(b"not an image")


def without_images(folder: Path) -> None:
    folder.mkdir()


def not_there(folder: Path) -> None: ...


def a_file(folder: Path) -> None:
    folder.write_text("text")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged at sites; Flower's logger tells nobody above it."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    return caplog


FAULTS = {
    broken: "1 of its 11 images cannot be read",
    without_images: "its data-root holds no <class>/<image>",
    not_there: "its data-root is not a folder",
    a_file: "its data-root is not a folder",
}


@pytest.mark.parametrize(("make", "told"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_server_hears_what_is_wrong_with_a_sites_folder_and_of_no_path(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture, make: Callable[[Path], None], told: str
) -> None:
    folder = tmp_path / "ward-9"
    make(folder)
    reply = ask(site(domain="clinic", data_root=str(folder)), of_folders(tiny("fedavg")))
    assert reply.error.reason == f"site 'clinic': {told}; the site's log tells more"
    for secret in ("ward-9", "patient-4711", str(tmp_path)):
        assert secret not in repr(reply)
    assert str(folder) in log.text
    assert "Traceback" not in log.text


NODE_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "names a domain but no data-root": ({"domain": "clinic"}, "site 'clinic': its node-config names no data-root"),
    "must hold data-root and domain": ({}, "its node-config names neither a domain nor a partition-id"),
    "partition-id is 3": ({"partition_id": 3}, "site 3: partition-id is 3, but must be from 0 to 2"),
    "whole number, got 'two'": ({"partition_id": "two"}, "site 'two': its partition-id is not a whole number"),
}


@pytest.mark.parametrize(("words", "case"), NODE_CONFIGS.items())
def test_a_node_config_that_does_not_say_which_data_are_meant_is_refused_there_and_the_server_hears_why(
    tiny: Tiny, log: pytest.LogCaptureFixture, words: str, case: tuple[dict[str, Any], str]
) -> None:
    node, told = case
    reply = ask(site(**node), tiny("fedavg"))
    assert reply.error.reason == f"{told}; the site's log tells more"
    assert words in log.text


def test_an_error_in_a_round_that_nobody_thought_of_is_told_by_its_kind_only(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    state = tmp_path / "state" / "1"

    def lose(content: RecordDict) -> None:
        shutil.rmtree(state)
        state.write_text("a file where the site's folder should be")

    grid.nodes[17] = altered(grid.nodes[17], MessageType.QUERY, lose)
    across(grid, tiny("fedsr", "server.rounds=1"), tmp_path / "run")
    assert dropped(tmp_path / "run") == [{"1": "NotADirectoryError at the site; the site's log tells more"}]


def test_a_server_cannot_have_a_site_run_a_file_that_the_site_has_not_named(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    touched = tmp_path / "touched"
    method = tmp_path / "method.py"
    method.write_text(
        "from pathlib import Path\n"
        "from dataclasses import dataclass\n"
        "from fedcir.algorithms.algorithm import Algorithm\n\n\n"
        f"Path({str(touched)!r}).touch()\n\n\n"
        "@dataclass(frozen=True)\nclass Method(Algorithm):\n    pass\n"
    )
    grid = shares(tmp_path)
    served = grid.nodes[17]

    def answer(message: Message) -> Message | None:
        touched.unlink(missing_ok=True)  # the server has run it
        reply = served(message)
        assert not touched.exists()
        return reply

    grid.nodes = {17: answer}
    with pytest.raises(RunError, match="node 17: site 1: its node-config names no copy of the run's algorithm file"):
        across(grid, tiny(str(method), "server.rounds=1"), tmp_path / "run", sites=1)
    assert "name this site's copy of it in --node-config" in log.text


def test_a_site_that_could_not_say_who_it_is_is_named_in_the_notes(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.nodes[4711] = site(partition_id=99)
    session = across(grid, tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    assert any("4711" in note for note in session.notes)


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [("fedavg", ("model.batchnorm=local",), "model.batchnorm=local"), ("fedbn", (), "fedbn")],
)
def test_batchnorm_of_ones_own_needs_training_data_at_every_site_and_no_weights_to_start_from(
    tiny: Tiny, tmp_path: Path, name: str, settings: tuple[str, ...], what: str
) -> None:
    with pytest.raises(InputError, match=f"^{what} needs training data at every client, but 'ink' has none"):
        across(shares(tmp_path), tiny(name, *settings, "partition.hold_out=ink"), tmp_path / "run")
    with pytest.raises(InputError, match=f"model.weights cannot be used with {what} across sites"):
        across(shares(tmp_path), tiny(name, *settings, "model.weights=w.pth"), tmp_path / "other")


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


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"sites": 0}, "sites must be a whole number above 0, got 0"),
        ({"timeout": "long"}, "timeout must be a number above 0, got 'long'"),
        ({"wait": True}, "wait must be a number above 0, got True"),
        ({"config": "nowhere.toml"}, "no file nowhere.toml"),
    ],
)
def test_a_run_config_that_cannot_be_is_refused_and_named(given: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Settings.of(given)


def test_half_a_site_is_not_a_number_of_sites() -> None:
    with pytest.raises(InputError, match="sites"):
        Settings.of({"sites": 0.5})
