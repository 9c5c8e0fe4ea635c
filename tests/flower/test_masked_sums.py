"""Masked sums across sites: the same model to the bit, messages that tell nothing alone, and a site that is lost."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from crossing import NODES, across, dropped, instead, model, shares
from flwr.app import Message, MessageType, RecordDict
from grid import run_of_flower, site  # noqa: F401

from fedcir.client.masks import MASKS
from fedcir.config import Config
from fedcir.errors import InputError, RunError
from fedcir.flower.strategy import AlgorithmStrategy
from fedcir.flower.wire import pack_task, unpack_task
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import open_run

Tiny = Callable[..., Config]
ONE = ("model.freeze=true", "data.val_fraction=0.2", "algorithm.standardise=federation")
MASKED = "server.masked=true"


def sums(message: Message | None) -> bytes:
    assert message is not None
    return bytes(message.content.config_records["config"]["sums/train_high"])  # type: ignore[arg-type]


def test_masks_change_no_bit_of_the_model_in_the_simulator_and_across_sites(tiny: Tiny, tmp_path: Path) -> None:
    models = []
    for name, settings in (("plain", ONE), ("masked", (*ONE, MASKED))):
        with open_run(tiny("fedcirone", *settings), tmp_path / name) as (session, rounds):
            list(rounds)
            models.append(session.state.shared["model"])
    grid, crossed = shares(tmp_path), tmp_path / "across"
    models.append(across(grid, tiny("fedcirone", *ONE, MASKED), crossed).state.shared["model"])
    for other in models[1:]:
        assert all(torch.equal(tensor, models[0][name]) for name, tensor in other.items())
    assert dropped(crossed) == [{}]


def test_a_single_message_tells_nothing_and_another_request_gets_other_masks(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "run")
    request = next(sent for sent in grid.sent if sent.metadata.message_type == MessageType.TRAIN)
    node = grid.nodes[request.metadata.dst_node_id]
    first, again = sums(node(request)), sums(node(request))
    assert first == again
    words = np.frombuffer(first, np.int64)[16:]  # behind the header of the array
    assert np.abs(words.astype(float)).mean() > 2**60, "sums of some images are smaller by orders of magnitude"
    groups, header = unpack_task(request.content)
    for changed in (
        pack_task(groups, ("model",), replace(header, round=header.round + 1)),
        pack_task({**groups, "other": {"tensor": torch.ones(1)}}, ("model",), header),
    ):
        reply = node(Message(changed, request.metadata.dst_node_id, MessageType.TRAIN, group_id="1-a"))
        assert sums(reply) != first


@pytest.mark.parametrize("answers", [False, True])
def test_a_lost_site_is_left_out_and_the_others_are_asked_again(tiny: Tiny, tmp_path: Path, answers: bool) -> None:
    """It does not answer, or its answer cannot be read."""

    def fail(message: Message) -> Message | None:
        return Message(RecordDict(), reply_to=message) if answers else None

    runs = []
    for settings in ((*ONE, MASKED), ONE):
        grid, out = shares(tmp_path / f"grid{len(runs)}"), tmp_path / str(len(runs))
        grid.nodes[NODES[1]] = instead(grid.nodes[NODES[1]], MessageType.TRAIN, fail)
        across(grid, tiny("fedcirone", *settings), out)
        runs.append((model(out), [list(names) for names in dropped(out)], len(grid.asked(MessageType.TRAIN))))
    assert runs[0][1] == runs[1][1] == [["1"]]
    assert (runs[0][2], runs[1][2]) == (5, 3), "two sites were asked twice"
    assert runs[0][0] == runs[1][0]


def test_with_one_site_left_the_run_ends(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    for node in NODES[:2]:
        grid.nodes[node] = instead(grid.nodes[node], MessageType.TRAIN, lambda message: None)
    with pytest.raises(RunError, match="too few clients are left to mask their sums"):
        across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "run")


def test_a_total_that_no_examples_have_ends_the_run(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    honest = grid.nodes[NODES[0]]

    def lie(message: Message) -> Message | None:
        reply = honest(message)
        assert reply is not None
        record = reply.content.config_records["config"]
        data = bytearray(record["sums/train_high"])  # type: ignore[arg-type]
        data[-7] ^= 1
        record["sums/train_high"] = bytes(data)
        return Message(reply.content, reply_to=message)

    grid.nodes[NODES[0]] = instead(honest, MessageType.TRAIN, lie)
    with pytest.raises(RunError, match="the total of the masked sums cannot be used"):
        across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "run")


def test_a_site_sends_nothing_unmasked_if_the_keys_are_not_its_own(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "run")
    request = next(sent for sent in grid.sent if sent.metadata.message_type == MessageType.TRAIN)
    groups, header = unpack_task(request.content)
    swapped = {**groups, MASKS: {**groups[MASKS], "keys": groups[MASKS]["keys"].roll(1, 0)}}
    content = pack_task(swapped, ("model",), header)
    node = request.metadata.dst_node_id
    reply = grid.nodes[node](Message(content, node, MessageType.TRAIN, group_id=request.metadata.group_id))
    assert reply is not None
    assert "its sums cannot be masked" in reply.error.reason


def test_a_policy_can_ask_for_masks(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("masked = true\n", encoding="utf-8")
    grid = shares(tmp_path)
    own = {"state": str(tmp_path / "state" / "0"), "policy": str(tmp_path / "policy.toml")}
    grid.nodes[NODES[0]] = site(partition_id=0, device="cpu", **own)
    across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "masked")
    with pytest.raises(RunError, match=r"its policy asks for server\.masked"):
        across(grid, tiny("fedcirone", *ONE), tmp_path / "plain")


def test_a_site_that_knows_the_others_keys_masks_with_no_other(tiny: Tiny, tmp_path: Path) -> None:
    grid, out = shares(tmp_path), tmp_path / "first"
    across(grid, tiny("fedcirone", *ONE, MASKED), out)
    keys = [client["mask_key"] for client in RunFolder(out).manifest()["clients"]]
    log = (tmp_path / "state" / "0" / "audit.jsonl").read_text(encoding="utf-8")
    assert json.loads(log.splitlines()[0])["mask_key"] == keys[0]
    policy = tmp_path / "policy.toml"
    own = {"state": str(tmp_path / "state" / "0"), "policy": str(policy)}
    grid.nodes[NODES[0]] = site(partition_id=0, device="cpu", **own)
    policy.write_text(f"mask_keys = {json.dumps(keys[1:])}\n", encoding="utf-8")
    across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "known")
    assert model(tmp_path / "known") == model(out)
    policy.write_text(f"mask_keys = {json.dumps(keys[1:2])}\n", encoding="utf-8")
    across(grid, tiny("fedcirone", *ONE, MASKED), tmp_path / "unknown")
    assert "does not know a key" in dropped(tmp_path / "unknown")[0]["0"]


def test_flowers_own_loop_takes_no_masks() -> None:
    with pytest.raises(InputError, match="use the ServerApp"):
        AlgorithmStrategy(
            "fedcirone",
            encoder=torch.nn.Flatten(),
            example=torch.zeros(1, 1, 2, 2),
            num_classes=2,
            set={"server.masked": True},
        )


def test_noise_and_masks_go_together(tiny: Tiny, tmp_path: Path) -> None:
    noise = ("algorithm.project=5", "privacy.unit=example", "privacy.clip=1", "privacy.noise=1")
    with open_run(tiny("fedcirone", *ONE, *noise, MASKED), tmp_path / "run") as (session, rounds):
        (record,) = rounds
    assert record.epsilon == pytest.approx(4.377, abs=1e-3)
    plain = tiny("fedcirone", *ONE, *noise)
    with open_run(plain, tmp_path / "plain") as (other, rounds):
        list(rounds)
    weights = [run.state.shared["model"]["head.weight"] for run in (session, other)]
    assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedcirone", ("model.freeze=true", MASKED), "set algorithm.standardise=federation"),
        ("fedavg", (MASKED,), "server.masked adds up sums, which only fedcirone sends"),
    ],
)
def test_methods_that_need_single_sums_are_refused(
    tiny: Tiny, tmp_path: Path, method: str, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message), open_run(tiny(method, *settings), tmp_path / "run"):
        pass
