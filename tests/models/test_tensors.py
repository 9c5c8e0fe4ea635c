import pytest
import torch
from torch import Tensor, nn

from fedcir.models.tensors import RunningMean, average, clone, count_bytes, find_mismatch, find_non_finite, snapshot


def bag(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values)}


def test_a_snapshot_does_not_follow_the_module() -> None:
    module = nn.Linear(2, 1)
    taken = snapshot(module)
    before = taken["weight"].clone()
    nn.init.constant_(module.weight, 7.0)
    assert torch.equal(taken["weight"], before)
    assert not taken["weight"].requires_grad


def test_a_snapshot_is_in_the_ordinary_layout() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    assert not conv.weight.is_contiguous()
    assert snapshot(conv)["weight"].is_contiguous()
    assert torch.equal(snapshot(conv)["weight"], conv.weight)


def test_a_snapshot_holds_buffers_too() -> None:
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert snapshot(nn.BatchNorm1d(3)).keys() == names


def test_a_clone_shares_no_memory() -> None:
    groups = {"model": bag(1.0, 2.0)}
    copied = clone(groups)
    copied["model"]["w"][0] = 9.0
    assert groups["model"]["w"].tolist() == [1.0, 2.0]


def test_tensor_bytes_counts_elements_by_their_size() -> None:
    groups = {
        "model": {"w": torch.zeros(2, 3), "n": torch.tensor(5)},  # 6 * 4 + 8
        "generator": {"w": torch.zeros(5, dtype=torch.float16)},  # 5 * 2
    }
    assert count_bytes(groups) == 42


def test_the_mean_is_uniform_by_default() -> None:
    assert average([bag(1.0, 4.0), bag(2.0, 6.0)])["w"].tolist() == [1.5, 5.0]


def test_the_mean_can_be_weighted() -> None:
    assert average([bag(1.0), bag(5.0)], [3.0, 1.0])["w"].tolist() == [2.0]


def test_integers_take_the_maximum() -> None:
    counters = [{"n": torch.tensor(value)} for value in (3, 20, 5)]
    result = average(counters, [1.0, 2.0, 3.0])["n"]
    assert result.item() == 20
    assert result.dtype == torch.int64


def test_the_mean_of_equal_bags_is_that_bag_bit_for_bit() -> None:
    one = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    for weights in (None, [1.0] * 7, [3.0, 1.0, 0.1, 17.0, 5.0, 2.0, 11.0]):
        assert torch.equal(average([one] * 7, weights)["w"], one["w"])


def test_the_mean_keeps_the_dtype() -> None:
    assert average([{"w": torch.ones(2, dtype=torch.float16)}] * 2)["w"].dtype == torch.float16


def test_the_mean_writes_to_none_of_its_bags() -> None:
    bags = [{"w": torch.tensor([1.0]), "n": torch.tensor(1)}, {"w": torch.tensor([3.0]), "n": torch.tensor(9)}]
    average(bags)
    assert [(b["w"].item(), b["n"].item()) for b in bags] == [(1.0, 1), (3.0, 9)]


def test_small_terms_survive_a_mean_over_many_clients() -> None:
    # In single precision 1 + 1e-8 is 1, and all the small ones would be lost.
    assert average([bag(1.0), *[bag(1e-8)] * 10_000])["w"].item() == pytest.approx(1.0001 / 10_001, rel=1e-6)


def test_the_mean_of_no_bags_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        RunningMean().value()


def test_weights_must_be_as_many_as_bags() -> None:
    with pytest.raises(ValueError, match="shorter"):
        average([bag(1.0), bag(2.0)], [1.0])


TEMPLATE = {"model": {"b": torch.zeros(2), "w": torch.zeros(2, 3)}}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "group 'model' is missing"),
        ({**TEMPLATE, "labels": bag(1.0)}, "group 'labels' is not expected"),
        ({"model": {"b": torch.zeros(2)}}, "model/w is missing"),
        ({"model": {**TEMPLATE["model"], "x": torch.zeros(1)}}, "model/x is not expected"),
        ({"model": {"b": torch.zeros(2), "w": torch.zeros(3, 2)}}, "model/w is float32[3, 2], expected float32[2, 3]"),
        ({"model": {"b": torch.zeros(2).int(), "w": torch.zeros(2, 3)}}, "model/b is int32[2], expected float32[2]"),
    ],
)
def test_a_difference_is_told_in_words(groups: dict, words: str) -> None:
    assert find_mismatch(groups, TEMPLATE) == words


def test_equal_names_shapes_and_dtypes_make_no_difference() -> None:
    assert find_mismatch({"model": {"w": torch.ones(2, 3), "b": torch.ones(2)}}, TEMPLATE) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_named(value: float) -> None:
    assert find_non_finite({"model": {"ok": torch.zeros(2), "w": torch.tensor([0.0, value])}}) == "model/w"


def test_finite_groups_and_integers_pass() -> None:
    assert find_non_finite({"model": {"w": torch.zeros(2), "n": torch.tensor(3)}}) is None
