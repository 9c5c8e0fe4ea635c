"""What a reply may hold: one that holds anything else is refused with its reason."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedcir.client.calibration import BINS, PREFIX, SUMS
from fedcir.data.federation import SampleCounts
from fedcir.server.replies import NormFilter, ReplyCollector, find_evaluation_fault, find_training_fault
from fedcir.tasks.classification import to_task
from fedcir.types import ClientReply, Groups

TASK = to_task(3)
SIZES = SampleCounts(train=8, test=4, validation=2)
TEST = {"correct": 3.0, "count": 4.0, "loss": 0.5}
ASIDE = {"validation/correct": 2.0, "validation/count": 2.0, "validation/loss": 0.1}
CONFIDENCE = f"{PREFIX}confidence/0"
CALIBRATION = dict.fromkeys(SUMS, 0.0) | {SUMS[-1]: 2.0, CONFIDENCE: 2.0}


def model(variance: float = 1.0) -> Groups:
    return {"model": {"norm.running_mean": torch.tensor([-1.0]), "norm.running_var": torch.tensor([variance])}}


def trained(**metrics: Any) -> ClientReply:
    return ClientReply(
        0, 8, model(), {"flops": 1e9, **{name.replace("_", "/"): value for name, value in metrics.items()}}
    )


def test_what_an_honest_client_tells_is_taken() -> None:
    assert find_training_fault(trained(loss_ce=0.5, loss_align=-3e38), SIZES) is None
    for message in (TEST | ASIDE, TEST | ASIDE | CALIBRATION, TEST | ASIDE | {"loss": float("inf")}):
        assert find_evaluation_fault(ClientReply(0, 4, {}, message), SIZES, TASK) is None
    assert find_evaluation_fault(ClientReply(0, 4, {}, TEST), SampleCounts(8, 4, 0), TASK) is None


def test_a_variance_below_zero_is_refused_and_named() -> None:
    reply = replace(trained(), tensors=model(-1e-9))
    assert find_training_fault(reply, SIZES) == "model/norm.running_var is negative, which no variance is"


BIAS, WEIGHT = torch.zeros(3), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"model": {"biases": BIAS, "weight": WEIGHT}}, "model/bias is missing"),
        ({"model": {"bias": BIAS, "weight": WEIGHT.T}}, "model/weight is float32[4, 3], expected float32[3, 4]"),
        ({"model": {"bias": BIAS.double(), "weight": WEIGHT}}, "model/bias is float64[3], expected float32[3]"),
        ({"model": {"bias": BIAS, "weight": WEIGHT}, "images": {"x": BIAS}}, "group 'images' is not expected"),
        ({}, "group 'model' is missing"),
        ({"model": {"bias": BIAS * torch.nan, "weight": WEIGHT}}, "model/bias is not finite"),
        ({"model": {"bias": BIAS, "weight": WEIGHT - torch.inf}}, "model/weight is not finite"),
    ],
    ids=["name", "shape", "dtype", "group", "no group", "nan", "infinite"],
)
def test_tensors_other_than_those_expected_are_dropped_and_named(tensors: Groups, reason: str) -> None:
    expected = {"model": {"bias": BIAS, "weight": WEIGHT}}
    collected = ReplyCollector(1, expected, 1, {}, NormFilter(expected, ["model"], 0.0))
    replies = [replace(trained(), tensors=expected), replace(trained(), client_id=1, tensors=tensors)]
    assert [reply.client_id for reply in collected.collect(replies, [0, 1])] == [0]
    assert collected.dropped.keys() == {"1"}
    assert collected.dropped["1"].startswith(reason)
    assert collected.flops == 10**9


@pytest.mark.parametrize("number", [0, -24])
def test_a_client_that_trains_on_nothing_is_refused(number: int) -> None:
    reason = f"num_examples must be at least 1, got {number}"
    assert find_training_fault(replace(trained(), num_examples=number), None) == reason


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"correct": 3.0},
        {"loss": 0.5},
        {"correct": 5.0, "count": 4.0},
        {"correct": -1.0, "count": 4.0},
        {"correct": 0.0, "count": 0.0},
        {"correct": float("nan"), "count": 4.0},
        {"correct": 1.0, "count": float("inf")},
        {"correct": 1.0, "count": 4.0, "validation/count": 3.0},
    ],
)
def test_counts_that_make_no_sense_are_refused(metrics: dict[str, float]) -> None:
    assert find_evaluation_fault(ClientReply(0, 4, {}, metrics), None, TASK) == "its counts are invalid"


@pytest.mark.parametrize("number", [7, 9, 10**18])
def test_a_site_cannot_claim_more_images_than_it_introduced_itself_with(number: int) -> None:
    reply = replace(trained(), num_examples=number)
    assert find_training_fault(reply, SIZES) == f"num_examples is {number}, expected 8"
    assert find_training_fault(reply, None) is None  # a client on this machine, which nobody has asked


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"flops": 1e308}, "flops is 1e+308, but must be a whole number from 0 to 1e+21"),
        ({"flops": -1.0}, "flops is -1,"),
        ({"flops": 0.5}, "flops is 0.5,"),
        ({"flops": float("nan")}, "flops is nan,"),
        ({"loss/ce": 1.7e308}, "metric loss/ce is 1.7e+308, above 3.40282e+38"),
        ({"loss/ce": float("inf")}, "metric loss/ce is not finite"),
        ({"accuracy": 1.0}, "metric 'accuracy' is not expected"),
        ({"loss/\x1b[31m": 1.0}, "metric 'loss/\\x1b[31m' is not expected"),
        ({f"loss/{'x' * 60}": 1.0}, "metric 'loss/xxx"),
    ],
)
def test_a_metric_of_training_that_is_unknown_or_without_bound_is_refused(
    metrics: dict[str, float], reason: str
) -> None:
    message = find_training_fault(replace(trained(), metrics=metrics), SIZES)
    assert message is not None
    assert message.startswith(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"correct": 0.5, "count": 0.5}, "its counts are invalid"),
        ({"correct": 1.5}, "its counts are invalid"),
        ({"correct": 1e308, "count": 1e308}, "count is 1e+308, expected 4"),
        ({"count": 5.0}, "count is 5, expected 4"),
        ({"loss": 1.7e308}, "loss is 1.7e+308, but must be from 0 to"),
        ({"loss": -1.0}, "loss is -1, but must be from 0 to"),
        ({"validation/count": 3.0}, "validation/count is 3, expected 2"),
        ({"validation/correct": 0.5}, "its counts are invalid"),
        ({"flops": 1.0}, "metric 'flops' is not expected"),
        (CALIBRATION | {SUMS[-1]: 1.0}, "calibration/novelty does not count 2 images"),
        (CALIBRATION | {CONFIDENCE: 1.0}, "calibration/confidence does not count 2 images"),
        (CALIBRATION | {SUMS[-1]: 1.5, SUMS[-2]: 0.5}, "calibration/novelty does not count 2 images"),
        (CALIBRATION | {SUMS[-1]: -1.0, SUMS[-2]: 3.0}, "calibration/novelty does not count 2 images"),
        (CALIBRATION | {SUMS[0]: 1e300}, "calibration/slope or margin is out of bounds"),
        (CALIBRATION | {"calibration/margin": 1e300}, "calibration/slope or margin is out of bounds"),
        (dict.fromkeys(SUMS[:-BINS], 0.0), "calibration/novelty does not count 2 images"),
    ],
)
def test_a_test_whose_numbers_are_not_those_of_its_images_is_refused(changes: dict[str, float], reason: str) -> None:
    message = find_evaluation_fault(ClientReply(0, 4, {}, TEST | ASIDE | changes), SIZES, TASK)
    assert message is not None
    assert message.startswith(reason)


def test_validation_that_was_introduced_must_be_told_and_no_other() -> None:
    assert find_evaluation_fault(ClientReply(0, 4, {}, TEST), SIZES, TASK) == "its counts are invalid"
    assert (
        find_evaluation_fault(ClientReply(0, 4, {}, TEST | ASIDE), SampleCounts(8, 4, 0), TASK)
        == "validation/count is 2, expected 0"
    )


def test_a_reply_that_lies_is_dropped_and_counted_and_the_others_make_the_round() -> None:
    replies = [trained(loss_ce=1.0), replace(trained(loss_ce=9.0), client_id=1, num_examples=10**18)]
    collected = ReplyCollector(1, model(), 1, {0: SIZES, 1: SIZES}, NormFilter(model(), ["model"], 0.0))
    assert [reply.client_id for reply in collected.collect(replies, [0, 1])] == [0]
    assert collected.dropped == {"1": f"num_examples is {10**18}, expected 8"}
    assert collected.losses() == {"ce": 1.0}
