"""Aggregation rules, by hand and against numpy."""

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from fedcir.algorithms.fedavg import FedAvg
from fedcir.algorithms.fedcir import FedCiR
from fedcir.config import ServerConfig, config_from_tables
from fedcir.conformance import check_aggregator
from fedcir.errors import InputError, RunError
from fedcir.models.tensors import RunningMean
from fedcir.server import aggregation
from fedcir.server.aggregation import RULES, Krum, NormClip, TrimmedMean, find_aggregator
from fedcir.types import Aggregator, ClientReply, ServerContext, Tensors

CONTEXT = ServerContext(1, 1, 3, 8, "uniform", "average", torch.Generator(), clients=5)
ROBUST = list(RULES)[1:]


def line(*values: float) -> list[Tensors]:
    return [{"w": torch.tensor([value])} for value in values]


def made(form: Aggregator, bags: list[Tensors]) -> Tensors:
    for bag in bags:
        form.add(bag, 1.0)
    return form.value()


def random_bags(count: int, seed: int = 0) -> list[Tensors]:
    rng = np.random.default_rng(seed)
    return [
        {
            "w": torch.from_numpy(rng.normal(size=(3, 5)).astype(np.float32)),
            "norm.running_var": torch.from_numpy(rng.random(4).astype(np.float32)),
            "norm.num_batches_tracked": torch.tensor(int(rng.integers(100))),
        }
        for _ in range(count)
    ]


ZERO = {name: torch.zeros_like(tensor) for name, tensor in random_bags(1)[0].items()}


def form_of(name: str, sent: Tensors = ZERO) -> Aggregator:
    return find_aggregator(name)(sent, ServerConfig())


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_is_numpys_in_every_coordinate(count: int) -> None:
    bags = random_bags(count)
    got = made(form_of("median"), bags)
    for name in ("w", "norm.running_var"):
        want = np.median(np.stack([bag[name].numpy() for bag in bags]).astype(np.float64), 0)
        np.testing.assert_array_equal(got[name].numpy(), want.astype(np.float32))


def test_the_trimmed_mean_leaves_out_a_share_at_each_end() -> None:
    values = line(-1e9, 1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 1e9)
    assert made(TrimmedMean({}, ServerConfig(trim=0.25)), values)["w"].tolist() == [
        4.5
    ]  # two at each end: (2 + 3 + 6 + 7) / 4
    assert made(TrimmedMean({}, ServerConfig(trim=0.1)), values)["w"].tolist() == [
        4.5
    ]  # rounded up, or 0.8 clients would be none: 27 / 6
    assert made(TrimmedMean({}, ServerConfig(trim=0.49)), values[1:3])["w"].tolist() == [1.5]  # of two, none can go


def test_krum_takes_the_update_with_the_nearest_neighbours() -> None:
    # With one bad of five, the two nearest count: 0 has 1 + 2.25, 1 has 0.25 + 1, 1.5 has 0.25 + 2.25, 3 has 2.25 + 4.
    form = Krum({"w": torch.zeros(1)}, ServerConfig(byzantine=1))
    assert made(form, line(0.0, 1.0, 1.5, 3.0, 100.0))["w"].tolist() == [1.0]
    assert form.chosen == 1


def test_krum_is_not_confused_by_a_huge_update() -> None:
    sent = {"w": torch.tensor([5.0])}
    assert made(Krum(sent, ServerConfig(byzantine=1)), line(1e30, 5.0, 5.25, 6.0, 9.0))["w"].tolist() == [5.25]


def test_krum_goes_by_weights_and_takes_the_statistics_with_them() -> None:
    bags = [
        {**bag, "n.running_mean": torch.tensor([10.0 * at])} for at, bag in enumerate(line(7.0, 1.0, 1.1, 1.2, 9.0))
    ]
    got = made(Krum({"w": torch.zeros(1)}, ServerConfig(byzantine=1)), bags)
    assert (got["w"].item(), got["n.running_mean"].item()) == (pytest.approx(1.1), 20.0)


def test_krum_refuses_fewer_than_two_f_and_three_replies() -> None:
    with pytest.raises(RunError, match="krum needs 5 replies where 1 may be bad, but 4 are usable"):
        made(Krum({"w": torch.zeros(1)}, ServerConfig(byzantine=1)), line(1.0, 2.0, 3.0, 4.0))


def test_norm_clip_shortens_updates_to_the_median() -> None:
    sent = {"w": torch.tensor([1.0, 1.0])}
    bags = [{"w": torch.tensor(w)} for w in ([1.0, 2.0], [4.0, 5.0], [31.0, 41.0])]  # lengths 1, 5 and 50
    # The last becomes (1, 1) + (30, 40) / 10 = (4, 5).
    assert made(NormClip(sent, ServerConfig()), bags)["w"].tolist() == [3.0, 4.0]


def test_norm_clip_takes_a_limit_and_weights() -> None:
    form = NormClip({"w": torch.zeros(1), "running_var": torch.zeros(1)}, ServerConfig(clip=2.0))
    form.add({"w": torch.tensor([1.0]), "running_var": torch.tensor([4.0])}, 3.0)
    form.add({"w": torch.tensor([-8.0]), "running_var": torch.tensor([4.0])}, 1.0)
    got = form.value()
    assert got["w"].tolist() == [0.25]  # (3 * 1 - 2) / 4
    assert got["running_var"].tolist() == [3.25]  # statistics by the same quarter: (3 * 4 + 1) / 4


