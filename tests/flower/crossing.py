"""Runs across a grid in memory, with the real ClientApp at its nodes, and nodes that answer something else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, Message, RecordDict
from grid import MemoryGrid, Node, clock_of_sleep, site

from fedcir.config import Config
from fedcir.flower.server_app import DeploymentSettings, open_deployment
from fedcir.flower.wire import TaskHeader
from fedcir.runtime.session import Session

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
    """A run across a grid, to its end or until so many rounds are done in all. No real time passes while it waits."""
    settings = DeploymentSettings(config, out, resume, sites, 0.0, timeout, True, new_keys)
    with open_deployment(grid, settings, clock_of_sleep()) as (session, rounds):
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


def header_of(message: Message) -> TaskHeader:
    return TaskHeader.from_json(str(message.content.config_records["config"]["fedcir"]))


def poison(content: RecordDict) -> None:
    content.array_records["arrays"][BIAS] = Array(np.array([0, np.nan, 0], np.float32))


def rename(content: RecordDict) -> None:
    arrays = content.array_records["arrays"]
    arrays["model/head.biases"] = arrays.pop(BIAS)
