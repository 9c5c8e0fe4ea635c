"""Flower's nodes as the clients of a run: which node serves which client, and the messages of a round.

Flower assigns new node ids for every federation, so sites describe themselves before round 1 and when they reconnect,
and clients are identified by the names that the sites give themselves. A name is bound to the key of the node that
used it first.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType, Metadata, RecordDict
from flwr.serverapp import Grid

from fedcir.client.client_requests import RequestKind
from fedcir.client.cost import peak_memory
from fedcir.client.head_bank import COALITIONS
from fedcir.errors import RunError
from fedcir.flower.certificates import node_key_fingerprint
from fedcir.flower.site_data import AuditLog
from fedcir.flower.site_manifest import NODE_KEY, SiteDescription, client_name
from fedcir.flower.wire import (
    CONFIG,
    HEADER,
    MAX_METRICS,
    NO_REPLY,
    WRONG_SENDER,
    TaskHeader,
    describe_reply_error,
    is_reply_to,
    make_message,
    pack_task,
    unpack_reply,
)
from fedcir.runtime.session import Session
from fedcir.server.replies import list_evaluation_metrics
from fedcir.types import ClientReply, DroppedReply, Groups, ServerState

log = logging.getLogger("flwr")

SITES = 2
"""Sites that must be connected before a run begins."""
WAIT_SECONDS = 600.0
"""Time to wait for them."""
ROUND_TIMEOUT = 3600.0
"""Seconds that the clients of a round have to reply."""
POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Clock:
    """The clock of everything that waits; tests pass their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def push_messages(grid: Grid, messages: Sequence[Message]) -> dict[str, Metadata]:
    """Send messages; return the metadata of those that were sent, by message id."""
    sent = set(grid.push_messages(messages))
    return {
        message.metadata.message_id: message.metadata for message in messages if message.metadata.message_id in sent
    }


