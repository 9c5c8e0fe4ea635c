"""Our groups and replies to and from Flower's records. Nothing is pickled, and nothing is loaded unchecked.

A message holds one ArrayRecord, with the groups that clients train, under the same names in both directions; one
ConfigRecord; and in a reply one MetricRecord, as Flower's own mods for differential privacy want it. What an algorithm
shares or sends beside (Gaussians, prototypes, a generator) lies in the ConfigRecord, each array as the bytes of an .npy
file, which is what Flower makes of an array too. A reply holds each tensor once and in its place, and no other record:
what Flower clips is what we average.
"""

import io
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from torch import Tensor

from fedcir.config import Config, config_from, config_tables
from fedcir.engine.client import What
from fedcir.types import Arrays, ClientReply, Dropped, Groups, InputError

FORMAT = 3
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
TESTS, FAULTS = "tests", "faults"
"""What a reply to a message that asks for both holds beside: the metrics of the test, and errors."""
ORDER = "fedcir"
NUM_EXAMPLES = "num-examples"
MAX_HEADER = 1000
"""Bytes that an .npy file may take beside its numbers."""
MAX_METRICS = 100
NORM_BIT = "norm_bit"
"""What Flower's adaptive clipping at a client tells its own half at the server. It is not for us."""
LATE = (3, 4, 5)
"""Flower's codes for a message or reply that expired and for a node that is gone."""
CRASHED = 2
"""Flower's code for a ClientApp that raised an exception."""
NO_REPLY = "no reply in time"
ANOTHERS = "another node has answered in its place"


@dataclass(frozen=True)
class Order:
    """What a message tells a client beside tensors. It is the same for all of them."""

    config: Config
    clients: Mapping[int, int]
    """The client's number by the number of its node, which Flower draws."""
    round: int = 0
    classes: tuple[str, ...] = ()
    key: str = ""
    """Names the run in the folder where a client keeps what is its own."""
    groups: tuple[str, ...] = ()
    """Those that the message holds, as no tensor tells of an empty one."""
    tests: tuple[int, ...] = ()
    """Clients that first test what they are to train on: it is what the round before has made."""

    def to_json(self) -> str:
        tables = config_tables(self.config)
        tables["model"].pop("weights", None)  # they come with the message
        if tables["algorithm"]["name"].endswith(".py"):
            tables["algorithm"]["name"] = Path(tables["algorithm"]["name"]).name
        if self.config.model.file is not None:
            tables["model"]["name"] = Path(tables["model"]["name"]).name
        clients = {str(node): number for node, number in self.clients.items()}
        values = {"format": FORMAT, "config": tables, "clients": clients, "round": self.round}
        more = {"classes": self.classes, "key": self.key, "groups": self.groups, "tests": self.tests}
        return json.dumps({**values, **more})

    @classmethod
    def from_json(cls, text: str) -> "Order":
        values = json.loads(text)
        if values.get("format") != FORMAT:
            wrong = f"the server speaks format {values.get('format')} and the site {FORMAT}: install the same fedcir"
            raise InputError(wrong, public=wrong)
        clients = {int(node): int(number) for node, number in values["clients"].items()}
        key = str(values["key"])
        if not all(letter in "0123456789abcdef" for letter in key):  # it names a folder
            raise InputError(f"the run's key must be hexadecimal, got {key!r}")
        classes, groups, tests = (tuple(values[name]) for name in ("classes", "groups", "tests"))
        return cls(config_from(values["config"]), clients, int(values["round"]), classes, key, groups, tests)


def pack_task(groups: Groups, trained: Iterable[str], order: Order, config: ConfigRecord | None = None) -> RecordDict:
    """What a client is sent; `config` holds what others, such as a mod of Flower's, have to say."""
    order = replace(order, groups=tuple(groups))
    record = ConfigRecord({**(config or {}), ORDER: order.to_json()})
    for name, tensor in _others(groups, trained):
        record[name] = _npy(tensor)
    return RecordDict({ARRAYS: pack_arrays(groups, trained), CONFIG: record})


def unpack_query(content: RecordDict) -> Order:
    """What a site is told when it is asked who it is."""
    return Order.from_json(str(content.config_records[CONFIG][ORDER]))


