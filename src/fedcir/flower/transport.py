"""Carries a state to the nodes of a Flower federation and their replies back."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, Metadata

from fedcir.engine.cost import peak_memory
from fedcir.engine.session import Session
from fedcir.flower.sites import POLL, Sites, push
from fedcir.flower.wire import ANOTHERS, NO_REPLY, ask, is_answer, pack_task, unpack_reply
from fedcir.types import ClientReply, Dropped, Groups, ServerState


@dataclass
class Sent:
    """Messages that are on their way."""

    clients: dict[str, tuple[int, Metadata]]
    """By message, with what it said of itself."""
    missing: dict[int, str]
    """Clients that could not be reached, and why."""
    template: Groups
    """What a reply must look like."""
    until: float


@dataclass
class GridTransport:
    """Clients at the nodes of a grid. One that does not answer in time is dropped from the round, and named."""

    sites: Sites
    session: Session
    clients: Sequence[dict[str, Any]]
    """Those of the manifest."""
    key: str
    timeout: float
    """Seconds that the clients of a round have to answer."""
    patience: float = 30.0
    """Seconds that a round waits for a client that is not there."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | Dropped]:
        yield from self.replies(self.send(MessageType.TRAIN, state.round + 1, state.shared, cohort))

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | Dropped]:
        yield from self.replies(self.send(MessageType.EVALUATE, state.round, state.shared, cohort))

    def peak_memory(self) -> int:
        return peak_memory()

    def send(self, kind: str, round: int, groups: Groups, cohort: Sequence[int]) -> Sent:
        """Send the groups to a cohort's nodes."""
        messages, missing = self.messages(kind, round, groups, cohort)
        numbers = {message.metadata.dst_node_id: client for client, message in messages.items()}
        went = push(self.sites.grid, list(messages.values()))
        clients = {message: (numbers[asked.dst_node_id], asked) for message, asked in went.items()}
        reached = {client for client, _ in clients.values()}
        lost = dict.fromkeys(messages.keys() - reached, "its message could not be sent")
        template = self.session.template() if kind == MessageType.TRAIN else {}
        return Sent(clients, {**missing, **lost}, template, time.monotonic() + self.timeout)

    def messages(
        self, kind: str, round: int, groups: Groups, cohort: Sequence[int], config: ConfigRecord | None = None
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """A message for each client that is there, by client, and why others are not."""
        nodes, missing = self._reach(cohort)
        order = replace(self.sites.order, clients={node: client for client, node in nodes.items()})
        order = replace(order, config=self.session.config, round=round, key=self.key)
        content = pack_task(groups, self.session.algorithm.trains, order, config)
        return {client: ask(content, node, kind, round, self.timeout) for client, node in nodes.items()}, missing

    def replies(self, sent: Sent) -> Iterator[ClientReply | Dropped]:
        """The replies as they come; clients that have none when the time is over are dropped."""
        for client, reason in sent.missing.items():
            yield Dropped(client, reason)
        waiting = dict(sent.clients)
        while waiting:
            for message in self.sites.grid.pull_messages(list(waiting)):
                if message.metadata.reply_to_message_id in waiting:
                    client, asked = waiting.pop(message.metadata.reply_to_message_id)
                    yield self.read(message, client, asked, sent.template)
            if waiting and time.monotonic() > sent.until:
                yield from (Dropped(client, NO_REPLY) for client, _ in waiting.values())
                return
            if waiting:
                time.sleep(POLL)

    def read(self, message: Message, client: int, asked: Metadata, template: Groups) -> ClientReply | Dropped:
        """A reply, if it is one to what was asked, in this round and of this client, and as it should be."""
        if not is_answer(message, asked):
            return Dropped(client, ANOTHERS)
        return unpack_reply(message, client, template, self.session.algorithm.trains)

    def _reach(self, cohort: Sequence[int]) -> tuple[dict[int, int], dict[int, str]]:
        """The cohort's nodes. Those that have just come back are given time to say who they are."""
        until = time.monotonic() + self.patience
        while True:
            nodes, missing = self.sites.nodes([client for client in self.clients if client["id"] in cohort])
            if not missing or not self.sites.expecting or time.monotonic() > until:
                return nodes, missing
            time.sleep(POLL)