@dataclass
class NodeRegistry:
    """The connected nodes and the sites that they serve."""

    grid: Grid
    header: TaskHeader
    """Header of the request for a site's description."""
    audit: AuditLog | None = None
    """Records nodes that join, are refused or leave."""
    clock: Clock = field(default_factory=Clock)
    reminder_interval: float = 30.0
    """Seconds after which the log repeats what the run waits for, and failed nodes are asked again."""
    sites: dict[int, SiteDescription] = field(default_factory=dict)
    """Descriptions of the sites by node."""
    failures: dict[int, str] = field(default_factory=dict)
    """Nodes that could not describe themselves, or may not use their name, and why."""
    keys: dict[int, str] = field(default_factory=dict)
    """Key fingerprints of connected nodes; empty where Flower tells none."""
    _clients: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Clients of the manifest by name, once there is one."""
    _rejected: dict[int, str] = field(default_factory=dict)
    """Names that failed nodes have claimed."""
    _reported: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Last entry in log and audit log about each node."""
    _requests: dict[str, Metadata] = field(default_factory=dict)
    """Requests without a reply, by message id."""

    @property
    def pending(self) -> set[int]:
        """Nodes that have been asked for their description and have not replied yet."""
        return {request.dst_node_id for request in self._requests.values()}

    def refresh(self, advice: str = "") -> set[int]:
        """Ask new nodes for their description, read replies and report changes; return the connected nodes."""
        self.keys = {node.node_id: node_key_fingerprint(node.public_key) for node in self.grid.get_nodes()}
        connected = set(self.keys)
        self._query(connected - {*self.sites, *self.failures, *self.pending})
        for message in self.grid.pull_messages(list(self._requests)) if self._requests else ():
            request = self._requests.pop(message.metadata.reply_to_message_id, None)
            if request is not None:
                self._read(request.dst_node_id, request, message)
        for nodes in (self.sites, self.failures):  # a node that reconnects may be another one, or fixed
            for node in nodes.keys() - connected:
                del nodes[node]
        self._requests = {name: request for name, request in self._requests.items() if request.dst_node_id in connected}
        self._report_changes(advice)
        return connected

    def bind_keys(self, clients: Sequence[dict[str, Any]]) -> None:
        """Bind the names of the manifest's clients to the keys of the nodes that serve them now."""
        self._clients = {client_name(client): client for client in clients}
        for node, site in self.sites.items():
            client = self._clients.get(site.name)
            if client is not None and self.keys.get(node):
                client.setdefault(NODE_KEY, self.keys[node])

    def wait(self, enough: int, timeout: float) -> None:
        """Wait until enough sites are connected and every node has replied, logging progress."""
        now = reminded = self.clock.now()
        deadline, repeat = now + timeout, f"asked again every {self.reminder_interval:g} s"
        advice = f". It is {repeat}; if you change its node-config, restart its SuperNode"
        self.refresh(advice)
        while (len(self.sites) < enough or self._requests) and now <= deadline:
            if now > reminded + self.reminder_interval:
                reminded = now
                self._remind(enough, deadline - now)
            self.clock.sleep(POLL_SECONDS)
            self.refresh(advice)
            now = self.clock.now()
        if len(self.sites) < enough:
            failed = "".join(f"; node {node}: {reason}" for node, reason in self.failures.items())
            raise RunError(
                f"{self._describe_sites(enough, f' after {timeout:.0f} s')}{failed}. "
                "Start or fix the others, or lower `sites`"
            )

    def find_nodes(self, clients: Sequence[dict[str, Any]]) -> tuple[dict[int, int], dict[int, str]]:
        """Return the node of each client of the manifest, and why others have none."""
        self.refresh()
        nodes: dict[int, int] = {}
        by_name = {client_name(client): client for client in clients}
        missing = {client["id"]: "its node is not connected" for client in clients}
        for node, name in self._rejected.items():
            if name in by_name and node in self.failures:
                missing[by_name[name]["id"]] += f", and another was turned away: {self.failures[node]}"
        for node, site in self.sites.items():
            client = by_name.get(site.name, {})
            if not client or client["id"] in nodes:
                continue  # the first node keeps a name until it disconnects
            if client["content"] != site.content:
                missing[client["id"]] = "its data have changed since the run began"
            else:
                nodes[client["id"]] = node
                missing.pop(client["id"], None)
        return nodes, missing

    def _query(self, nodes: Set[int]) -> None:
        content = RecordDict({CONFIG: ConfigRecord({HEADER: self.header.to_json()})})
        if messages := [make_message(content, node, MessageType.QUERY) for node in sorted(nodes)]:
            self._requests |= push_messages(self.grid, messages)

    def _read(self, node: int, request: Metadata, message: Message) -> None:
        if not is_reply_to(message, request):
            self.failures[node] = WRONG_SENDER
            return
        if message.has_error():
            if (reason := describe_reply_error(message)) != NO_REPLY:  # else it is asked again
                self.failures[node] = reason
            return
        try:
            site = SiteDescription.from_message(message)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            fix = "install the same version at the site and at the server"
            self.failures[node] = f"its answer is not one of this fedcir: {fix}"
            return
        bound, key = self._clients.get(site.name, {}).get(NODE_KEY, ""), self.keys.get(node, "")
        if bound and key and bound != key:
            self._rejected[node] = site.name
            self.failures[node] = (
                f"it claims the name {site.name!r} with the key {key}, but the name belongs to {bound} (see new-keys)"
            )
            return
        self.sites[node] = site
        self.failures.pop(node, None)
        self.bind_keys(list(self._clients.values()))

    def _report_changes(self, advice: str) -> None:
        """Log and audit what has changed about each node since the last call."""
        entries: dict[int, dict[str, Any]] = {
            node: {"event": "joined", "site": site.domain, "train": site.train, "test": site.test}
            for node, site in self.sites.items()
        }
        entries |= {node: {"event": "refused", "reason": reason} for node, reason in self.failures.items()}
        departed = self._reported.keys() - entries.keys()
        changes = {node: {**self._reported[node], "event": "left"} for node in departed}
        changes |= {node: entry for node, entry in entries.items() if self._reported.get(node) != entry}
        for node, entry in changes.items():
            if node in departed:
                log.warning("node %s has disconnected", node)
            elif node in self.failures:
                log.warning("node %s cannot take part: %s%s", node, entry["reason"], advice)
            else:
                counts = f"{entry['train']} training and {entry['test']} test images"
                log.info("site %r connected as node %s: %s", entry["site"], node, counts)
            if self.audit is not None:
                self.audit.record(**entry, node=str(node))
        self._reported = entries

    def _remind(self, enough: int, seconds_left: float) -> None:
        """Log what the run waits for, and ask failed nodes again, which may be fixed by now."""
        pending = self.pending
        line = f"{self._describe_sites(enough)}, and the run waits {seconds_left:.0f} s more"
        if len(self.sites) + len(pending - self.failures.keys()) < enough:
            line += ": start the others, or stop it with `flwr stop` and start it with a lower `sites`"
        log.info("%s", line)
        for node in sorted(pending):
            log.info("node %s has not answered yet: it may be decoding its images", node)
        for node, reason in self.failures.items():
            log.warning("node %s still cannot take part: %s", node, reason)
        self._query(self.failures.keys() - pending)

    def _describe_sites(self, enough: int, when: str = "") -> str:
        names = ", ".join(sorted(site.domain for site in self.sites.values())) or "none"
        return f"{len(self.sites)} of {enough} sites are connected{when} ({names})"