def unpack_task(content: RecordDict) -> tuple[Groups, Order]:
    """What a client was sent."""
    record, order = content.config_records[CONFIG], unpack_query(content)
    named = {name: _tensor(array.data, name) for name, array in content.array_records[ARRAYS].items()}
    for name, value in record.items():
        if isinstance(value, bytes) and name.partition("/")[0] in order.groups:
            named[name] = _tensor(value, name)
    return _grouped(named, order.groups), order


def pack_reply(reply: ClientReply, trained: Iterable[str]) -> RecordDict:
    """What a client answers."""
    metrics = MetricRecord({NUM_EXAMPLES: reply.num_examples, **reply.metrics})
    content = RecordDict({METRICS: metrics})
    if reply.arrays:
        content[ARRAYS] = pack_arrays(reply.arrays, trained)
    if others := dict(_others(reply.arrays, trained)):
        content[CONFIG] = ConfigRecord({name: _npy(tensor) for name, tensor in others.items()})
    return content


def pack_both(tested: RecordDict | Error, trained: RecordDict | Error) -> RecordDict:
    """The answers to a message that asks to test and to train. Either may be an error, and the other counts."""
    content = RecordDict() if isinstance(trained, Error) else trained
    if not isinstance(tested, Error):
        content[TESTS] = tested.metric_records[METRICS]
    faults = ConfigRecord()
    for what, part in (("evaluate", tested), ("train", trained)):
        if isinstance(part, Error):
            faults[what] = part.reason or ""
            content[FAULTS] = faults
    return content


def unpack_reply(
    message: Message, client: int, template: Groups, trained: Iterable[str], part: What | None = None
) -> ClientReply | Dropped:
    """What a client answered, if it is as the template says; nothing of it is loaded before that is known.

    Of a reply to a message that asks for both, `part` names the one that is wanted.
    """
    if message.has_error():
        return Dropped(client, reason_of(message))
    content = message.content if part is None else _part(message.content, part)
    if isinstance(content, str):
        return Dropped(client, one_line(content))
    try:
        expected = {f"{group}/{name}": tensor for group, bag in template.items() for name, tensor in bag.items()}
        arrays = {name: array.data for name, array in content.array_records.get(ARRAYS, ArrayRecord()).items()}
        others = content.config_records.get(CONFIG, ConfigRecord())
        beside = {name: value if isinstance(value, bytes) else b"" for name, value in others.items()}
        sent = {**arrays, **beside}
        fault = _repeated(arrays, beside) or _fault(sent, expected) or _misplaced(content, arrays, expected, trained)
        if fault is not None:
            return Dropped(client, fault)
        named = {name: _tensor(sent[name], name) for name in expected}
        metrics = _metrics(content)
        samples = metrics.pop(NUM_EXAMPLES, math.nan)
        if not samples.is_integer():
            return Dropped(client, f"{NUM_EXAMPLES} is missing, or not a whole number")
        return ClientReply(client, int(samples), _grouped(named, template), metrics)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        return Dropped(client, f"its reply cannot be read: {one_line(error)}")


def reason_of(message: Message) -> str:
    """Why a node could not answer, in one line."""
    if message.error.code in LATE:
        return NO_REPLY
    return one_line(message.error.reason or f"error {message.error.code} without a reason")


def ask(content: RecordDict, node: int, kind: str, round: int = 0, ttl: float | None = None) -> Message:
    """A message with a group that only its receiver can repeat: Flower takes a reply's word for who sent it."""
    return Message(content, node, kind, ttl=ttl, group_id=f"{round}-{secrets.token_hex(16)}")


def is_answer(reply: Message, asked: Metadata) -> bool:
    """Whether the node that was asked has sent the reply. Flower itself may tell of an error in its place."""
    told = reply.metadata
    return reply.has_error() or (told.src_node_id, told.group_id) == (asked.dst_node_id, asked.group_id)


def pack_arrays(groups: Groups, trained: Iterable[str]) -> ArrayRecord:
    """The trained groups as one record, `group/name`."""
    return ArrayRecord({f"{g}/{n}": Array(_numpy(tensor)) for g in trained for n, tensor in groups[g].items()})


def unpack_arrays(record: ArrayRecord) -> Groups:
    return _grouped({name: _tensor(array.data, name) for name, array in record.items()})


