"""Pairwise masks: they cancel in the total, and a single message is uniformly distributed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcir.client.masks import (
    add_masked,
    add_words,
    draw_mask,
    from_words,
    make_mask_key,
    mask_sums,
    negate_words,
    pack_keys,
    to_words,
)
from fedcir.errors import InputError
from fedcir.models.closed_form import add_sums, gram_sums
from fedcir.types import Groups

PRIVATE = {client: make_mask_key(bytes([client + 1] * 32)) for client in (0, 3, 7)}
KEYS = {client: key.public_key().public_bytes_raw() for client, key in PRIVATE.items()}


def sums_of(seed: int, validation: bool = False) -> Groups:
    rng = torch.Generator().manual_seed(seed)
    parts = {"train": 30, "validation": 7} if validation else {"train": 30}
    bag = {}
    for part, count in parts.items():
        z, labels = 100 * torch.randn(count, 4, generator=rng), torch.randint(2, (count,), generator=rng)
        bag |= {f"{part}_{name}": tensor for name, tensor in gram_sums([(z, labels)], 4, 2).items()}
    return {"sums": bag}


def mask(groups: Groups, client: int, context: bytes = b"run") -> Groups:
    return mask_sums(groups, client, PRIVATE[client], pack_keys(KEYS), context)


@pytest.mark.parametrize("validation", [False, True])
def test_the_masks_cancel_in_the_total(validation: bool) -> None:
    plain = {client: sums_of(client, validation) for client in KEYS}
    total = add_masked([mask(groups, client) for client, groups in plain.items()])
    for part in ("train", "validation") if validation else ("train",):
        expected = {name: torch.zeros_like(plain[0]["sums"][f"{part}_high"]) for name in ("high", "low")}
        for groups in plain.values():
            expected = add_sums(expected, {name: groups["sums"][f"{part}_{name}"] for name in ("high", "low")})
        for name, tensor in expected.items():
            assert torch.equal(total["sums"][f"{part}_{name}"], tensor), "the same integers in the same form"


@given(st.lists(st.integers(-(2**100), 2**100), min_size=1, max_size=5), st.integers(-(2**100), 2**100))
def test_integers_are_added_and_negated_modulo_2_128(values: list[int], other: int) -> None:
    def split(integers: list[int]) -> np.ndarray:
        words = [[value % 2**128 >> 64, value % 2**64] for value in integers]
        return np.array(words, np.uint64).T

    one, two = split(values), split([other] * len(values))
    added, negated = add_words(one, two), negate_words(one)
    assert [int(h) * 2**64 + int(low) for h, low in added.T] == [(value + other) % 2**128 for value in values]
    assert [int(h) * 2**64 + int(low) for h, low in negated.T] == [-value % 2**128 for value in values]


@given(st.lists(st.integers(-(2**90), 2**90), min_size=1, max_size=4))
def test_sums_and_words_hold_the_same_integers(values: list[int]) -> None:
    high = torch.tensor([value >> 42 for value in values])
    low = torch.tensor([value & (2**42 - 1) for value in values])
    groups = {"sums": {"train_high": high, "train_low": low}}
    words = to_words(groups)
    assert [int(h) * 2**64 + int(w) for h, w in words.T] == [value % 2**128 for value in values]
    back = from_words(words, groups, masked=False)
    assert torch.equal(back["sums"]["train_high"], high)
    assert torch.equal(back["sums"]["train_low"], low)


def test_both_clients_of_a_pair_draw_the_same_mask_and_others_draw_another() -> None:
    one, two = draw_mask(PRIVATE[0], KEYS[3], b"run", 50), draw_mask(PRIVATE[3], KEYS[0], b"run", 50)
    assert (one == two).all()
    assert (one != draw_mask(PRIVATE[0], KEYS[7], b"run", 50)).all()
    assert (one != draw_mask(PRIVATE[0], KEYS[3], b"another request", 50)).all()


def test_a_single_message_is_uniformly_distributed() -> None:
    zero = {"sums": {name: torch.zeros(20_000, dtype=torch.int64) for name in ("train_high", "train_low")}}
    for tensor in mask(zero, 0)["sums"].values():
        octets = np.bincount(tensor.numpy().view(np.uint8), minlength=256)  # of 160,000
        assert ((octets - 625) ** 2 / 625).sum() < 350, "chi-squared with 255 degrees of freedom"
    own = mask(sums_of(0), 0)["sums"]["train_high"]
    assert not torch.equal(own, sums_of(0)["sums"]["train_high"])


def test_without_one_client_the_others_do_not_add_up() -> None:
    total = add_masked([mask(sums_of(client), client) for client in (0, 3)])["sums"]["train_high"]
    assert (total.double().abs() > 2**50).double().mean() > 0.9


@pytest.mark.parametrize("keys", [{0: KEYS[0]}, {0: KEYS[3], 3: KEYS[3]}, {3: KEYS[3], 7: KEYS[7]}])
def test_keys_that_do_not_hold_the_own_and_another_are_refused(keys: dict[int, bytes]) -> None:
    with pytest.raises(InputError, match="cannot be masked"):
        mask_sums(sums_of(0), 0, PRIVATE[0], pack_keys(keys), b"run")