@pytest.mark.parametrize("name", RULES)
def test_equal_bags_give_that_bag_to_the_bit(name: str) -> None:
    bag = random_bags(1)[0]
    got = made(form_of(name), [bag] * 5)
    assert all(torch.equal(got[key], bag[key]) and got[key].dtype == bag[key].dtype for key in bag)


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_clients_changes_nothing(name: str) -> None:
    bags = random_bags(4)
    results = [made(form_of(name), list(order)) for order in itertools.permutations(bags)]
    for key in bags[0]:
        assert all(torch.allclose(results[0][key].double(), item[key].double(), rtol=1e-6) for item in results)


@pytest.mark.parametrize("name", ROBUST)
def test_one_bad_client_of_five_cannot_move_it_out_of_the_others_range(name: str) -> None:
    good, bad = random_bags(4), random_bags(1, seed=1)[0]
    bad = {**bad, "w": bad["w"] * 1e20}
    got = made(form_of(name), [bad, *good])["w"]
    assert got.abs().max() <= 2 * max(bag["w"].abs().max() for bag in good)
    assert made(RunningMean(), [bad, *good])["w"].abs().max() > 1e18


@pytest.mark.parametrize("name", RULES)
def test_variances_stay_above_zero_and_counters_stay_counters(name: str) -> None:
    bags = random_bags(5)
    got = made(form_of(name), bags)
    assert (got["norm.running_var"] >= 0).all()
    assert got["norm.num_batches_tracked"].dtype == torch.int64
    assert int(got["norm.num_batches_tracked"]) in {int(bag["norm.num_batches_tracked"]) for bag in bags}


@pytest.mark.parametrize("name", ROBUST)
def test_replies_on_disk_and_in_pieces_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bags = random_bags(5)
    want = made(form_of(name), bags)
    monkeypatch.setattr(aggregation, "MAX_MEMORY", 100)
    monkeypatch.setattr(aggregation, "CHUNK", 15)
    got = made(form_of(name), bags)
    assert all(torch.equal(got[key], want[key]) for key in want)


def replies_of(*weights: float) -> list[ClientReply]:
    return [
        ClientReply(at, 10, {"model": {"head.weight": torch.tensor([[w]]), "head.bias": torch.tensor([w])}}, {})
        for at, w in enumerate(weights)
    ]


def test_the_reply_that_krum_chooses_stands_for_all() -> None:
    sent = {"model": {"head.weight": torch.zeros(1, 1), "head.bias": torch.zeros(1)}}
    ctx = replace(CONTEXT, make_aggregator=partial(Krum, settings=ServerConfig(byzantine=1)), broadcast=sent)
    merged, kept = FedCiR().merge(replies_of(0.0, 1.0, 1.5, 3.0, 100.0), ctx, lambda reply: reply.client_id)
    assert merged["model"]["head.bias"].tolist() == [1.0]
    assert kept == [1] * 5


def test_the_mean_weighs_by_samples_and_keeps_what_each_client_sent() -> None:
    replies = [replace(reply, num_examples=n) for reply, n in zip(replies_of(1.0, 5.0), (30, 10), strict=True)]
    merged, kept = FedAvg().merge(replies, replace(CONTEXT, weighting="samples"), lambda reply: reply.client_id)
    assert merged["model"]["head.bias"].tolist() == [2.0]
    assert kept == [0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server": {"trim": 0.5}}, "server.trim must be below 0.5, got 0.5"),
        ({"server": {"byzantine": -1}}, "server.byzantine must be at least 0, got -1"),
        ({"server": {"clip": 0.0}}, "server.clip must be a number above 0"),
        ({"server": {"max_update": 0.5}}, "server.max_update must be a number above 1, or 0 for no limit, got 0.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_tables(settings)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_the_guarantees(name: str) -> None:
    check_aggregator(find_aggregator(name))


class ChangesReplies(RunningMean):
    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        tensors["w"] += 1
        super().add(tensors, weight)


class ForgetsTensors(RunningMean):
    def value(self) -> Tensors:
        return {"w": super().value()["w"]}


class Doubles(RunningMean):
    def value(self) -> Tensors:
        return {name: 2 * tensor for name, tensor in super().value().items()}


class SharesReplies(Aggregator):
    """Starts afresh with every object, but all objects add to one list."""

    replies: ClassVar[list[Tensors]] = []

    def __init__(self, broadcast: Tensors, settings: ServerConfig) -> None:
        super().__init__(broadcast, settings)
        self.replies.clear()

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        self.replies.append(tensors)

    def value(self) -> Tensors:
        return made(RunningMean(), self.replies)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SharesReplies, "objects share state"),
        (ChangesReplies, "must not change the replies"),
        (ForgetsTensors, "must have the names, dtypes and shapes"),
        (Doubles, "is not that model"),
    ],
)
def test_the_check_notices_a_broken_rule(rule: type[Aggregator], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_aggregator(rule)


def test_the_rule_of_the_docs_is_found_by_file_and_gives_the_guarantees(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-an-aggregator.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "droplongest.py").write_text(code, encoding="utf-8")
    rule = find_aggregator(str(tmp_path / "droplongest.py"))
    check_aggregator(rule)
    zero = {"w": torch.zeros(1)}
    assert made(rule(zero, ServerConfig()), line(1.0, -9.0, 2.0))["w"].tolist() == [1.5]