def _part(content: RecordDict, part: What) -> RecordDict | str:
    """One of two answers, or why there is none."""
    faults = content.config_records.get(FAULTS, ConfigRecord())
    if part in faults:
        return str(faults[part])
    if part == "evaluate":
        return RecordDict({METRICS: content.metric_records.get(TESTS, MetricRecord())})
    return RecordDict({name: record for name, record in content.items() if name not in (TESTS, FAULTS)})


def _others(groups: Groups, trained: Iterable[str]) -> Iterable[tuple[str, Tensor]]:
    trained = set(trained)
    return [(f"{g}/{n}", tensor) for g, bag in groups.items() if g not in trained for n, tensor in bag.items()]


def one_line(text: object) -> str:
    """What others have said, as a log or a terminal can show it: 200 letters at most, and no control character."""
    words = " ".join(str(text).split())[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _grouped(named: Arrays, names: Iterable[str] = ()) -> Groups:
    groups: Groups = {name: {} for name in names}
    for full, tensor in named.items():
        group, _, name = full.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def _repeated(arrays: Iterable[str], beside: Iterable[str]) -> str | None:
    """A name that occurs twice: which of its tensors a wrapper of Flower's has clipped, nobody knows."""
    twice = sorted({*arrays} & {*beside})
    return f"{twice[0][:100]!r} is there twice" if twice else None


def _misplaced(content: RecordDict, arrays: Iterable[str], expected: Arrays, trained: Iterable[str]) -> str | None:
    """A record that no reply of ours has, or a tensor in another's place."""
    kinds = {ARRAYS: ArrayRecord, CONFIG: ConfigRecord, METRICS: MetricRecord}
    for name, record in content.items():
        if not isinstance(record, kinds.get(name, ())):
            return f"its record {name[:100]!r} is not expected"
    groups = set(trained)
    odd = sorted({name for name in expected if name.partition("/")[0] in groups} ^ {*arrays})
    return f"{odd[0]} is not in the record where it belongs" if odd else None


def _fault(sent: Mapping[str, bytes], expected: Arrays) -> str | None:
    """The first way in which arrays differ in name, type, shape or size from what is expected."""
    for name in sorted(sent.keys() | expected.keys()):
        if name not in expected:
            return f"{name[:100]!r} is not expected"
        if name not in sent:
            return f"{name} is missing"
        want = _numpy(expected[name])
        if len(sent[name]) > want.nbytes + MAX_HEADER:
            return f"{name} has {len(sent[name])} bytes, expected {want.nbytes}"
        try:
            dtype, shape, _ = _header(sent[name])
        except ValueError:
            return f"{name} is not an array"
        if dtype != want.dtype or shape != want.shape:
            return f"{name} is {dtype}{list(shape)}, expected {want.dtype}{list(want.shape)}"
    return None


def _header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Type, shape and beginning of the numbers of an .npy file; ValueError if it is none, or not in C order."""
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not version 1.0 of the format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MAX_HEADER)
    except Exception as error:  # numpy's parser raises half a dozen kinds
        raise ValueError("no header of an array") from error
    if dtype.hasobject or (fortran and len(shape) > 1):
        raise ValueError("objects, or not in C order")
    if len(data) - file.tell() != math.prod(shape) * dtype.itemsize:
        raise ValueError("cut short, or too long")
    return dtype, shape, file.tell()


def _tensor(data: bytes, name: str) -> Tensor:
    try:
        dtype, shape, start = _header(data)
        return torch.from_numpy(np.frombuffer(data, dtype, offset=start).reshape(shape).copy())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is not an array: {error}") from error


def _npy(tensor: Tensor) -> bytes:
    return Array(_numpy(tensor)).data


def _numpy(tensor: Tensor) -> Any:
    return np.ascontiguousarray(tensor.detach().numpy()).reshape(tensor.shape)  # it makes a scalar a row


def _metrics(content: RecordDict) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for record in content.metric_records.values():
        for name, value in record.items():
            if isinstance(value, list) or len(name) > MAX_METRICS or len(metrics) >= MAX_METRICS:
                raise ValueError(f"metrics must be numbers, and at most {MAX_METRICS}")
            metrics[name] = float(value)
    return {name: value for name, value in metrics.items() if name != NORM_BIT}
