"""Which node speaks for which client: sites introduce themselves before round 1, and again when they come back.

Flower draws a node's number anew for every federation, so clients are told apart by what the sites call themselves. A
name belongs to the key of the node that used it first.
"""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, Metadata, RecordDict
from flwr.serverapp import Grid

from fedcir.flower.audit_log import AuditLog
from fedcir.flower.introduction import Introduction
from fedcir.flower.keys import KEY, claim_fault, fingerprint, name_of
from fedcir.flower.patience import Clock
from fedcir.flower.wire import ANOTHERS, CONFIG, NO_REPLY, ORDER, Order, ask, is_answer, reason_of
from fedcir.types import RunError

log = logging.getLogger("flwr")

RESTART = "if you change its node-config, restart its SuperNode"
POLL = 0.25
"""Seconds between two looks for replies."""


@dataclass
class Sites:
    """The nodes that are connected and the clients they speak for."""

    grid: Grid
    order: Order
    """What a site must know to introduce itself."""
    audit: AuditLog | None = None
    """Told of nodes that join, are refused or leave."""
    _noted: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What it was last told of each node."""
    introductions: dict[int, Introduction] = field(default_factory=dict)
    """By node."""
    failures: dict[int, str] = field(default_factory=dict)
    """Nodes that could not introduce themselves, or as another only, and why."""
    keys: dict[int, str] = field(default_factory=dict)
    """The fingerprints of connected nodes' keys, empty where Flower tells none."""
    clock: Clock = field(default_factory=Clock)
    remind: float = 30.0
    """Seconds of waiting after which the log says for whom, and nodes that failed are asked again."""
    _bound: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The manifest's clients by name, once there is one."""
    _claims: dict[int, str] = field(default_factory=dict)
    """Names that failed nodes have claimed."""
    _said: dict[int, str] = field(default_factory=dict)
    """What the log was told of each node."""
    _asked: dict[str, Metadata] = field(default_factory=dict)
    """Messages that have not been answered yet."""

    def look(self) -> set[int]:
        """Ask nodes that are new who they are, and read what has been answered; gives the nodes that are connected."""
        self.keys = {node.node_id: fingerprint(node.public_key) for node in self.grid.get_nodes()}
        connected = set(self.keys)
        self._ask(connected - {*self.introductions, *self.failures, *self._silent()})
        for message in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            asked = self._asked.pop(message.metadata.reply_to_message_id, None)
            if asked is not None:
                self._read(asked, message)
        for known in (self.introductions, self.failures):  # who comes back may be another, or mended
            for node in known.keys() - connected:
                del known[node]
        self._asked = {message: asked for message, asked in self._asked.items() if asked.dst_node_id in connected}
        self._note_changes()
        return connected

    def _silent(self) -> set[int]:
        """Nodes that have not answered yet."""
        return {asked.dst_node_id for asked in self._asked.values()}

    def bind(self, clients: Sequence[dict[str, Any]]) -> None:
        """Bind the names of the manifest's clients to the keys of the nodes that speak for them now."""
        self._bound = {name_of(client): client for client in clients}
        for node, site in self.introductions.items():
            client = self._bound.get(site.name)
            if client is not None and self.keys.get(node):
                client.setdefault(KEY, self.keys[node])

    @property
    def expecting(self) -> bool:
        """Whether a node has been asked that has not answered yet."""
        return bool(self._asked)

    def wait(self, enough: int, patience: float) -> None:
        """Wait until enough sites are connected and every node has answered. The log tells how it goes."""
        begun = reminded = self.clock.now()
        while True:
            self.look()
            self._tell_news(f". It is asked again every {self.remind:g} s; {RESTART}")
            now = self.clock.now()
            if len(self.introductions) >= enough and not self._asked:
                return
            if now > begun + patience:
                break
            if now > reminded + self.remind:
                reminded = now
                self._remind(enough, begun + patience - now)
            self.clock.sleep(POLL)
        if (there := len(self.introductions)) < enough:
            failed = "".join(f"; node {node}: {reason}" for node, reason in self.failures.items())
            raise RunError(
                f"{there} of {enough} sites are connected after {patience:.0f} s ({self._there()}){failed}. "
                "Start or fix the others, or lower `sites`"
            )

    def _tell_news(self, advice: str = "") -> None:
        """Log what is new about each node since the last call."""
        said = self._said
        news = {
            node: f"site {site.domain!r} connected as node {node}: {site.train} training and {site.test} test images"
            for node, site in self.introductions.items()
        }
        for node, reason in self.failures.items():
            news[node] = f"node {node} cannot take part: {reason}{advice}"
        for node in said.keys() - news.keys() - self._silent():
            del said[node]
            log.warning("node %s has disconnected", node)
        for node, line in news.items():
            if not said.get(node, "").startswith(line):
                said[node] = line
                log.log(logging.WARNING if node in self.failures else logging.INFO, line)

    def _remind(self, enough: int, left: float) -> None:
        """Say whom the run waits for, and ask nodes again that have failed: they may be mended by now."""
        there, silent = len(self.introductions), self._silent()
        line = f"{there} of {enough} sites are connected ({self._there()}), and the run waits {left:.0f} s more"
        advice = ": start the others, or stop it with `flwr stop` and start it with a lower `sites`"
        log.info("%s%s", line, advice if there + len(silent - self.failures.keys()) < enough else "")
        for node in sorted(silent):
            log.info("node %s has not answered yet: it may be decoding its images", node)
        for node, reason in self.failures.items():
            log.warning("node %s still cannot take part: %s", node, reason)
        self._ask(self.failures.keys() - silent)

    def _there(self) -> str:
        return ", ".join(sorted(site.domain for site in self.introductions.values())) or "none"

    def _note_changes(self) -> None:
        if self.audit is None:
            return
        now: dict[int, dict[str, Any]] = {
            node: {"event": "refused", "reason": reason} for node, reason in self.failures.items()
        }
        for node, site in self.introductions.items():
            now[node] = {"event": "joined", "site": site.domain, "train": site.train, "test": site.test}
        for node in self._noted.keys() - now.keys():
            self.audit.note(**{**self._noted[node], "event": "left"}, node=str(node))
        for node, said in now.items():
            if self._noted.get(node) != said:
                self.audit.note(**said, node=str(node))
        self._noted = now

    def nodes(self, clients: Sequence[dict[str, Any]]) -> tuple[dict[int, int], dict[int, str]]:
        """The nodes of the manifest's clients, and why others of them have none."""
        connected = self.look()
        self._tell_news()
        found: dict[int, int] = {}
        claimed = {name: self.failures[node] for node, name in self._claims.items() if node in self.failures}
        named = {name_of(client): client for client in clients}
        missing = {c["id"]: f"its node is not connected{_but(claimed.get(name))}" for name, c in named.items()}
        for node, site in self.introductions.items():
            client = named.get(site.name)
            if client is None or node not in connected or client["id"] in found:
                continue  # who said so first has the name; another may take over once that one is gone
            if client["content"] != site.content:
                missing[client["id"]] = "its data have changed since the run began"
            else:
                found[client["id"]] = node
                missing.pop(client["id"], None)
        return found, missing

    def _ask(self, nodes: Set[int]) -> None:
        messages = [
            ask(RecordDict({CONFIG: ConfigRecord({ORDER: self.order.to_json()})}), node, MessageType.QUERY)
            for node in sorted(nodes)
        ]
        if messages:
            self._asked |= push(self.grid, messages)

    def _read(self, asked: Metadata, message: Message) -> None:
        node = asked.dst_node_id
        if not is_answer(message, asked):
            self.failures[node] = ANOTHERS
            return
        if message.has_error():
            if (reason := reason_of(message)) != NO_REPLY:  # or it is asked again
                self.failures[node] = reason
            return
        try:
            site = Introduction.from_message(message)
            if (owner := self._bound.get(site.name)) and (fault := claim_fault(owner, self.keys.get(node, ""))):
                self.failures[node], self._claims[node] = fault, site.name
                return
            self.introductions[node] = site
            self.failures.pop(node, None)  # it was mended
            self.bind(list(self._bound.values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.failures[node] = (
                "its answer is not one of this fedcir: install the same version at the site and at the server"
            )


def push(grid: Grid, messages: Sequence[Message]) -> dict[str, Metadata]:
    """Send messages; gives those that went out, by their ids."""
    went = set(grid.push_messages(messages))
    return {
        message.metadata.message_id: message.metadata for message in messages if message.metadata.message_id in went
    }


def _but(claim: str | None) -> str:
    return "" if claim is None else f", and another was turned away: {claim}"
