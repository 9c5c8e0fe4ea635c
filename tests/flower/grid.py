"""A grid in memory: its nodes are functions that answer at once. What passes is what Flower makes of a message."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedcir.flower.site_data import open_local_site
from fedcir.flower.site_requests import handle_message
from fedcir.flower.transport import Clock
from fedcir.flower.wire import unpack_header


def clock_of_sleep() -> Clock:
    """A clock on which time passes only while somebody sleeps, and then at once."""
    passed = [0.0]
    return Clock(lambda: passed[0], lambda seconds: passed.__setitem__(0, passed[0] + seconds))


Node = Callable[[Message], Message | None]
"""Answers a message, or does not."""


@pytest.fixture(autouse=True)
def run_of_flower() -> Iterator[None]:
    """Messages can be made in a run only, so this process takes part in one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_run_id", "_task_id", "_node_id"):
            patch.setattr(TaskIdentity, name, 1)
        yield


class MemoryGrid(Grid):
    """Nodes by number, which may come and go, and the public keys of some of them."""

    def __init__(self, nodes: Mapping[int, Node], keys: Mapping[int, bytes] | None = None) -> None:
        self.nodes, self.keys = dict(nodes), dict(keys or {})
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        raise AssertionError("nobody but Flower sets a run")

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(number) for number in message_ids if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def asked(self, kind: str) -> list[int]:
        """The nodes that messages of a kind went to, in that order."""
        return [sent.metadata.dst_node_id for sent in self.sent if sent.metadata.message_type == kind]

    def _push(self, message: Message) -> str:
        number = f"{len(self.sent):08x}"
        message.metadata.__dict__["_message_id"] = number
        self.sent.append(message)
        node = self.nodes.get(message.metadata.dst_node_id)
        reply = node(passed(message)) if node else None
        if reply is not None:
            self._replies[number] = passed(reply)
        return number


def passed(message: Message) -> Message:
    """A message on the other side: its objects to bytes and back."""
    contents = {number: thing.deflate() for number, thing in get_all_nested_objects(message).items()}
    made = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(made, Message)
    made.metadata.__dict__["_message_id"] = message.metadata.message_id
    return made


def context_of(node_config: Mapping[str, Any], node: int = 1) -> Context:
    return Context(run_id=1, node_id=node, node_config=dict(node_config), state=RecordDict(), run_config={})


def site(**node_config: Any) -> Node:
    """A node on which the real ClientApp runs, with `data_root` and the like for its node-config.

    A node with a share names the root of the run's dataset, unless it names another.
    """
    named = {name.replace("_", "-"): value for name, value in node_config.items()}

    def node(message: Message) -> Message:
        root = unpack_header(message.content).config.data.root
        own = {"data-root": root} if "partition-id" in named and root is not None else {}
        return handle_message(message, context_of({**own, **named}, message.metadata.dst_node_id), open_local_site)

    return node


def pem(number: int) -> bytes:
    """The public key of a node, as a SuperLink tells it."""
    key = ec.derive_private_key(number, ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
