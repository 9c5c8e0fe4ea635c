"""What a server makes of replies that it cannot use, or that never come."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from crossing import (
    BIAS,
    NODES,
    Change,
    Tiny,
    across,
    altered,
    dropped,
    header_of,
    instead,
    poison,
    rounds,
    shares,
)
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from grid import Node, run_of_flower, site  # noqa: F401

from fedcir.flower.server_app import DeploymentSettings, open_deployment
from fedcir.runtime.run_folder import RunFolder


def with_metrics(**values: float) -> Change:
    """Replace metrics of a reply."""

    def change(content: RecordDict) -> None:
        content.metric_records["metrics"].update(values)

    return change


def test_a_node_whose_replies_cannot_be_used_is_dropped_and_named_and_the_run_goes_on(
    tiny: Tiny, tmp_path: Path
) -> None:
    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], MessageType.TRAIN, poison)
    across(grid, tiny("fedcir", "server.rounds=2"), tmp_path / "run")
    for record in rounds(tmp_path / "run"):
        assert list(record["dropped"]) == ["1"]
        assert record["dropped"]["1"].startswith(f"{BIAS} is not finite; a lower local.lr may help")
        assert len(record["accuracy"]) == 3
    assert RunFolder(tmp_path / "run").finished


LIES: dict[str, tuple[str, Change, str]] = {
    "images to train on": ("train", with_metrics(**{"num-examples": 10**18}), f"num_examples is {10**18}, expected 24"),
    "images to test on": (
        "evaluate",
        with_metrics(correct=1e308, count=1e308),
        "evaluation: count is 1e+308, expected 12",
    ),
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


def test_a_node_that_does_not_answer_in_time_is_dropped_and_named(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.nodes[903] = instead(grid.nodes[903], MessageType.TRAIN, lambda message: None)
    across(grid, tiny("fedavg", "server.rounds=1"), tmp_path / "run", timeout=1)
    assert dropped(tmp_path / "run") == [{"2": "no reply in time"}]


def test_a_node_that_went_away_is_dropped_and_takes_part_again_once_it_is_back(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    with open_deployment(grid, DeploymentSettings(tiny("fedavg"), tmp_path / "run", False, 3, 0.0, 60.0)) as (_, going):
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


def metrics(**values: float) -> Change:
    def change(content: RecordDict) -> None:
        content["metrics"] = MetricRecord({"num-examples": 12, **values})

    return change


def test_an_evaluation_whose_counts_make_no_sense_is_dropped(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], MessageType.EVALUATE, metrics(loss=0.5))
    across(grid, tiny("fedavg", "server.rounds=1"), tmp_path / "run")
    (record,) = rounds(tmp_path / "run")
    assert record["dropped"] == {"1": "evaluation: its counts are invalid"}
    assert record["accuracy"].keys() == {"ink", "wax"}


def test_a_node_that_does_not_answer_when_asked_to_test_and_to_train_is_dropped_from_both(
    tiny: Tiny, tmp_path: Path
) -> None:
    grid = shares(tmp_path)
    there = grid.nodes[903]

    def node(message: Message) -> Message | None:
        return None if header_of(message).tests else there(message)

    grid.nodes[903] = node
    across(grid, tiny("fedavg", "server.rounds=2"), tmp_path / "run", timeout=1)
    assert dropped(tmp_path / "run") == [{"2": "evaluation: no reply in time"}, {"2": "no reply in time"}]


@pytest.mark.parametrize(
    ("part", "expected"),
    [("evaluate", [{"1": "evaluation: full"}, {}, {}]), ("train", [{}, {"1": "full"}, {"1": "full"}])],
)
def test_what_goes_wrong_with_one_of_two_things_that_were_asked_for_does_not_touch_the_other(
    tiny: Tiny, tmp_path: Path, part: str, expected: list[dict[str, str]]
) -> None:
    def fail(content: RecordDict) -> None:
        if "tests" in content:
            content["faults"] = ConfigRecord({part: "full"})
            if part == "evaluate":
                expected[1] = {"1": "evaluation: full"}

    grid = shares(tmp_path)
    grid.nodes[17] = altered(grid.nodes[17], MessageType.TRAIN, fail)
    across(grid, tiny("fedavg", "server.rounds=3"), tmp_path / "run")
    assert dropped(tmp_path / "run") == expected


def test_an_error_in_a_round_that_nobody_thought_of_is_told_by_its_kind_only(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    state = tmp_path / "state" / "1"

    def lose(content: RecordDict) -> None:
        shutil.rmtree(state)
        state.write_text("a file where the site's folder should be")

    grid.nodes[17] = altered(grid.nodes[17], MessageType.QUERY, lose)
    across(grid, tiny("fedsr", "server.rounds=1"), tmp_path / "run")
    assert dropped(tmp_path / "run") == [{"1": "NotADirectoryError at the site; the site's log tells more"}]
