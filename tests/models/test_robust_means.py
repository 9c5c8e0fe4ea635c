"""Robust forms of the mean, by hand and against numpy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcir.algorithms.fedavg import FedAvg
from fedcir.algorithms.fedcir import FedCiR
from fedcir.config import config_from
from fedcir.models import aggregation
from fedcir.models.aggregation import Aggregator, Krum, NormClip, TrimmedMean, aggregator
from fedcir.models.tensors import RunningMean
from fedcir.types import Arrays, ClientReply, InputError, RunError, ServerContext

CONTEXT = ServerContext(1, 1, 3, 8, "uniform", "average", torch.Generator(), clients=5)
FORMS = ("mean", "median", "trimmed-mean", "krum", "norm-clip")
ROBUST = FORMS[1:]


def line(*values: float) -> list[Arrays]:
    return [{"w": torch.tensor([value])} for value in values]


def made(form: Aggregator, bags: list[Arrays]) -> Arrays:
    for bag in bags:
        form.add(bag, 1.0)
    return form.value()


def random_bags(count: int, seed: int = 0) -> list[Arrays]:
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


def form_of(name: str, sent: Arrays = ZERO) -> Aggregator:
    return aggregator(replace(CONTEXT, aggregation=name), sent)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_is_numpys_in_every_coordinate(count: int) -> None:
    bags = random_bags(count)
    got = made(TrimmedMean(0.5), bags)
    for name in ("w", "norm.running_var"):
        want = np.median(np.stack([bag[name].numpy() for bag in bags]).astype(np.float64), 0)
        np.testing.assert_array_equal(got[name].numpy(), want.astype(np.float32))


def test_the_trimmed_mean_leaves_out_a_share_at_each_end() -> None:
    values = line(-1e9, 1.0, 2.0, 3.0, 6.0, 7.0, 8.0, 1e9)
    assert made(TrimmedMean(0.25), values)["w"].tolist() == [4.5]  # two at each end: (2 + 3 + 6 + 7) / 4
    assert made(TrimmedMean(0.1), values)["w"].tolist() == [4.5]  # rounded up, or 0.8 clients would be none: 27 / 6
    assert made(TrimmedMean(0.49), values[1:3])["w"].tolist() == [1.5]  # of two, none can go


def test_krum_takes_the_update_with_the_nearest_neighbours() -> None:
    # With one bad of five, the two nearest count: 0 has 1 + 2.25, 1 has 0.25 + 1, 1.5 has 0.25 + 2.25, 3 has 2.25 + 4.
    form = Krum(1, {"w": torch.zeros(1)})
    assert made(form, line(0.0, 1.0, 1.5, 3.0, 100.0))["w"].tolist() == [1.0]
    assert form.chosen == 1


def test_krum_is_not_confused_by_a_huge_update() -> None:
    sent = {"w": torch.tensor([5.0])}
    assert made(Krum(1, sent), line(1e30, 5.0, 5.25, 6.0, 9.0))["w"].tolist() == [5.25]


def test_krum_goes_by_weights_and_takes_the_statistics_with_them() -> None:
    bags = [
        {**bag, "n.running_mean": torch.tensor([10.0 * at])} for at, bag in enumerate(line(7.0, 1.0, 1.1, 1.2, 9.0))
    ]
    got = made(Krum(1, {"w": torch.zeros(1)}), bags)
    assert (got["w"].item(), got["n.running_mean"].item()) == (pytest.approx(1.1), 20.0)


def test_krum_refuses_fewer_than_two_f_and_three_replies() -> None:
    with pytest.raises(RunError, match="krum needs 5 replies where 1 may be bad, but 4 are usable"):
        made(Krum(1, {"w": torch.zeros(1)}), line(1.0, 2.0, 3.0, 4.0))


def test_norm_clip_shortens_updates_to_the_median() -> None:
    sent = {"w": torch.tensor([1.0, 1.0])}
    bags = [{"w": torch.tensor(w)} for w in ([1.0, 2.0], [4.0, 5.0], [31.0, 41.0])]  # lengths 1, 5 and 50
    # The last becomes (1, 1) + (30, 40) / 10 = (4, 5).
    assert made(NormClip(None, sent), bags)["w"].tolist() == [3.0, 4.0]


def test_norm_clip_takes_a_limit_and_weights() -> None:
    form = NormClip(2.0, {"w": torch.zeros(1), "running_var": torch.zeros(1)})
    form.add({"w": torch.tensor([1.0]), "running_var": torch.tensor([4.0])}, 3.0)
    form.add({"w": torch.tensor([-8.0]), "running_var": torch.tensor([4.0])}, 1.0)
    got = form.value()
    assert got["w"].tolist() == [0.25]  # (3 * 1 - 2) / 4
    assert got["running_var"].tolist() == [3.25]  # statistics by the same quarter: (3 * 4 + 1) / 4


@pytest.mark.parametrize("name", FORMS)
def test_equal_bags_give_that_bag_to_the_bit(name: str) -> None:
    bag = random_bags(1)[0]
    got = made(form_of(name), [bag] * 5)
    assert all(torch.equal(got[key], bag[key]) and got[key].dtype == bag[key].dtype for key in bag)


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_clients_changes_nothing(name: str) -> None:
    bags = random_bags(4)
    found = [made(form_of(name), list(order)) for order in itertools.permutations(bags)]
    for key in bags[0]:
        assert all(torch.allclose(found[0][key].double(), each[key].double(), rtol=1e-6) for each in found)


@pytest.mark.parametrize("name", ROBUST)
def test_one_bad_client_of_five_cannot_move_it_out_of_the_others_range(name: str) -> None:
    good, bad = random_bags(4), random_bags(1, seed=1)[0]
    bad = {**bad, "w": bad["w"] * 1e20}
    got = made(form_of(name), [bad, *good])["w"]
    assert got.abs().max() <= 2 * max(bag["w"].abs().max() for bag in good)
    assert made(RunningMean(), [bad, *good])["w"].abs().max() > 1e18


@pytest.mark.parametrize("name", FORMS)
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
    monkeypatch.setattr(aggregation, "HELD_IN_MEMORY", 100)
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
    ctx = replace(CONTEXT, aggregation="krum", byzantine=1, sent=sent)
    merged, kept = FedCiR().merge(replies_of(0.0, 1.0, 1.5, 3.0, 100.0), ctx, lambda reply: reply.client_id)
    assert merged["model"]["head.bias"].tolist() == [1.0]
    assert kept == [1] * 5


def test_the_mean_weighs_by_samples_and_keeps_what_each_client_sent() -> None:
    replies = [replace(reply, num_examples=n) for reply, n in zip(replies_of(1.0, 5.0), (30, 10), strict=True)]
    merged, kept = FedAvg().merge(replies, replace(CONTEXT, weighting="samples"), lambda reply: reply.client_id)
    assert merged["model"]["head.bias"].tolist() == [2.0]
    assert kept == [0, 1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"server": {"aggregation": "median", "weighting": "samples"}}, "one voice: set server.weighting=uniform"),
        ({"server": {"trim": 0.5}}, "server.trim must be below 0.5, got 0.5"),
        ({"server": {"byzantine": -1}}, "server.byzantine must be at least 0, got -1"),
        ({"server": {"clip": 0.0}}, "server.clip must be a number above 0"),
        ({"server": {"max_update": 0.5}}, "server.max_update must be a number above 1, or 0 for no limit, got 0.5"),
        ({"server": {"aggregation": "middle"}}, "server.aggregation cannot be 'middle'"),
        ({"server": {"aggregation": "median"}, "model": {"batchnorm": "pooled"}}, "set model.batchnorm=average"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, dict[str, object]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        config_from(settings)
