"""Tensor groups and replies to and from Flower's records. Nothing is pickled, and nothing is loaded unchecked.

A message holds one ArrayRecord, with the groups that clients train under the same names in both directions; one
ConfigRecord; and in a reply one MetricRecord, as Flower's own mods expect. What an algorithm shares or sends besides
(Gaussians, prototypes, a generator) is in the ConfigRecord, each array as the bytes of an .npy file, which is also
Flower's format of an array. A reply holds each tensor once, in its own record, and no other record: what a mod of
Flower's clips is what the server averages.
"""

import io
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from torch import Tensor

from fedcir.client.client_requests import RequestKind
from fedcir.config import Config, config_from_tables, config_to_tables
from fedcir.errors import InputError
from fedcir.flower.flwr_adapter import LATE_CODES
from fedcir.models.hugging_face import find_folder, hash_folder
from fedcir.text import to_one_line
from fedcir.types import ClientReply, DroppedReply, Groups, Tensors

FORMAT = 3
ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
TESTS, FAULTS = "tests", "faults"
"""Records of a combined reply besides: metrics of the evaluation, and errors."""
HEADER = "fedcir"
NUM_EXAMPLES = "num-examples"
MAX_NPY_HEADER = 1000
"""Bytes of an .npy file besides its numbers."""
MAX_METRICS = 100
MAX_LINE = 200
NO_REPLY = "no reply in time"
WRONG_SENDER = "another node has answered in its place"


@dataclass(frozen=True)
class TaskHeader:
    """Header of a message to a client; the same for all clients."""

    config: Config
    clients: Mapping[int, int]
    """Client number by Flower's node id."""
    round: int = 0
    classes: tuple[str, ...] = ()
    key: str = ""
    """Name of the run's folder at a site, hexadecimal."""
    groups: tuple[str, ...] = ()
    """Groups of the message; an empty group has no tensor that names it."""
    tests: tuple[int, ...] = ()
    """Clients that evaluate the model they receive, the result of the round before, and then train on it."""
    frozen: str = ""
    """Hash of the frozen tensors of the network, which a site must have too; empty if there are none."""
    agreed: Mapping[str, Any] = field(default_factory=dict)
    """Card of the task and of the encoding of tables that all sites have agreed on; empty for classes of images."""
    encoder: str = ""
    """Hash of the encoder's folder, of which every site has a copy; empty for other encoders."""

    def to_json(self) -> str:
        tables = config_to_tables(self.config)
        tables["model"].pop("weights", None)  # they come with the message
        if tables["algorithm"]["name"].endswith(".py"):
            tables["algorithm"]["name"] = Path(tables["algorithm"]["name"]).name
        if self.config.model.file is not None:
            tables["model"]["name"] = Path(tables["model"]["name"]).name
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if (folder := find_folder(self.config.model)) is not None:
            values["encoder"] = hash_folder(folder)
        return json.dumps({"format": FORMAT, **values, "config": tables})

    @classmethod
    def from_json(cls, text: str) -> "TaskHeader":
        values = json.loads(text)
        if values.get("format") != FORMAT:
            message = f"the server uses format {values.get('format')} and the site {FORMAT}: install the same fedcir"
            raise InputError(message, public=message)
        clients = {int(node): int(number) for node, number in values["clients"].items()}
        key = str(values["key"])
        if not all(letter in "0123456789abcdef" for letter in key):  # it names a folder
            raise InputError(f"the run's key must be hexadecimal, got {key!r}")
        values["config"].get("model", {}).pop("weights", None)  # a server names no file of a site
        classes, groups, tests = (tuple(values[name]) for name in ("classes", "groups", "tests"))
        config, agreed = config_from_tables(values["config"]), dict(values.get("agreed", {}))
        frozen, encoder = (str(values.get(name, "")) for name in ("frozen", "encoder"))
        return cls(config, clients, int(values["round"]), classes, key, groups, tests, frozen, agreed, encoder)


def pack_task(
    groups: Groups, trained: Iterable[str], header: TaskHeader, config: Mapping[str, Any] | None = None
) -> RecordDict:
    """Pack a message to a client; `config` holds the values of others, such as Flower's mods."""
    header = replace(header, groups=tuple(groups))
    record = ConfigRecord({**(config or {}), HEADER: header.to_json(), **_pack_others(groups, trained)})
    return RecordDict({ARRAYS: pack_arrays(groups, trained), CONFIG: record})


