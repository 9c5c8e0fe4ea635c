"""Carries a state to the nodes of a Flower federation and their replies back."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, Metadata

from fedcir.engine.client import What
from fedcir.engine.cost import peak_memory
from fedcir.engine.session import Session
from fedcir.flower.sites import POLL, Sites, push
from fedcir.flower.wire import ANOTHERS, NO_REPLY, ask, is_answer, pack_task, unpack_reply
from fedcir.types import ClientReply, Dropped, Groups, ServerState

Arrival = tuple[int, Metadata, Message | None]
"""A client, what its message said of itself, and the reply; None if it did not come in time."""


@dataclass
class Sent:
    """Messages that are on their way."""

    round: int
    waiting: dict[str, tuple[int, Metadata]]
    """Those without a reply, by message: the client, and what the message said of itself."""
    missing: dict[int, str]
    """Clients that could not be reached, and why."""
    until: float
    came: dict[int, Arrival] = field(default_factory=dict)
    """Replies of which one part has been read, by client."""


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
    _ahead: Sent | None = None
    """Messages that ask for the next round's training already."""

    def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | Dropped]:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.round != state.round + 1:
            sent = self.send(MessageType.TRAIN, state.round + 1, state.shared, cohort)
            yield from self.replies(sent, self.session.template())
            return
        template = self.session.template()
        absent = [client for client in cohort if client in ahead.missing]  # who was not there then may be there now
        sent = self.send(MessageType.TRAIN, state.round + 1, state.shared, absent)
        for client in list(ahead.came):
            yield self.read(*ahead.came.pop(client), template, "train")
        for reply in self._arrivals(ahead):
            yield self.read(*reply, template, "train")
        yield from self.replies(sent, template)

    def evaluate(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply | Dropped]:
        """Where clients test a state and train on it next, they are asked for both; what they trained is kept here."""
        coming, following = self.session.coming, self.session.following()
        if coming is None or following is None:
            yield from self.replies(self.send(MessageType.EVALUATE, state.round, state.shared, cohort), {})
            return
        both = self._ahead = self.send(MessageType.TRAIN, coming.round + 1, coming.shared, following, tests=cohort)
        rest = [client for client in cohort if client not in following]
        alone = self.send(MessageType.EVALUATE, state.round, state.shared, rest)
        yield from (Dropped(client, reason) for client, reason in both.missing.items() if client in cohort)
        for reply in self._arrivals(both, cohort):
            both.came[reply[0]] = reply
            yield self.read(*reply, {}, "evaluate")
        yield from self.replies(alone, {})

    def peak_memory(self) -> int:
        return peak_memory()

    def send(self, kind: str, round: int, groups: Groups, cohort: Sequence[int], tests: Sequence[int] = ()) -> Sent:
        """Send the groups to a cohort's nodes; `tests` are the clients that test them first, in twice the time."""
        timeout = 2 * self.timeout if tests else self.timeout
        if not cohort:
            return Sent(round, {}, {}, 0.0)
        messages, missing = self.messages(kind, round, groups, cohort, tests=tests, timeout=timeout)
        numbers = {message.metadata.dst_node_id: client for client, message in messages.items()}
        went = push(self.sites.grid, list(messages.values()))
        clients = {message: (numbers[asked.dst_node_id], asked) for message, asked in went.items()}
        reached = {client for client, _ in clients.values()}
        lost = dict.fromkeys(messages.keys() - reached, "its message could not be sent")
        return Sent(round, clients, {**missing, **lost}, self.sites.clock.now() + timeout)

    def messages(
        self,
        kind: str,
        round: int,
        groups: Groups,
        cohort: Sequence[int],
        config: ConfigRecord | None = None,
        tests: Sequence[int] = (),
        timeout: float | None = None,
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """A message for each client that is there, by client, and why others are not."""
        nodes, missing = self._reach(cohort)
        order = replace(self.sites.order, clients={node: client for client, node in nodes.items()})
        order = replace(order, config=self.session.config, round=round, key=self.key, tests=tuple(tests))
        content = pack_task(groups, self.session.algorithm.trains, order, config)
        timeout = timeout or self.timeout
        return {client: ask(content, node, kind, round, timeout) for client, node in nodes.items()}, missing

    def replies(self, sent: Sent, template: Groups) -> Iterator[ClientReply | Dropped]:
        """The replies as they come; clients that have none when the time is over are dropped."""
        yield from (Dropped(client, reason) for client, reason in sent.missing.items())
        for reply in self._arrivals(sent):
            yield self.read(*reply, template)

    def _arrivals(self, sent: Sent, of: Collection[int] | None = None) -> Iterator[Arrival]:
        """Replies as they come, of some clients only; None for those that have not come when the time is over."""
        while waiting := {name: asked for name, asked in sent.waiting.items() if of is None or asked[0] in of}:
            for message in self.sites.grid.pull_messages(list(waiting)):
                if message.metadata.reply_to_message_id in waiting:
                    yield *sent.waiting.pop(message.metadata.reply_to_message_id), message
            if self.sites.clock.now() > sent.until:
                for name in waiting.keys() & sent.waiting.keys():
                    yield *sent.waiting.pop(name), None
            elif waiting.keys() & sent.waiting.keys():
                self.sites.clock.sleep(POLL)

    def read(
        self, client: int, asked: Metadata, message: Message | None, template: Groups, part: What | None = None
    ) -> ClientReply | Dropped:
        """A reply, if it is one to what was asked, in this round and of this client, and as it should be."""
        if message is None:
            return Dropped(client, NO_REPLY)
        if not is_answer(message, asked):
            return Dropped(client, ANOTHERS)
        return unpack_reply(message, client, template, self.session.algorithm.trains, part)

    def _reach(self, cohort: Sequence[int]) -> tuple[dict[int, int], dict[int, str]]:
        """The cohort's nodes. Those that have just come back are given time to say who they are."""
        until = self.sites.clock.now() + self.patience
        while True:
            nodes, missing = self.sites.nodes([client for client in self.clients if client["id"] in cohort])
            if not missing or not self.sites.expecting or self.sites.clock.now() > until:
                return nodes, missing
            self.sites.clock.sleep(POLL)
