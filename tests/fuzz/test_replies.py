"""Mutated replies of one site: dropped and named, or used; never an error, and never a model that cannot train."""

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from ended import LONG, fault
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from grid import run_of_flower  # noqa: F401
from mutate import VALUES, batches, damaged_bytes, outcomes

from fedcir.config import Config
from fedcir.flower.wire import pack_reply, unpack_reply
from fedcir.models.tensors import find_non_finite
from fedcir.runtime.rounds import step_server
from fedcir.runtime.session import Session
from fedcir.runtime.simulation import open_run
from fedcir.server.replies import tally_evaluations
from fedcir.types import ClientReply, DroppedReply, Groups

NAMES = ("", "arrays", "config", "metrics", "x", "model/x", "model/", "/", "num-examples", "loss/ce", "ä\x00\x1b[31m")
NAMES += ("a" * 500,)
BAD = 1


@pytest.fixture(scope="module")
def session(tiny: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A run of three clients before its first round; FedGen's clients send label counts beside the model."""
    with open_run(tiny("fedgen"), tmp_path_factory.mktemp("replies") / "run", False) as (session, _):
        return session


def mutated(content: RecordDict, rng: random.Random) -> RecordDict | Error:
    """The content of a reply with one of its records changed, added or removed."""
    record = rng.choice(sorted(content))
    held: dict[str, Any] = dict(content[record])
    name = rng.choice(sorted(held))
    what = rng.randrange(9)
    if what == 0:
        return Error(rng.choice((0, 1, 2, 99, -5)), rng.choice(("", "\x1b[31mred", "x" * 9000, "a\nb")))
    if what == 1:
        del content[record]
    elif what == 2:
        content[rng.choice(NAMES)] = content[record]
    elif what == 3:
        held[rng.choice(NAMES)] = held.pop(name)
    elif what == 4:
        del held[name]
    elif isinstance(held[name], Array):
        array = held[name]
        held[name] = Array(
            rng.choice((array.dtype, "object", "float64", "")),
            rng.choice((array.shape, (0,), (10**12,), ())),
            rng.choice((array.stype, "pickle")),
            damaged_bytes(array.data, rng) if what < 8 else array.data,
        )
    elif isinstance(held[name], bytes):
        held[name] = damaged_bytes(held[name], rng)
    else:
        numbers = [value for value in VALUES if type(value) in (int, float) and abs(value) < 2**63]
        held[name] = rng.choice((*numbers, 1e300, [1.0], [1, 2]))
    if record in content:
        kinds = {ArrayRecord: ArrayRecord, ConfigRecord: ConfigRecord, MetricRecord: MetricRecord}
        content[record] = kinds[type(content[record])](held)
    return content


def sent(
    reply: ClientReply, trained: tuple[str, ...], template: Groups, rng: random.Random
) -> ClientReply | DroppedReply:
    """The reply as the server reads it, after somebody has changed it."""
    question = Message(RecordDict(), 7, MessageType.TRAIN)
    content = pack_reply(reply, trained)
    try:
        for _ in range(rng.choice((1, 1, 2, 4))):
            content = mutated(content, rng)  # type: ignore[assignment, arg-type]
            if isinstance(content, Error) or not content:
                break
    except (TypeError, ValueError, KeyError, IndexError):  # Flower itself sends no such record
        pass
    return unpack_reply(Message(content, reply_to=question), reply.client_id, template, trained)


@batches(50)
def test_a_mutated_reply_to_train_is_dropped_in_one_line_or_used(seeds: range, session: Session) -> None:
    template = session.template()
    trained = session.algorithm.trains

    def attempt(rng: random.Random) -> str | None:
        def work() -> None:
            honest = [ClientReply(client, 24, template, {"loss/ce": 1.0, "flops": 9.0}) for client in range(3)]
            replies = [sent(item, trained, template, rng) if item.client_id == BAD else item for item in honest]
            state, collected = step_server(session, replies, [0, 1, 2])
            assert collected.count >= 2
            assert find_non_finite(state.shared) is None
            assert all(math.isfinite(value) for value in collected.losses().values())
            for reason in collected.dropped.values():
                assert reason.isprintable()
                assert len(reason) < LONG

        return fault(work)

    assert outcomes(seeds, attempt) == []


@batches(50)
def test_a_mutated_reply_of_a_test_is_dropped_in_one_line_or_gives_an_accuracy(seeds: range, session: Session) -> None:
    def attempt(rng: random.Random) -> str | None:
        def work() -> None:
            metrics = {"correct": 6.0, "count": 12.0, "loss": 1.5}
            honest = [ClientReply(client, 12, {}, metrics) for client in range(3)]
            replies = [sent(item, (), {}, rng) if item.client_id == BAD else item for item in honest]
            dropped: dict[str, str] = {}
            tests = tally_evaluations(session.roster, replies, dropped)
            result = tests.to_fields(session.roster.unseen) | {"metric": None, "dropped": dropped}
            assert all(0 <= value <= 1 for value in result["scores"].values())
            json.loads(json.dumps(result, allow_nan=False))
            assert all(reason.isprintable() for reason in dropped.values())

        return fault(work)

    assert outcomes(seeds, attempt) == []
