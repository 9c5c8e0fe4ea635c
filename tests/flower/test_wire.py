"""Groups and replies as Flower's records: bit for bit, nothing pickled, and nothing of a reply believed unchecked."""

import io
import json
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from grid import passed, run_of_flower  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from fedcir.algorithms import make_algorithm
from fedcir.config import AlgorithmConfig, Config, DataConfig, ModelConfig
from fedcir.errors import InputError
from fedcir.flower.wire import (
    NO_REPLY,
    TaskHeader,
    describe_reply_error,
    pack_reply,
    pack_task,
    unpack_reply,
    unpack_task,
)
from fedcir.types import ClientReply, DroppedReply, Groups

ORDER = TaskHeader(Config(), {2**63 + 5: 0, 7: 1}, round=3, classes=("cat", "dog"), key="0af9")
TRAINED = ("model",)
WEIGHT = "model/head.weight"


def groups() -> Groups:
    """All kinds of tensors that a method may share."""
    image = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4)
    return {
        "model": {
            "encoder.0.weight": image.contiguous(memory_format=torch.channels_last),
            "encoder.1.num_batches_tracked": torch.tensor(2**62 + 1),
            "head/odd.name/bias": torch.tensor([0.1, -0.0, 1e-45]),
            "none": torch.zeros(0, 3),
            "scalar": torch.tensor(torch.pi),
        },
        "gaussians": {"mean": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).T, "count": torch.ones(())},
        "generator": {"table": torch.arange(6).view(2, 3), "nothing": torch.empty(0)},
    }


def template() -> Groups:
    """What a reply must look like: two tensors that are trained, and one beside."""
    return {
        "model": {"head.weight": torch.zeros(2, 3), "norm.num_batches_tracked": torch.tensor(0)},
        "counts": {"labels": torch.zeros(3)},
    }


def good() -> RecordDict:
    """The content of a reply that is as it should be."""
    return pack_reply(ClientReply(0, 5, template(), {"loss/ce": 0.5}), TRAINED)


def answered(content: RecordDict | Error) -> Message:
    return passed(Message(content, reply_to=Message(RecordDict(), 7, MessageType.TRAIN)))  # type: ignore[arg-type]


def read(content: RecordDict | Error, expected: Groups | None = None) -> ClientReply | DroppedReply:
    return unpack_reply(answered(content), 4, template() if expected is None else expected, TRAINED)


