import hashlib
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fedcir.rng import keep_generators, numpy_rng, seed_for, seeded_init, share_generators, torch_rng


def test_a_seed_is_half_of_the_hash_of_its_path() -> None:
    # Written out, since every published number depends on it.
    digest = hashlib.blake2b(b'[0, "batches", 3, 7]', digest_size=8).digest()
    assert seed_for(0, "batches", 3, 7) == int.from_bytes(digest, "big") // 2


def test_every_part_of_a_path_counts() -> None:
    paths = [
        (0,),
        (1,),
        (0, "a"),
        (0, "b"),
        (0, "a", 1),
        (0, "a", 2),
        (0, 1, "a"),
        (0, "a", "1"),
        (0, "ab"),
        (0, "a", "b"),
    ]
    assert len({seed_for(*path) for path in paths}) == len(paths)


def test_seeds_fit_into_what_torch_and_numpy_take() -> None:
    seeds = [seed_for(0, "round", i) for i in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # and are not small


def test_the_same_path_gives_the_same_draws() -> None:
    draws = [torch.randn(5, generator=torch_rng(3, "noise", 1)) for _ in range(2)]
    assert torch.equal(*draws)
    assert np.array_equal(numpy_rng(3, "noise", 1).normal(size=5), numpy_rng(3, "noise", 1).normal(size=5))


def test_neighbouring_paths_are_not_correlated() -> None:
    draws = np.stack([numpy_rng(0, "batches", client).normal(size=10_000) for client in range(6)])
    correlation = np.corrcoef(draws) - np.eye(6)
    assert np.abs(correlation).max() < 0.05  # five standard errors


def test_draws_do_not_depend_on_the_order_of_clients() -> None:
    def draws(order: list[int]) -> dict[int, list[float]]:
        return {client: torch.randn(3, generator=torch_rng(0, "local", client)).tolist() for client in order}

    assert draws([0, 1, 2]) == draws([2, 0, 1])


def test_generators_are_on_the_cpu() -> None:
    assert torch_rng(0).device == torch.device("cpu")


def test_seeded_init_gives_the_same_weights_whatever_was_drawn_before() -> None:
    with seeded_init(0, "head"):
        first = nn.Linear(4, 3)
    torch.randn(17)
    with seeded_init(0, "head"):
        second = nn.Linear(4, 3)
    with seeded_init(0, "other"):
        other = nn.Linear(4, 3)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, other.weight)


def test_seeded_init_puts_the_global_generator_back() -> None:
    before = torch.get_rng_state()
    with seeded_init(0, "head"):
        nn.Linear(4, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_init_puts_the_global_generator_back_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded_init(0, "head"):
        torch.randn(3) @ torch.randn(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_of_an_accelerator_is_seeded_and_restored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has no accelerator, so a generator of the CPU stands for that of torch.mps."""
    accelerator = torch.Generator().manual_seed(3)
    before = accelerator.get_state()
    for name in ("manual_seed", "get_state", "set_state"):
        monkeypatch.setattr(
            torch.mps, name.replace("get_", "get_rng_").replace("set_", "set_rng_"), getattr(accelerator, name)
        )
    draws = []
    for _ in range(2):
        with keep_generators(torch.device("mps")) as generators:
            generators.seed(7)
            draws.append((torch.rand(4), torch.rand(4, generator=accelerator)))
    assert all(torch.equal(first, second) for first, second in zip(*draws, strict=True))
    assert torch.equal(accelerator.get_state(), before)


def test_a_thread_that_seeds_the_default_generators_waits_until_no_other_uses_them() -> None:
    entered, leave, order = threading.Event(), threading.Event(), []

    def read() -> None:
        with share_generators(torch.device("cpu")) as drawn:
            entered.set()
            leave.wait()
            order.append(f"drew: {drawn()}")

    def write() -> None:
        with keep_generators():
            order.append("seeded")

    threads = [threading.Thread(target=target) for target in (read, write)]
    threads[0].start()
    entered.wait()
    threads[1].start()
    torch.rand(1)
    leave.set()
    for thread in threads:
        thread.join()
    assert order == ["drew: True", "seeded"]
