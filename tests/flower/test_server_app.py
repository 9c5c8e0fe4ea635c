"""A run at the server: its folder, its settings, how it stops and how it goes on."""

from pathlib import Path
from typing import Any

import pytest
from crossing import (
    BIAS,
    NODES,
    Tiny,
    Train,
    across,
    altered,
    dropped,
    header_of,
    instead,
    model,
    rename,
    rounds,
    shares,
)
from flwr.app import Message, MessageType
from grid import MemoryGrid, context_of, pem, run_of_flower, site  # noqa: F401

from fedcir.config import config_to_tables, dump_toml
from fedcir.errors import InputError, RunError
from fedcir.flower import server_app
from fedcir.flower.certificates import node_key_fingerprint
from fedcir.flower.server_app import DeploymentSettings
from fedcir.flower.wire import TaskHeader
from fedcir.runtime.run_folder import RunFolder


def test_a_resumed_run_knows_its_sites_by_their_keys_unless_it_is_told_of_new_ones(tiny: Tiny, tmp_path: Path) -> None:
    grid = shares(tmp_path)
    grid.keys = {node: pem(node) for node in NODES}
    across(grid, tiny("fedavg"), tmp_path / "run", until=1)
    bound = [client["node_key"] for client in RunFolder(tmp_path / "run").manifest()["clients"]]
    assert bound == [node_key_fingerprint(pem(node)) for node in NODES]
    grid.keys[17] = pem(99)
    across(grid, tiny("fedavg"), tmp_path / "run", resume=True, sites=2, until=2)
    assert list(dropped(tmp_path / "run")[1]) == ["1"]
    assert "it claims the name '1' with the key SHA256:" in dropped(tmp_path / "run")[1]["1"]
    across(grid, tiny("fedavg"), tmp_path / "run", resume=True, new_keys=("1",))
    assert dropped(tmp_path / "run")[2] == {}
    clients = RunFolder(tmp_path / "run").manifest()["clients"]
    assert clients[1]["node_key"] == node_key_fingerprint(pem(99))


def test_a_run_leaves_a_report_and_one_that_cannot_be_written_is_a_note(
    tiny: Tiny, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    settings, page = tmp_path / "run.toml", tmp_path / "run" / "report.html"
    settings.write_text(dump_toml(config_to_tables(tiny("fedavg", "server.rounds=1"))), encoding="utf-8")
    context = context_of({})
    context.run_config = {"config": str(settings), "out": str(tmp_path / "run"), "sites": 3}
    server_app.main(shares(tmp_path), context)
    assert "Distances between domains" in page.read_text(encoding="utf-8")
    assert log.messages[-1] == f"saved in {tmp_path / 'run'}, with a report.html to open"
    page.unlink()
    page.mkdir()
    context.run_config["resume"] = True
    server_app.main(shares(tmp_path), context)
    assert log.messages[-3].startswith("note: no report.html: ")
    assert log.messages[-2] == "the saved model is that of round 1, the last"
    assert log.messages[-1] == f"saved in {tmp_path / 'run'}"


@pytest.mark.parametrize("algorithm", ["fedcir", "fedsr"])
def test_below_min_replies_the_run_stops_and_a_resume_ends_as_if_it_had_not(
    tiny: Tiny, tmp_path: Path, algorithm: str
) -> None:
    config = tiny(algorithm, "server.min_replies=3")
    across(shares(tmp_path / "a"), config, tmp_path / "whole")
    out, grid = tmp_path / "run", shares(tmp_path / "b")
    healthy = grid.nodes[17]

    def from_round_2(message: Message) -> Message | None:
        first = TaskHeader.from_json(str(message.content.config_records["config"]["fedcir"])).round == 1
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
        if header_of(message).round == 4:  # all have tested round 3, and some have trained
            raise KeyboardInterrupt
        return reply

    grid.nodes[17] = instead(there, MessageType.TRAIN, kill)
    with pytest.raises(KeyboardInterrupt):
        across(grid, config, out)
    assert RunFolder(out).checkpoint_rounds() == [1, 2]
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
        DeploymentSettings.from_run_config(given)


def test_half_a_site_is_not_a_number_of_sites() -> None:
    with pytest.raises(InputError, match="sites"):
        DeploymentSettings.from_run_config({"sites": 0.5})