Arrival = tuple[int, Metadata, Message | None]
"""Client, metadata of the request, and the reply; None if it did not come in time."""


@dataclass
class PendingMessages:
    """Messages of a round that have been sent."""

    round: int
    waiting: dict[str, tuple[int, Metadata]]
    """Requests without a reply by message id: the client, and the request's metadata."""
    missing: dict[int, str]
    """Clients that could not be reached, and why."""
    deadline: float
    arrived: dict[int, Arrival] = field(default_factory=dict)
    """Combined replies whose evaluation has been read, by client."""


@dataclass
class GridTransport:
    """Clients at the nodes of a grid. A client that does not reply in time is dropped from the round and named."""

    registry: NodeRegistry
    session: Session
    clients: Sequence[dict[str, Any]]
    """Clients of the manifest."""
    key: str
    timeout: float
    """Seconds that the clients of a round have to reply."""
    reconnect_timeout: float = 30.0
    """Seconds that a round waits for a client that is reconnecting."""
    _ahead: PendingMessages | None = None
    """Messages that already ask for the next round's training."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | DroppedReply]:
        ahead, self._ahead = self._ahead, None
        template = self.session.template()
        if ahead is None or ahead.round != state.round + 1:
            ahead = PendingMessages(state.round + 1, {}, dict.fromkeys(cohort, ""), 0.0)
        absent = [client for client in cohort if client in ahead.missing]  # they may be connected by now
        pending = self.send(MessageType.TRAIN, state.round + 1, state.shared, absent)
        for client in list(ahead.arrived):
            yield self.read(*ahead.arrived.pop(client), template, "train")
        for arrival in self._wait_for_replies(ahead):
            yield self.read(*arrival, template, "train")
        yield from self.collect(pending, template)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | DroppedReply]:
        """Evaluate the state; clients that train on it next are asked for both at once, which halves the messages."""
        next_state, next_cohort = self.session.next_state, self.session.next_cohort()
        if next_state is None or next_cohort is None:
            pending = self.send(MessageType.EVALUATE, state.round, state.shared, cohort)
            yield from (DroppedReply(client, reason) for client, reason in pending.missing.items())
            for arrival in self._wait_for_replies(pending):
                yield self.read(*arrival, self._expect_tests(state, arrival[0]))
            return
        round, groups = next_state.round + 1, next_state.shared
        combined = self._ahead = self.send(MessageType.TRAIN, round, groups, next_cohort, tests=cohort)
        others = [client for client in cohort if client not in next_cohort]
        pending = self.send(MessageType.EVALUATE, state.round, state.shared, others)
        yield from (DroppedReply(client, reason) for client, reason in combined.missing.items() if client in cohort)
        for arrival in self._wait_for_replies(combined, cohort):
            combined.arrived[arrival[0]] = arrival
            yield self.read(*arrival, {}, "evaluate")
        yield from self.collect(pending, {})

    def _expect_tests(self, state: ServerState, client: int) -> Groups:
        """Groups of a client's evaluation: bits for its test images where it tests heads of coalitions."""
        if COALITIONS not in state.shared:
            return {}
        heads, images = state.shared[COALITIONS], self.session.roster.sizes[client].test
        count = len(heads["weight"]) + len(heads["projected_weight"])
        return {COALITIONS: {"bits": torch.zeros(count, -(-images // 8), dtype=torch.uint8)}}

    def peak_memory(self) -> int:
        return peak_memory()

    def send(
        self, kind: str, round: int, groups: Groups, cohort: Sequence[int], tests: Sequence[int] = ()
    ) -> PendingMessages:
        """Send the groups to a cohort's nodes."""
        if not cohort:
            return PendingMessages(round, {}, {}, 0.0)
        messages, missing = self.make_messages(kind, round, groups, cohort, tests)
        by_node = {message.metadata.dst_node_id: client for client, message in messages.items()}
        sent = push_messages(self.registry.grid, list(messages.values()))
        waiting = {name: (by_node[request.dst_node_id], request) for name, request in sent.items()}
        lost = messages.keys() - {client for client, _ in waiting.values()}
        missing |= dict.fromkeys(lost, "its message could not be sent")
        return PendingMessages(round, waiting, missing, self.registry.clock.now() + (2 if tests else 1) * self.timeout)

    def make_messages(
        self,
        kind: str,
        round: int,
        groups: Groups,
        cohort: Sequence[int],
        tests: Sequence[int] = (),
        config: Mapping[str, Any] | None = None,
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """Make a message for each client that is connected, by client, and say why others are not.

        Clients in `tests` evaluate the groups first, in twice the time. `config` holds values of others, such as
        Flower's mods.
        """
        nodes, missing = self._find_nodes(cohort)
        numbers = {node: client for client, node in nodes.items()}
        known = self.registry.header
        header = TaskHeader(
            *(self.session.config, numbers, round, known.classes, self.key),
            tests=tuple(tests),
            frozen=self.session.frozen_hash,
            agreed=known.agreed,
        )
        content = pack_task(groups, self.session.algorithm.trains, header, config)
        ttl = (2 if tests else 1) * self.timeout
        return {client: make_message(content, node, kind, round, ttl) for client, node in nodes.items()}, missing

    def collect(self, pending: PendingMessages, template: Groups) -> Iterator[ClientReply | DroppedReply]:
        """Yield replies as they arrive; clients without one at the deadline are dropped."""
        yield from (DroppedReply(client, reason) for client, reason in pending.missing.items())
        for arrival in self._wait_for_replies(pending):
            yield self.read(*arrival, template)

    def read(
        self, client: int, request: Metadata, message: Message | None, template: Groups, part: RequestKind | None = None
    ) -> ClientReply | DroppedReply:
        """Read a reply if it is this client's reply to this request and matches the template."""
        if message is None:
            return DroppedReply(client, NO_REPLY)
        if not is_reply_to(message, request):
            return DroppedReply(client, WRONG_SENDER)
        session = self.session
        most = max(MAX_METRICS, 1 + len(list_evaluation_metrics(session.roster.builder.task)))  # and NUM_EXAMPLES
        return unpack_reply(message, client, template, session.algorithm.trains, part, most)

    def _wait_for_replies(self, pending: PendingMessages, clients: Collection[int] | None = None) -> Iterator[Arrival]:
        """Yield replies as they arrive, of all or some clients; None for those that have not come by the deadline."""
        clock = self.registry.clock
        while waiting := {
            name for name, (client, _) in pending.waiting.items() if clients is None or client in clients
        }:
            for message in self.registry.grid.pull_messages(list(waiting)):
                if message.metadata.reply_to_message_id in waiting:
                    yield *pending.waiting.pop(message.metadata.reply_to_message_id), message
            unanswered = waiting & pending.waiting.keys()
            if clock.now() > pending.deadline:
                for name in unanswered:
                    yield *pending.waiting.pop(name), None
            elif unanswered:
                clock.sleep(POLL_SECONDS)

    def _find_nodes(self, cohort: Sequence[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Find the cohort's nodes, giving those that have just reconnected time to describe themselves."""
        clock, clients = self.registry.clock, [client for client in self.clients if client["id"] in cohort]
        deadline = clock.now() + self.reconnect_timeout
        while True:
            nodes, missing = self.registry.find_nodes(clients)
            if not missing or not self.registry.pending or clock.now() > deadline:
                return nodes, missing
            clock.sleep(POLL_SECONDS)