def unpack_header(content: RecordDict) -> TaskHeader:
    return TaskHeader.from_json(str(content.config_records[CONFIG][HEADER]))


def unpack_task(content: RecordDict) -> tuple[Groups, TaskHeader]:
    """Unpack a message to a client."""
    record, header = content.config_records[CONFIG], unpack_header(content)
    named = {name: _load_tensor(array.data, name) for name, array in content.array_records[ARRAYS].items()}
    for name, value in record.items():
        if isinstance(value, bytes) and name.partition("/")[0] in header.groups:
            named[name] = _load_tensor(value, name)
    return _group_tensors(named, header.groups), header


def pack_reply(reply: ClientReply, trained: Iterable[str]) -> RecordDict:
    content = RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: reply.num_examples, **reply.metrics})})
    trained = [group for group in trained if group in reply.tensors]
    if reply.tensors:
        content[ARRAYS] = pack_arrays(reply.tensors, trained)
    if untrained := _pack_others(reply.tensors, trained):
        content[CONFIG] = ConfigRecord({**untrained})
    return content


def pack_combined(tested: RecordDict | Error, trained: RecordDict | Error) -> RecordDict:
    """Pack the replies to a message that asks to evaluate and to train; an error of one does not affect the other."""
    content = RecordDict() if isinstance(trained, Error) else trained
    if not isinstance(tested, Error):
        content[TESTS] = tested.metric_records[METRICS]
    parts = {"evaluate": tested, "train": trained}
    if faults := {name: part.reason or "" for name, part in parts.items() if isinstance(part, Error)}:
        content[FAULTS] = ConfigRecord({**faults})
    return content


def unpack_reply(
    message: Message,
    client: int,
    template: Groups,
    trained: Iterable[str],
    part: RequestKind | None = None,
    most_metrics: int = MAX_METRICS,
) -> ClientReply | DroppedReply:
    """Unpack a client's reply if it matches the template; no tensor is loaded before that is checked.

    Of a combined reply, `part` names the one that is wanted.
    """
    if message.has_error():
        return DroppedReply(client, describe_reply_error(message))
    content = message.content if part is None else _select_part(message.content, part)
    if isinstance(content, str):
        return DroppedReply(client, to_one_line(content, MAX_LINE))
    try:
        expected = {f"{group}/{name}": tensor for group, bag in template.items() for name, tensor in bag.items()}
        arrays = {name: array.data for name, array in content.array_records.get(ARRAYS, ArrayRecord()).items()}
        config = content.config_records.get(CONFIG, ConfigRecord())
        untrained = {name: value if isinstance(value, bytes) else b"" for name, value in config.items()}
        data, repeated = {**arrays, **untrained}, sorted(arrays.keys() & untrained.keys())
        fault = f"{repeated[0][:100]!r} is there twice" if repeated else _find_fault(data, expected)
        if fault := fault or _find_misplaced(content, arrays, expected, trained):
            return DroppedReply(client, fault)
        named = {name: _load_tensor(data[name], name) for name in expected}
        metrics = _read_metrics(content, most_metrics)
        num_examples = metrics.pop(NUM_EXAMPLES, math.nan)
        if not num_examples.is_integer():
            return DroppedReply(client, f"{NUM_EXAMPLES} is missing, or not a whole number")
        return ClientReply(client, int(num_examples), _group_tensors(named, template), metrics)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        return DroppedReply(client, f"its reply cannot be read: {to_one_line(error, MAX_LINE)}")


def describe_reply_error(message: Message) -> str:
    """Return why a node could not reply, in one line."""
    if message.error.code in LATE_CODES:
        return NO_REPLY
    return to_one_line(message.error.reason or f"error {message.error.code} without a reason", MAX_LINE)


def make_message(content: RecordDict, node: int, kind: str, round: int = 0, ttl: float | None = None) -> Message:
    """Make a message with a secret group id that only its receiver can repeat: Flower does not verify senders."""
    return Message(content, node, kind, ttl=ttl, group_id=f"{round}-{secrets.token_hex(16)}")


def is_reply_to(reply: Message, request: Metadata) -> bool:
    """Tell whether the receiver of a request sent the reply, or Flower reports an error in its place."""
    sent = reply.metadata
    return reply.has_error() or (sent.src_node_id, sent.group_id) == (request.dst_node_id, request.group_id)


