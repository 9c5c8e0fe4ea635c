"""Who is who: how sites introduce themselves, and which node speaks for which client."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from descriptions import config, numbers, own, share
from federations import ssh_fingerprint
from flwr.app import ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from grid import MemoryGrid, Node, clock_of_sleep, pem, run_of_flower  # noqa: F401

from fedcir.errors import RunError
from fedcir.flower.certificates import make_node_key, node_key_fingerprint
from fedcir.flower.site_manifest import SiteDescription, build_site_manifest, release_keys
from fedcir.flower.transport import POLL_SECONDS, NodeRegistry, push_messages
from fedcir.flower.wire import TaskHeader


def introduces(site: SiteDescription) -> Node:
    return lambda message: Message(site.to_content(), reply_to=message)


def says(text: str) -> Node:
    """A node that answers with this text in the place of an introduction."""
    return lambda message: Message(RecordDict({"config": ConfigRecord({"fedcir": text})}), reply_to=message)


def silent(message: Message) -> None:
    """A node that does not answer."""


def fails(message: Message) -> Message:
    return Message(Error(2, "InputError at the site"), reply_to=message)


def looking(grid: MemoryGrid) -> NodeRegistry:
    sites = NodeRegistry(grid, TaskHeader(config(), {}))
    sites.refresh()
    return sites


def manifest_clients(*sites: SiteDescription) -> list[dict[str, Any]]:
    clients: list[dict[str, Any]] = build_site_manifest(sites, config())[0]["clients"]
    return clients


def test_every_node_is_asked_once_who_it_is() -> None:
    grid = MemoryGrid({11: introduces(own("a")), 5: introduces(own("b"))})
    sites = looking(grid)
    assert sites.refresh() == {5, 11}
    assert sites.sites == {11: own("a"), 5: own("b")}
    assert grid.asked(MessageType.QUERY) == [5, 11]
    assert not sites.failures
    assert not sites.pending


def test_an_introduction_tells_how_many_images_a_site_has_but_not_which() -> None:
    message = json.loads(str(own("a").to_content()["config"]["fedcir"]))
    assert message == json.loads(json.dumps(asdict(own("a"))))
    assert message.keys() == {
        *("domain", "classes", "train", "test", "content"),
        *("image_size", "channels", "validation", "partition", "shared", "versions", "mask_key", "shape", "summary"),
    }


GARBAGE = {
    "not JSON": "{",
    "a number": "7",
    "a list": "[1]",
    "nothing": "{}",
    "a field too many": json.dumps({**asdict(own("a")), "labels": [1, 2]}),
    "a field of another type": json.dumps({**asdict(own("a")), "train": "many"}),
    "a name with a line break": json.dumps(asdict(own("a\nclient 0 dropped"))),
    "a name that colours a terminal": json.dumps(asdict(own("\x1b[31ma"))),
    "a mask key that is too short": json.dumps({**asdict(own("a")), "mask_key": "00ff"}),
    "a name without end": json.dumps(asdict(own("a" * 201))),
    "a class that cannot be shown": json.dumps(asdict(own("a", "cat", "\u202egod"))),
}


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_a_node_that_answers_garbage_is_no_site(text: str) -> None:
    sites = looking(MemoryGrid({5: says(text), 6: introduces(own("b"))}))
    assert sites.sites == {6: own("b")}
    assert sites.failures == {
        5: "its answer is not one of this fedcir: install the same version at the site and at the server"
    }


def test_a_node_that_answers_a_hundred_thousand_brackets_is_no_site() -> None:
    assert set(looking(MemoryGrid({5: says("[" * 100_000)})).failures) == {5}


def test_a_node_that_answers_other_records_or_none_is_no_site() -> None:
    def metrics(message: Message) -> Message:
        return Message(RecordDict({"config": MetricRecord({"x": 1})}), reply_to=message)

    def nothing(message: Message) -> Message:
        return Message(RecordDict(), reply_to=message)

    sites = looking(MemoryGrid({1: metrics, 2: nothing}))
    assert set(sites.failures) == {1, 2}


def test_a_node_with_an_error_is_kept_with_its_reason_and_asked_again_once_it_has_come_back() -> None:
    grid = MemoryGrid({5: fails})
    sites = looking(grid)
    assert sites.failures == {5: "InputError at the site"}
    sites.refresh()
    assert grid.asked(MessageType.QUERY) == [5]
    del grid.nodes[5]
    sites.refresh()
    assert sites.failures == {}
    grid.nodes[5] = introduces(own("a"))
    sites.refresh()
    assert sites.sites == {5: own("a")}


def test_waiting_ends_as_soon_as_enough_are_there() -> None:
    clock = clock_of_sleep()
    sites = NodeRegistry(
        MemoryGrid({1: introduces(own("a")), 2: introduces(own("b"))}), TaskHeader(config(), {}), clock=clock
    )
    sites.wait(2, timeout=600)
    assert clock.now() == 0
    assert len(sites.sites) == 2


def test_waiting_in_vain_tells_who_was_there_and_why_others_were_not() -> None:
    grid = MemoryGrid({1: introduces(own("b")), 2: introduces(own("a")), 3: fails, 4: silent})
    with pytest.raises(RunError) as refused:
        NodeRegistry(grid, TaskHeader(config(), {}), clock=clock_of_sleep()).wait(4, timeout=600)
    message = str(refused.value)
    assert message.startswith("2 of 4 sites are connected after 600 s (a, b); node 3: InputError at the site")
    assert message.endswith("Start or fix the others, or lower `sites`")


def test_waiting_for_anyone_in_vain_says_that_none_was_there() -> None:
    with pytest.raises(RunError, match=r"0 of 1 sites are connected after 0 s \(none\)"):
        NodeRegistry(MemoryGrid({}), TaskHeader(config(), {}), clock=clock_of_sleep()).wait(1, timeout=0)


def test_a_node_that_does_not_say_who_it_is_is_waited_for_no_longer_than_the_timeout() -> None:
    clock = clock_of_sleep()
    sites = NodeRegistry(MemoryGrid({1: introduces(own("a")), 2: silent}), TaskHeader(config(), {}), clock=clock)
    sites.wait(1, timeout=600)
    assert sites.sites == {1: own("a")}
    assert 600 < clock.now() <= 600 + 2 * POLL_SECONDS


def test_who_comes_and_who_fails_is_logged_at_once_and_only_once(log: pytest.LogCaptureFixture) -> None:
    grid = MemoryGrid({1: introduces(own("a")), 3: fails})
    with pytest.raises(RunError):
        NodeRegistry(grid, TaskHeader(config(), {}), clock=clock_of_sleep()).wait(2, timeout=10)
    assert log.messages == [
        "site 'a' connected as node 1: 8 training and 2 test images",
        "node 3 cannot take part: InputError at the site. It is asked again every 30 s; "
        "if you change its node-config, restart its SuperNode",
    ]


def test_every_now_and_then_the_log_says_for_whom_a_run_waits_and_what_to_do(log: pytest.LogCaptureFixture) -> None:
    grid = MemoryGrid({1: introduces(own("a")), 3: fails, 4: silent})
    with pytest.raises(RunError):
        NodeRegistry(grid, TaskHeader(config(), {}), clock=clock_of_sleep()).wait(4, timeout=100)
    waits = [message.rpartition(" waits ")[2].partition(":")[0] for message in log.messages if " waits " in message]
    assert waits == ["70 s more", "40 s more", "9 s more"]
    reminder = log.text.partition("1 of 4 sites are connected (a), and the run waits 70 s more: ")[2]
    assert "start the others, or stop it with `flwr stop` and start it with a lower `sites`" in reminder
    assert "node 4 has not answered yet" in reminder
    assert "node 3 still cannot take part: InputError at the site" in reminder


def test_a_site_that_is_mended_while_the_run_waits_takes_part_though_it_never_disconnected() -> None:
    grid = MemoryGrid({1: introduces(own("a"))})

    def mended(message: Message) -> Message:
        grid.nodes[3] = introduces(own("b"))  # from the next time on
        return fails(message)

    grid.nodes[3] = mended
    sites = NodeRegistry(grid, TaskHeader(config(), {}), clock=clock_of_sleep())
    sites.wait(2, timeout=600)
    assert sites.sites == {1: own("a"), 3: own("b")}
    assert not sites.failures


def test_what_a_site_says_of_its_failure_cannot_write_into_the_log_what_it_likes() -> None:
    def coloured(message: Message) -> Message:
        return Message(Error(2, "\x1b[31mall is\nwell\u202e"), reply_to=message)

    assert looking(MemoryGrid({5: coloured})).failures == {5: "\ufffd[31mall is well\ufffd"}


def test_clients_are_found_by_name_and_those_that_are_not_there_are_told() -> None:
    sites = looking(MemoryGrid({70: introduces(own("b")), 8: introduces(own("a"))}))
    clients = manifest_clients(own("a"), own("b"), own("c"))
    assert sites.find_nodes(clients) == ({0: 8, 1: 70}, {2: "its node is not connected"})
    assert sites.find_nodes(clients[1:2]) == ({1: 70}, {})


def test_shares_are_found_by_partition_id_and_not_by_domain() -> None:
    sites = looking(MemoryGrid({7: introduces(share(1, "a")), 8: introduces(share(0, "a"))}))
    assert sites.find_nodes(manifest_clients(share(0, "a"), share(1, "a"))) == ({0: 8, 1: 7}, {})


def test_a_node_that_comes_back_under_another_number_takes_its_client_over() -> None:
    grid = MemoryGrid({7: introduces(own("a")), 8: introduces(own("b"))})
    sites, clients = looking(grid), manifest_clients(own("a"), own("b"))
    grid.nodes[9] = grid.nodes.pop(7)
    assert sites.find_nodes(clients) == ({0: 9, 1: 8}, {})
    del grid.nodes[9]
    assert sites.find_nodes(clients) == ({1: 8}, {0: "its node is not connected"})


def test_a_second_node_of_a_name_does_not_get_the_client_while_the_first_is_there() -> None:
    grid = MemoryGrid({7: introduces(own("a"))})
    sites, clients = looking(grid), manifest_clients(own("a"), own("b"))[:1]
    grid.nodes = {3: introduces(own("a")), **grid.nodes}
    assert sites.find_nodes(clients) == ({0: 7}, {})
    del grid.nodes[7]
    assert sites.find_nodes(clients) == ({0: 3}, {})


def test_a_site_whose_data_have_changed_is_refused_with_that_reason() -> None:
    grid = MemoryGrid({7: introduces(own("a", content="other")), 8: introduces(own("b"))})
    clients = manifest_clients(own("a"), own("b"))
    assert looking(grid).find_nodes(clients) == ({1: 8}, {0: "its data have changed since the run began"})


def test_a_second_node_of_a_name_with_other_data_does_not_put_the_first_out() -> None:
    grid = MemoryGrid({5: introduces(own("a"))})
    sites = looking(grid)
    grid.nodes[7] = introduces(own("a", content="other"))
    assert sites.find_nodes(manifest_clients(own("a"), own("b"))[:1]) == ({0: 5}, {})


def test_a_node_that_comes_back_under_the_same_number_with_other_data_is_refused() -> None:
    grid = MemoryGrid({7: introduces(own("a"))})
    sites, clients = looking(grid), manifest_clients(own("a"), own("b"))[:1]
    assert sites.find_nodes(clients) == ({0: 7}, {})
    del grid.nodes[7]
    sites.refresh()
    grid.nodes[7] = introduces(own("a", content="other"))
    assert sites.find_nodes(clients) == ({}, {0: "its data have changed since the run began"})


def test_a_node_that_came_back_before_the_run_began_is_not_two_sites() -> None:
    grid = MemoryGrid({7: introduces(own("a"))})
    sites = looking(grid)
    grid.nodes = {9: introduces(own("a")), 8: introduces(own("b"))}
    sites.wait(2, timeout=0)
    assert numbers(build_site_manifest(sites.sites.values(), config())[0]) == {"a": 0, "b": 1}


def test_a_node_that_went_away_without_an_answer_is_not_waited_for() -> None:
    grid = MemoryGrid({7: silent, 8: introduces(own("b"))})
    sites = looking(grid)
    assert sites.pending
    del grid.nodes[7]
    sites.refresh()
    assert not sites.pending


def test_a_node_that_went_away_without_an_answer_is_asked_again_when_it_is_back() -> None:
    grid = MemoryGrid({7: silent})
    sites = looking(grid)
    del grid.nodes[7]
    sites.refresh()
    grid.nodes[7] = introduces(own("a"))
    sites.refresh()
    assert sites.sites == {7: own("a")}


ONE, TWO = (node_key_fingerprint(pem(number)) for number in (1, 2))


def test_a_fingerprint_is_what_ssh_keygen_shows_of_the_public_key(tmp_path: Path) -> None:
    public = make_node_key(tmp_path / "site.key")
    key = load_ssh_public_key(public.read_bytes())
    message = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # by the SuperLink
    assert node_key_fingerprint(message) == ssh_fingerprint(public)
    assert node_key_fingerprint(bytes(32)) == node_key_fingerprint(b"") == ""  # what simulated nodes have


def bound_grid() -> tuple[MemoryGrid, NodeRegistry, list[dict[str, Any]]]:
    """Two sites whose names are bound to their keys."""
    grid = MemoryGrid({7: introduces(own("a")), 8: introduces(own("b"))}, {7: pem(1), 8: pem(2)})
    sites, clients = looking(grid), manifest_clients(own("a"), own("b"))
    sites.bind_keys(clients)
    return grid, sites, clients


def test_names_are_bound_to_the_keys_that_used_them_first() -> None:
    _, sites, clients = bound_grid()
    assert [client["node_key"] for client in clients] == [ONE, TWO]
    assert sites.find_nodes(clients) == ({0: 7, 1: 8}, {})


@pytest.mark.parametrize("content", ["hash of a", "other"])
def test_a_node_that_claims_the_name_of_another_key_is_turned_away_and_named(
    content: str, log: pytest.LogCaptureFixture
) -> None:
    grid, sites, clients = bound_grid()
    grid.nodes[9], grid.keys[9] = introduces(own("a", content=content)), pem(3)
    assert sites.find_nodes(clients) == ({0: 7, 1: 8}, {})
    other = node_key_fingerprint(pem(3))
    turned = f"it claims the name 'a' with the key {other}, but the name belongs to {ONE} (see new-keys)"
    assert sites.failures == {9: turned}
    assert f"node 9 cannot take part: {turned}" in log.messages
    del grid.nodes[7]
    result, missing = sites.find_nodes(clients)
    assert result == {1: 8}
    assert missing == {0: f"its node is not connected, and another was turned away: {turned}"}
    assert log.messages.count(f"node 9 cannot take part: {turned}") == 1


def test_a_registered_site_cannot_take_the_name_of_another_by_coming_back_as_it() -> None:
    grid, sites, clients = bound_grid()
    del grid.nodes[7]
    grid.nodes[8] = silent
    sites.refresh()
    del grid.nodes[8]
    sites.refresh()
    grid.nodes[8] = introduces(own("a"))
    assert sites.find_nodes(clients)[0] == {}
    assert set(sites.failures) == {8}


def test_a_node_that_restarts_with_its_key_has_its_name_whatever_its_number() -> None:
    grid, sites, clients = bound_grid()
    del grid.nodes[7]
    grid.nodes[99], grid.keys[99] = introduces(own("a")), pem(1)
    assert sites.find_nodes(clients) == ({0: 99, 1: 8}, {})


def test_a_site_with_a_new_key_takes_part_if_the_run_is_resumed_with_its_name() -> None:
    _, _, clients = bound_grid()
    grid = MemoryGrid({1: introduces(own("a")), 2: introduces(own("b"))}, {1: pem(4), 2: pem(5)})
    release_keys(clients, ["a"])
    sites = NodeRegistry(grid, TaskHeader(config(), {}))
    sites.bind_keys(clients)
    assert sites.find_nodes(clients)[0] == {0: 1}
    assert clients[0]["node_key"] == node_key_fingerprint(pem(4))
    release_keys(clients, ["all"])
    assert not any("node_key" in client for client in clients)


@pytest.mark.parametrize("number", [-1, 10**18])
def test_a_site_that_says_it_has_a_number_of_images_that_cannot_be_is_no_site(number: int) -> None:
    for part in ("train", "test", "validation"):
        assert set(looking(MemoryGrid({5: introduces(own("a", **{part: number}))})).failures) == {5}


def test_an_introduction_that_another_node_sent_in_its_place_is_refused() -> None:
    def forged(message: Message) -> Message:
        reply = introduces(own("a"))(message)
        assert reply is not None
        reply.metadata.__dict__["_group_id"] = "0"  # it has not seen what was asked
        return reply

    assert looking(MemoryGrid({5: forged})).failures == {5: "another node has answered in its place"}


class Refusing(MemoryGrid):
    """A grid that does not send to one node; `kept` says whether the ids that it gives have a gap there."""

    def __init__(self, nodes: Sequence[int], refused: int, kept: bool) -> None:
        super().__init__(dict.fromkeys(nodes, silent))
        self.refused, self.kept = refused, kept

    def push_messages(self, messages: Any) -> list[Any]:
        ids = [None if m.metadata.dst_node_id == self.refused else self._push(m) for m in messages]
        return ids if self.kept else [each for each in ids if each is not None]


@pytest.mark.parametrize("kept", [True, pytest.param(False)], ids=["HttpGrid", "InMemoryGrid"])
def test_a_message_that_could_not_be_sent_does_not_mix_up_the_others(kept: bool) -> None:
    grid = Refusing([4, 5, 6], refused=4, kept=kept)
    went = push_messages(grid, [Message(RecordDict(), node, MessageType.QUERY) for node in (4, 5, 6)])
    assert went == {message.metadata.message_id: message.metadata for message in grid.sent}
    assert [settings.dst_node_id for settings in went.values()] == [5, 6]
