"""Label skew within a domain, against numpy's own draws."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.config import PartitionConfig
from fedcir.data.partition import ClientPartition, partition_dirichlet, partition_labels
from fedcir.rng import numpy_rng

CLASSES = 10
PAPER = {name: np.arange(CLASSES).repeat(200) for name in ("art", "cartoon", "photo", "sketch")}
"""Four domains, for 50 clients as in the paper."""


def counts(shares: list[ClientPartition], domain: str) -> np.ndarray:
    """Images by client of the domain and by class."""
    return np.stack([share.counts(PAPER, CLASSES) for share in shares if share.domain == domain])


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("domain", list(PAPER))
def test_class_shares_are_numpys_own_draws_to_an_image(seed: int, domain: str) -> None:
    result = counts(partition_dirichlet(PAPER, 16, 0.5, 1, seed), domain)
    rng = numpy_rng(seed, "partition", domain)
    for label in range(CLASSES):
        rng.permutation(200)  # which images; then in which shares
        assert np.abs(result[:, label] - 200 * rng.dirichlet([0.5] * 4)).max() <= 1


def test_which_images_a_client_gets_is_numpys_own_shuffle() -> None:
    labels = np.array([0, 1] * 30)
    shares = partition_dirichlet({"one": labels}, 3, 5.0, 1, seed=4)
    rng = numpy_rng(4, "partition", "one")
    held: list[set[int]] = [set(), set(), set()]
    for label in (0, 1):
        rows = rng.permutation(np.flatnonzero(labels == label))
        first, second = np.round(np.cumsum(rng.dirichlet([5.0] * 3))[:2] * 30).astype(int)
        for client, some in enumerate((rows[:first], rows[first:second], rows[second:])):
            held[client] |= set(some.tolist())
    assert [set(share.rows["one"].tolist()) for share in shares] == held


def test_the_papers_50_clients_are_13_13_12_and_12_of_the_four_domains() -> None:
    shares = partition_dirichlet(PAPER, 50, 0.5, 1, seed=0)
    assert [share.domain for share in shares] == ["art"] * 13 + ["cartoon"] * 13 + ["photo"] * 12 + ["sketch"] * 12
    for domain in PAPER:
        assert counts(shares, domain).sum(0).tolist() == [200] * CLASSES


def test_a_beta_of_a_hundredth_leaves_each_class_with_one_of_the_papers_clients() -> None:
    shares = partition_dirichlet(PAPER, 50, 0.01, 1, seed=0)
    largest = np.concatenate([counts(shares, domain).max(0) for domain in PAPER]) / 200  # 40 classes
    drawn = np.random.default_rng(0).dirichlet([0.01] * 13, 20_000).max(1)
    assert np.median(largest) > 0.9  # the draws' own median is 1; a client without images is given one
    assert np.mean(largest > 0.9) == pytest.approx(np.mean(drawn > 0.9), abs=0.25)


def test_a_beta_of_1000_is_even_to_a_few_images() -> None:
    shares = partition_dirichlet(PAPER, 50, 1000.0, 1, seed=0)
    for domain in PAPER:
        result = counts(shares, domain)
        # A share of 1/13 deviates by sqrt(12) / 13 / sqrt(13001) = 0.0023, which is half an image of 200.
        assert np.abs(result - 200 / len(result)).max() <= 4 * 0.5 + 1


@pytest.mark.parametrize("beta", [1e-300, 1e-9, 1e6])
def test_the_smallest_and_the_largest_beta_still_deal_out_everything(beta: float) -> None:
    shares = partition_dirichlet(PAPER, 50, beta, 1, seed=0)
    assert sum(counts(shares, domain).sum() for domain in PAPER) == 8000
    assert min(len(share.rows[share.domain]) for share in shares) >= 1


def test_as_many_clients_as_images_hold_one_each() -> None:
    shares = partition_dirichlet({"one": np.arange(12) % 3}, 12, 0.1, 1, seed=0)
    assert sorted(share.rows["one"].tolist() for share in shares) == [[row] for row in range(12)]


def test_topping_up_moves_only_what_is_missing() -> None:
    labels = {"one": np.arange(5).repeat(40)}

    def owners(least: int) -> np.ndarray:
        result = np.full(200, -1)
        for number, share in enumerate(partition_dirichlet(labels, 8, 0.2, least, seed=1)):
            result[share.rows["one"]] = number
        return result

    before, after = owners(1), owners(10)
    missing = np.maximum(0, 10 - np.bincount(before, minlength=8)).sum()
    assert missing > 0
    assert (before != after).sum() == missing
    assert np.bincount(after).min() == 10


def test_a_least_that_just_fits_gives_everyone_the_same() -> None:
    shares = partition_labels(PartitionConfig("dirichlet", clients=8, min_samples=1000), PAPER, seed=0)
    assert {len(share.rows[share.domain]) for share in shares} == {1000}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--clients 75", "domain 'ink' has 24 training images, too few for 25 clients with at least 1 each"),
        ("--clients 9 --set partition.min_samples=9", "too few for 3 clients with at least 9 each"),
        ("--clients 6 --beta 0", "partition.beta must be a number above 0, got 0.0"),
        ("--clients 6 --beta inf", "partition.beta must be at most 1,000,000, got inf"),
        ("--set partition.scheme=dirichlett", "did you mean 'dirichlet'?"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_in_one_line(
    fedcir: Callable[..., Any], data_root: Path, arguments: str, named: str
) -> None:
    output = fedcir("data", "partition", "arrays", "--data-root", data_root, *arguments.split())
    assert (output.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert named in output.err


def test_the_command_holds_to_the_least_that_is_asked_for(fedcir: Callable[..., Any], data_root: Path) -> None:
    more = ["--clients", 9, "--beta", 0.05, "--set", "partition.min_samples=8"]
    output = fedcir("data", "partition", "arrays", "--data-root", data_root, *more)
    images = [int(line.split()[2]) for line in output.out.splitlines() if line.split()[1:2] == ["ink"]]
    assert images == [8, 8, 8]