def pack_arrays(groups: Groups, trained: Iterable[str]) -> ArrayRecord:
    """Pack the trained groups as one record, `group/name`."""
    return ArrayRecord({f"{g}/{n}": Array(_to_numpy(tensor)) for g in trained for n, tensor in groups[g].items()})


def unpack_arrays(record: ArrayRecord) -> Groups:
    return _group_tensors({name: _load_tensor(array.data, name) for name, array in record.items()})


def _select_part(content: RecordDict, part: RequestKind) -> RecordDict | str:
    """Return one part of a combined reply, or its error."""
    faults = content.config_records.get(FAULTS, ConfigRecord())
    if part in faults:
        return str(faults[part])
    if part == "evaluate":
        return RecordDict({METRICS: content.metric_records.get(TESTS, MetricRecord())})
    return RecordDict({name: record for name, record in content.items() if name not in (TESTS, FAULTS)})


def _pack_others(groups: Groups, trained: Iterable[str]) -> dict[str, bytes]:
    """Pack the groups that are not trained, as .npy files by name."""
    untrained = {group: bag for group, bag in groups.items() if group not in set(trained)}
    return {f"{g}/{n}": Array(_to_numpy(tensor)).data for g, bag in untrained.items() for n, tensor in bag.items()}


def _group_tensors(named: Tensors, names: Iterable[str] = ()) -> Groups:
    groups: Groups = {name: {} for name in names}
    for full_name, tensor in named.items():
        group, _, name = full_name.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def _find_fault(sent: Mapping[str, bytes], expected: Tensors) -> str | None:
    """Return the first way in which arrays differ in name, type, shape or size from what is expected."""
    for name in sorted(sent.keys() | expected.keys()):
        if name not in expected:
            return f"{name[:100]!r} is not expected"
        if name not in sent:
            return f"{name} is missing"
        array = _to_numpy(expected[name])
        if len(sent[name]) > array.nbytes + MAX_NPY_HEADER:
            return f"{name} has {len(sent[name])} bytes, expected {array.nbytes}"
        try:
            received = _view_array(sent[name])
        except ValueError:
            return f"{name} is not an array"
        if received.dtype != array.dtype or received.shape != array.shape:
            return f"{name} is {received.dtype}{list(received.shape)}, expected {array.dtype}{list(array.shape)}"
    return None


def _find_misplaced(
    content: RecordDict, arrays: Iterable[str], expected: Tensors, trained: Iterable[str]
) -> str | None:
    """Return what is wrong if a record is unknown, or a tensor is in the wrong record."""
    kinds = {ARRAYS: ArrayRecord, CONFIG: ConfigRecord, METRICS: MetricRecord}
    for name, record in content.items():
        if not isinstance(record, kinds.get(name, ())):
            return f"its record {name[:100]!r} is not expected"
    groups = set(trained)
    misplaced = sorted({name for name in expected if name.partition("/")[0] in groups} ^ {*arrays})
    return f"{misplaced[0]} is not in the record where it belongs" if misplaced else None


def _view_array(data: bytes) -> np.ndarray[Any, Any]:
    """Return the numbers of an .npy file in C order, without copying them, or raise ValueError."""
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not version 1.0 of the format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MAX_NPY_HEADER)
        if dtype.hasobject or (fortran and len(shape) > 1):
            raise ValueError("objects, or not in C order")
        if len(data) - file.tell() != math.prod(shape) * dtype.itemsize:
            raise ValueError("cut short, or too long")
        return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)
    except Exception as error:  # numpy's parser raises half a dozen kinds
        raise ValueError(f"no array: {error}") from error


def _load_tensor(data: bytes, name: str) -> Tensor:
    try:
        return torch.from_numpy(_view_array(data).copy())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is not an array: {error}") from error


def _to_numpy(tensor: Tensor) -> Any:
    return np.ascontiguousarray(tensor.detach().numpy()).reshape(tensor.shape)  # it makes a scalar a row


def _read_metrics(content: RecordDict, most: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for record in content.metric_records.values():
        for name, value in record.items():
            if isinstance(value, list) or len(name) > MAX_METRICS or len(metrics) >= most:
                raise ValueError(f"metrics must be numbers, and at most {most}")
            metrics[name] = float(value)
    return metrics