def npy(array: Any, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def header(text: str) -> bytes:
    """The beginning of an .npy file with this in the place of its dictionary."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("latin1")


def claiming(shape: tuple[int, ...]) -> bytes:
    """An .npy file of eight bytes that says it has this shape."""
    return header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n") + bytes(8)


def with_weight(data: bytes) -> RecordDict:
    """A good reply, with these bytes in the place of an array."""
    content = good()
    content.array_records["arrays"][WEIGHT] = Array("float32", (2, 3), "numpy.ndarray", data)
    return content


def same(a: Groups, b: Groups) -> bool:
    """Whether names and their order, dtypes, shapes and all bits are the same."""
    return [(group, list(bag)) for group, bag in a.items()] == [(group, list(bag)) for group, bag in b.items()] and all(
        a[group][name].dtype == tensor.dtype
        and a[group][name].shape == tensor.shape
        and a[group][name].numpy().tobytes() == tensor.numpy().tobytes()
        for group, bag in b.items()
        for name, tensor in bag.items()
    )


def sent(content: RecordDict) -> RecordDict:
    return passed(Message(content, 7, MessageType.TRAIN)).content


@pytest.mark.parametrize("trained", [("model",), ("model", "gaussians"), ()])
def test_groups_reach_a_client_bit_for_bit(trained: tuple[str, ...]) -> None:
    received, order = unpack_task(sent(pack_task(groups(), trained, ORDER)))
    assert same({name: received[name] for name in groups()}, groups())
    assert order == replace(ORDER, groups=tuple(groups()))


@pytest.mark.parametrize("trained", [("model",), ("model", "gaussians"), ()])
def test_a_reply_reaches_the_server_bit_for_bit(trained: tuple[str, ...]) -> None:
    message = answered(pack_reply(ClientReply(0, 41, groups(), {"loss/ce": 0.1, "flops": 3e12}), trained))
    reply = unpack_reply(message, 2, groups(), trained)
    assert isinstance(reply, ClientReply)
    assert same({name: reply.tensors[name] for name in groups()}, groups())
    assert (reply.client_id, reply.num_examples, reply.metrics) == (2, 41, {"loss/ce": 0.1, "flops": 3e12})


def test_a_group_without_tensors_is_not_lost() -> None:
    empty: Groups = {**template(), "extras": {}}
    received, _ = unpack_task(sent(pack_task(empty, TRAINED, ORDER)))
    reply = read(pack_reply(ClientReply(0, 5, empty, {}), TRAINED), empty)
    assert isinstance(reply, ClientReply)
    assert received["extras"] == reply.tensors["extras"] == {}


def test_what_is_trained_has_the_same_keys_in_both_directions_and_the_rest_lies_in_the_config_as_bytes() -> None:
    down = sent(pack_task(groups(), TRAINED, ORDER))
    up = answered(pack_reply(ClientReply(0, 5, groups(), {}), TRAINED)).content
    trained = [f"model/{name}" for name in groups()["model"]]
    beside = ["gaussians/mean", "gaussians/count", "generator/table", "generator/nothing"]
    for content in (down, up):
        assert list(content.array_records["arrays"]) == trained
        assert [name for name, value in content.config_records["config"].items() if isinstance(value, bytes)] == beside
    assert [len(down.array_records), len(down.config_records), len(down.metric_records)] == [1, 1, 0]
    assert [len(up.array_records), len(up.config_records), len(up.metric_records)] == [1, 1, 1]
    assert list(down.config_records["config"]) == ["fedcir", *beside]
    assert dict(up.metric_records["metrics"]) == {"num-examples": 5}


def test_a_method_that_trains_its_model_only_has_no_config_in_its_reply() -> None:
    content = pack_reply(ClientReply(0, 5, {"model": groups()["model"]}, {}), make_algorithm(AlgorithmConfig()).trains)
    assert set(content) == {"arrays", "metrics"}


def test_an_evaluation_holds_metrics_only() -> None:
    content = pack_reply(ClientReply(0, 5, {}, {"correct": 3.0, "count": 5.0}), TRAINED)
    assert set(content) == {"metrics"}
    assert read(content, {}) == ClientReply(4, 5, {}, {"correct": 3.0, "count": 5.0})


def test_what_others_say_in_the_config_travels_and_is_not_written_to() -> None:
    config = ConfigRecord({"server-round": 3, "noise": 0.5, "names": ["a", "b"]})
    content = sent(pack_task(groups(), TRAINED, ORDER, config))
    assert set(config) == {"server-round", "noise", "names"}
    assert {name: content.config_records["config"][name] for name in config} == dict(config)
    assert same(unpack_task(content)[0], groups())


def test_bytes_that_others_put_into_the_config_are_not_taken_for_a_tensor() -> None:
    content = sent(pack_task(groups(), TRAINED, ORDER, ConfigRecord({"salt": b"\x00\x01"})))
    assert same(unpack_task(content)[0], groups())


def rename(content: RecordDict) -> None:
    arrays = content.array_records["arrays"]
    arrays["model/head.weights"] = arrays.pop(WEIGHT)


def lose(content: RecordDict) -> None:
    del content.config_records["config"]["counts/labels"]


def add(content: RecordDict) -> None:
    content.array_records["arrays"]["model/zebra"] = Array(np.zeros(2))


def add_bytes(content: RecordDict) -> None:
    content.config_records["config"]["zebra"] = bytes(10)


def transpose(content: RecordDict) -> None:
    content.array_records["arrays"][WEIGHT] = Array(np.zeros((3, 2), np.float32))


def widen(content: RecordDict) -> None:
    content.array_records["arrays"][WEIGHT] = Array(np.zeros((2, 3)))


def swap_bytes(content: RecordDict) -> None:
    content.array_records["arrays"][WEIGHT] = Array(np.zeros((2, 3), ">f4"))


def make_row(content: RecordDict) -> None:
    content.config_records["config"]["counts/labels"] = npy(np.zeros((1, 3), np.float32))


def repeat_as_bytes(content: RecordDict) -> None:
    content.config_records["config"][WEIGHT] = npy(np.full((2, 3), 1e4, np.float32))


def repeat_in_another_record(content: RecordDict) -> None:
    content["more"] = ArrayRecord({WEIGHT: Array(np.full((2, 3), 1e4, np.float32))})


def move(content: RecordDict) -> None:
    array = content.array_records["arrays"].pop(WEIGHT)
    content.config_records["config"][WEIGHT] = array.data


def say_more(content: RecordDict) -> None:
    content.config_records["config"]["note"] = "mine"


def write_a_number(content: RecordDict) -> None:
    content.config_records["config"]["counts/labels"] = 7


def measure_twice(content: RecordDict) -> None:
    content["others"] = MetricRecord({"num-examples": 10**9})


def empty(content: RecordDict) -> None:
    for name in list(content):
        del content[name]


FAULTS: dict[Callable[[RecordDict], None], str] = {
    rename: "model/head.weight is missing",
    lose: "counts/labels is missing",
    add: "'model/zebra' is not expected",
    add_bytes: "'zebra' is not expected",
    transpose: "model/head.weight is float32[3, 2], expected float32[2, 3]",
    widen: "model/head.weight is float64[2, 3], expected float32[2, 3]",
    swap_bytes: "model/head.weight is >f4[2, 3], expected float32[2, 3]",
    make_row: "counts/labels is float32[1, 3], expected float32[3]",
    repeat_as_bytes: "'model/head.weight' is there twice",
    repeat_in_another_record: "its record 'more' is not expected",
    move: "model/head.weight is not in the record where it belongs",
    say_more: "'note' is not expected",
    write_a_number: "counts/labels is not an array",
    measure_twice: "its record 'others' is not expected",
    empty: "counts/labels is missing",
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_reply_that_is_not_as_expected_is_dropped_and_its_tensor_named(
    fault: Callable[[RecordDict], None], reason: str
) -> None:
    content = good()
    fault(content)
    assert read(content) == DroppedReply(4, reason)


WHOLE = npy(np.zeros((2, 3), np.float32))
"""Of 128 + 24 bytes."""

NOT_ARRAYS = {
    "cut short": WHOLE[:-1],
    "header cut short": WHOLE[:60],
    "one byte more": WHOLE + b"\0",
    "nothing": b"",
    "text": b"not an array at all",
    "Fortran order": npy(np.asfortranarray(np.zeros((2, 3), np.float32))),
    "objects": npy(np.array([[None] * 3] * 2), pickled=True),
    "pickled array": pickle.dumps(np.zeros((2, 3), np.float32)),
    "an archive": b"PK\x03\x04" + bytes(100),
    "version 2": b"\x93NUMPY\x02\x00" + WHOLE[8:10] + b"\0\0" + WHOLE[10:],
    "a trillion numbers": claiming((10**12,)),
    "more than any memory": claiming((2**62, 2**62)),
    "fewer than none": claiming((-1, -2)),
    "a null byte in its header": header("{'descr': '\0'}"),
    "nine hundred signs in its header": header("-" * 900 + "1"),
}


@pytest.mark.parametrize("data", NOT_ARRAYS.values(), ids=NOT_ARRAYS)
def test_bytes_that_are_not_that_array_are_dropped_and_their_tensor_named(data: bytes) -> None:
    reply = read(with_weight(data))
    assert isinstance(reply, DroppedReply)
    assert reply.reason.startswith(f"{WEIGHT} is ")
    beside = good()
    beside.config_records["config"]["counts/labels"] = data
    reply = read(beside)
    assert isinstance(reply, DroppedReply)
    assert reply.reason.startswith("counts/labels is ")


def test_an_array_of_too_many_bytes_is_dropped_whatever_its_header_says() -> None:
    assert read(with_weight(WHOLE + bytes(2000))) == DroppedReply(4, f"{WEIGHT} has 2152 bytes, expected 24")


@pytest.mark.parametrize("name", ["a trillion numbers", "more than any memory"])
def test_a_shape_that_the_bytes_do_not_bear_out_is_refused_without_memory_for_it(name: str) -> None:
    content = sent(pack_task(template(), TRAINED, ORDER))
    content.array_records["arrays"][WEIGHT] = Array("float32", (2, 3), "numpy.ndarray", NOT_ARRAYS[name])
    tracemalloc.start()
    try:
        assert isinstance(read(with_weight(NOT_ARRAYS[name])), DroppedReply)
        with pytest.raises(ValueError, match=WEIGHT):
            unpack_task(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


class Harm:
    """What a pickle may do when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_not_run_at_the_server_nor_at_a_site(tmp_path: Path) -> None:
    done = tmp_path / "done"
    objects = np.empty((2, 3), dtype=object)
    objects[:] = Harm(done)
    for data in (pickle.dumps(Harm(done)), npy(objects, pickled=True)):
        assert read(with_weight(data)) == DroppedReply(4, f"{WEIGHT} is not an array")
        content = pack_task(template(), TRAINED, ORDER)
        content.config_records["config"]["counts/labels"] = data
        with pytest.raises(ValueError, match="counts/labels is not an array"):
            unpack_task(content)
    assert not done.exists()
    pickle.loads(pickle.dumps(Harm(done)))
    assert done.exists()  # so it would have been


HEADERS = {
    "brackets that do not close": "((({",
    "an odd indent": "if x:\n   1\n 2",
    "a type that is an empty tuple": "{'descr': (), 'fortran_order': False, 'shape': (2, 3)}",
    "keys of several kinds": "{'descr': '<f4', 1: 2}",
    "a string without an end": "'''",
    "a list for a key": "{[]: 1}",
    "nested deep": "[" * 900,
}


@pytest.mark.parametrize("text", HEADERS.values(), ids=HEADERS)
def test_a_header_of_nonsense_is_dropped_and_does_not_end_the_run(text: str) -> None:
    assert read(with_weight(header(text) + bytes(24))) == DroppedReply(4, f"{WEIGHT} is not an array")


@given(st.binary(max_size=1500) | st.binary(max_size=300).map(lambda data: WHOLE[:10] + data))
def test_random_bytes_for_an_array_are_dropped_and_never_raise(data: bytes) -> None:
    reply = read(with_weight(data))
    assert isinstance(reply, DroppedReply)
    assert reply.reason.startswith(WEIGHT)


@given(st.text(st.characters(codec="ascii"), max_size=60) | st.text("{}[](),:'\"0123<f4 \n\t\\-LFalse", max_size=60))
def test_random_headers_for_an_array_are_dropped_and_never_raise(text: str) -> None:
    reply = read(with_weight(header(text)))
    assert isinstance(reply, DroppedReply)
    assert reply.reason.startswith(WEIGHT)


def with_metrics(metrics: dict[str, Any]) -> RecordDict:
    content = good()
    content["metrics"] = MetricRecord(metrics)
    return content


METRICS = {
    "a list": ({"num-examples": 5, "loss/ce": [0.5, 0.25]}, "metrics"),
    "more than a hundred": ({"num-examples": 5, **{f"m{number}": 1.0 for number in range(100)}}, "metrics"),
    "a name without end": ({"num-examples": 5, "m" * 101: 1.0}, "metrics"),
    "no num-examples": ({"loss/ce": 0.5}, "num-examples"),
    "num-examples is not a number": ({"num-examples": float("nan")}, "num-examples"),
    "num-examples is infinite": ({"num-examples": float("inf")}, "num-examples"),
}


@pytest.mark.parametrize(("metrics", "word"), METRICS.values(), ids=METRICS)
def test_a_reply_with_metrics_that_make_no_sense_is_dropped(metrics: dict[str, Any], word: str) -> None:
    assert isinstance(read(with_metrics(metrics)), DroppedReply)


@pytest.mark.parametrize(("metrics", "word"), METRICS.values(), ids=METRICS)
def test_the_reason_names_what_is_wrong_with_metrics(metrics: dict[str, Any], word: str) -> None:
    reply = read(with_metrics(metrics))
    assert isinstance(reply, DroppedReply)
    assert word in reply.reason


def test_a_hundred_metrics_are_taken() -> None:
    reply = read(with_metrics({"num-examples": 5, **{f"m{number}": 1 for number in range(99)}}))
    assert isinstance(reply, ClientReply)
    assert len(reply.metrics) == 99


def test_a_reply_without_any_record_is_dropped() -> None:
    assert read(RecordDict()) == DroppedReply(4, "counts/labels is missing")
    assert isinstance(read(RecordDict(), {}), DroppedReply)


def test_an_evaluation_that_sends_arrays_is_dropped() -> None:
    assert read(good(), {}) == DroppedReply(4, "'counts/labels' is not expected")


def test_an_error_is_dropped_with_its_reason_in_one_line_of_200_letters() -> None:
    assert read(Error(2, "out\n  of\tmemory ")) == DroppedReply(4, "out of memory")
    assert len(describe_reply_error(answered(Error(2, "x" * 1000)))) == 200


@pytest.mark.parametrize(
    "code", [ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE]
)
def test_what_flower_says_of_a_node_that_is_gone_or_late_is_told_as_no_reply(code: int) -> None:
    assert read(Error(code, "Error: Node Unavailable - The destination node failed to report")) == DroppedReply(
        4, NO_REPLY
    )


def test_an_error_that_gives_no_reason_is_told_by_its_code() -> None:
    reply = read(Error(1007))
    assert isinstance(reply, DroppedReply)
    assert "1007" in reply.reason


def test_the_order_of_names_does_not_matter_and_that_of_the_template_is_kept() -> None:
    content = good()
    arrays = content.array_records["arrays"]
    content["arrays"] = ArrayRecord(dict(reversed(arrays.items())))
    reply = read(content)
    assert isinstance(reply, ClientReply)
    assert same(reply.tensors, template())


def test_tensors_that_were_received_can_be_written_to() -> None:
    received, _ = unpack_task(sent(pack_task(template(), TRAINED, ORDER)))
    received["model"]["head.weight"] += 1  # memory that is read-only would warn, and a warning is an error
    assert received["model"]["head.weight"].sum() == 6


def test_an_order_goes_to_json_and_back() -> None:
    fields = {"lambda_reg": 0.25}
    config = Config(data=DataConfig(classes=("a", "b")), algorithm=AlgorithmConfig("fedcir", fields))
    order = replace(ORDER, config=config)
    assert TaskHeader.from_json(order.to_json()) == order
    assert json.loads(order.to_json())["format"] == 3


def test_the_weights_to_start_from_never_travel() -> None:
    order = replace(ORDER, config=Config(model=ModelConfig(weights="/home/ada/secret.safetensors", width=8)))
    assert "secret" not in order.to_json()
    assert TaskHeader.from_json(order.to_json()).config.model == ModelConfig(width=8)
    content = sent(pack_task(template(), TRAINED, order))
    assert "secret" not in str(content.config_records["config"]["fedcir"])


def test_no_message_names_a_file_of_weights_at_a_site() -> None:
    values = json.loads(ORDER.to_json())
    values["config"]["model"]["weights"] = "/home/site/model.pth"
    assert TaskHeader.from_json(json.dumps(values)).config.model.weights is None


def test_an_order_of_another_format_is_refused_and_both_are_named() -> None:
    values = json.loads(ORDER.to_json())
    with pytest.raises(InputError, match="format 4 and the site 3: install the same fedcir"):
        TaskHeader.from_json(json.dumps({**values, "format": 4}))
    del values["format"]
    with pytest.raises(InputError, match="format None and the site 3"):
        TaskHeader.from_json(json.dumps(values))


@pytest.mark.parametrize("key", ["../x", "/tmp", "a/b", "0AF9", "0x1f", "a\n", "g"])
def test_a_key_that_is_not_hexadecimal_is_refused_since_it_names_a_folder(key: str) -> None:
    values = {**json.loads(ORDER.to_json()), "key": key}
    with pytest.raises(InputError, match="the run's key must be hexadecimal, got"):
        TaskHeader.from_json(json.dumps(values))
