import numpy as np
import pytest

from fedcir.config import PartitionConfig
from fedcir.data.partition import ClientPartition, limit_samples, partition_dirichlet, partition_iid, partition_labels
from fedcir.errors import InputError

LABELS = {
    "photo": np.arange(10).repeat(40),
    "sketch": np.arange(10).repeat(25)[np.random.default_rng(0).permutation(250)],
    "paint": np.arange(5).repeat(20),
}
SIZES = {name: len(values) for name, values in LABELS.items()}


def assert_all_rows_once(shares: list[ClientPartition]) -> None:
    for domain, size in SIZES.items():
        held = np.concatenate([share.rows.get(domain, np.empty(0, int)) for share in shares])
        assert np.array_equal(np.sort(held), np.arange(size))


def rows_of(shares: list[ClientPartition]) -> list[dict[str, list[int]]]:
    return [{name: rows.tolist() for name, rows in share.rows.items()} for share in shares]


def class_shares(labels: np.ndarray, shares: list[ClientPartition], domain: str) -> np.ndarray:
    """How each class is spread over a domain's clients, (clients, classes)."""
    counts = np.stack([np.bincount(labels[s.rows[domain]], minlength=10) for s in shares if domain in s.rows])
    return counts / counts.sum(0)


@pytest.mark.parametrize("scheme", ["domain", "dirichlet", "iid"])
def test_no_client_gets_more_than_the_most_that_is_asked_for(scheme: str) -> None:
    whole = partition_labels(PartitionConfig(scheme), LABELS, seed=0)  # type: ignore[arg-type]
    less, again = (partition_labels(PartitionConfig(scheme, max_samples=120), LABELS, seed=0) for _ in range(2))  # type: ignore[arg-type]
    assert rows_of(less) == rows_of(again)
    for all_of_it, some in zip(whole, less, strict=True):
        held = {name: set(rows.tolist()) for name, rows in all_of_it.rows.items()}
        assert all(set(rows.tolist()) <= held[name] for name, rows in some.rows.items())
        assert sum(map(len, some.rows.values())) == min(120, sum(map(len, held.values())))


def test_a_capped_client_keeps_the_shares_of_its_classes_and_domains() -> None:
    photo, *_ = partition_labels(PartitionConfig(max_samples=120), LABELS, seed=0)
    assert np.bincount(LABELS["photo"][photo.rows["photo"]]).tolist() == [12] * 10  # of 40 each
    both = limit_samples(
        ClientPartition("photo", {"photo": np.arange(400), "sketch": np.arange(250)}), LABELS, 65, seed=0
    )
    assert {name: len(rows) for name, rows in both.rows.items()} == {"photo": 40, "sketch": 25}


def test_a_most_below_the_least_is_refused() -> None:
    with pytest.raises(InputError, match=r"partition\.max_samples must be at least partition\.min_samples=5, got 4"):
        PartitionConfig(min_samples=5, max_samples=4)


def test_by_domain_gives_each_client_one_whole_domain() -> None:
    shares = partition_labels(PartitionConfig(), LABELS, seed=0)
    assert [share.domain for share in shares] == ["photo", "sketch", "paint"]
    assert [list(share.rows) for share in shares] == [["photo"], ["sketch"], ["paint"]]
    assert_all_rows_once(shares)


@pytest.mark.parametrize("beta", [0.01, 0.5, 1000.0])
@pytest.mark.parametrize("clients", [3, 7, 50])
def test_dirichlet_covers_all_rows_exactly_once(beta: float, clients: int) -> None:
    shares = partition_dirichlet(LABELS, clients, beta, 1, seed=0)
    assert len(shares) == clients
    assert_all_rows_once(shares)
    assert all(list(share.rows) == [share.domain] for share in shares)


def test_dirichlet_gives_the_first_domains_the_clients_that_are_left_over() -> None:
    domains = [share.domain for share in partition_dirichlet(LABELS, 8, 0.5, 1, seed=0)]
    assert domains == ["photo"] * 3 + ["sketch"] * 3 + ["paint"] * 2


def test_dirichlet_is_the_same_for_the_same_seed_only() -> None:
    first, again, other = (rows_of(partition_dirichlet(LABELS, 6, 0.5, 1, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_domains_dirichlet_does_not_depend_on_the_other_domains() -> None:
    alone = partition_dirichlet({"sketch": LABELS["sketch"]}, 4, 0.5, 1, seed=0)
    together = partition_dirichlet(LABELS, 12, 0.5, 1, seed=0)
    assert rows_of(alone) == rows_of(together)[4:8]


def test_two_domains_alike_are_split_differently() -> None:
    shares = partition_dirichlet(dict.fromkeys(("a", "b"), LABELS["photo"]), 6, 0.5, 1, seed=0)
    assert [rows["a"] for rows in rows_of(shares[:3])] != [rows["b"] for rows in rows_of(shares[3:])]


def test_a_client_gets_images_of_a_class_from_all_over_the_domain() -> None:
    (first, *_) = partition_dirichlet({"one": np.zeros(1000, int)}, 4, 1000.0, 1, seed=0)
    assert first.rows["one"].mean() == pytest.approx(499.5, abs=60)  # four standard errors
    assert np.array_equal(first.rows["one"], np.sort(first.rows["one"]))


@pytest.mark.parametrize("least", [1, 10, 20])
def test_every_dirichlet_client_gets_the_least_that_is_asked_for(least: int) -> None:
    shares = partition_dirichlet(LABELS, 15, 0.01, least, seed=0)
    sizes = [len(share.rows[share.domain]) for share in shares]
    assert min(sizes) >= least
    assert_all_rows_once(shares)


def test_a_large_beta_is_nearly_even_and_a_small_one_gives_classes_away_whole() -> None:
    even = class_shares(LABELS["photo"], partition_dirichlet(LABELS, 12, 1000.0, 1, 0), "photo")
    skewed = class_shares(LABELS["photo"], partition_dirichlet(LABELS, 12, 0.01, 1, 0), "photo")
    # Var = (1/4)(3/4) / (4 beta + 1), a deviation of 0.007, and whole images are steps of 1/40.
    assert np.abs(even - 0.25).max() <= 4 * 0.007 + 0.025
    assert (skewed.max(0) > 0.95).sum() >= 8


@pytest.mark.parametrize("beta", [0.1, 0.5, 5.0])
def test_class_shares_vary_as_dirichlets_do(beta: float) -> None:
    labels = {"one": np.arange(10).repeat(200)}
    results = [class_shares(labels["one"], partition_dirichlet(labels, 4, beta, 1, s), "one") for s in range(60)]
    drawn = np.random.default_rng(0).dirichlet(np.full(4, beta), 20_000)
    assert np.var(results) == pytest.approx(np.var(drawn), rel=0.15)
    # As symmetric as the draws: no client is favoured by its place.
    assert np.mean(results, axis=(0, 2)) == pytest.approx([0.25] * 4, abs=0.06)


def test_too_many_clients_for_a_domain_name_it() -> None:
    with pytest.raises(InputError, match=r"domain 'paint' has 100 training images, too few for 101 clients"):
        partition_dirichlet(LABELS, 303, 0.5, 1, seed=0)


def test_too_large_a_least_names_the_domain() -> None:
    with pytest.raises(InputError, match=r"'paint' has 100 .* 2 clients with at least 51 each: lower"):
        partition_dirichlet(LABELS, 6, 0.5, 51, seed=0)


def test_iid_spreads_everything_evenly() -> None:
    shares = partition_iid(LABELS, 7, seed=0)
    sizes = [sum(len(rows) for rows in share.rows.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert_all_rows_once(shares)
    assert {share.domain for share in shares} == set(LABELS)  # every test set has a holder


def test_iid_clients_hold_each_domain_in_its_share() -> None:
    for share in partition_iid(LABELS, 5, seed=0):
        assert len(share.rows["photo"]) / 150 == pytest.approx(400 / 750, abs=0.15)


def test_iid_is_the_same_for_the_same_seed_only() -> None:
    first, again, other = (rows_of(partition_iid(LABELS, 5, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize("scheme", ["domain", "dirichlet", "iid"])
def test_a_held_out_domain_comes_last_and_nobody_trains_on_it(scheme: str) -> None:
    shares = partition_labels(PartitionConfig(scheme=scheme, hold_out="photo"), LABELS, seed=0)
    assert shares[-1] == ClientPartition("photo", {})
    assert len(shares) == 3
    assert all("photo" not in share.rows for share in shares)
    assert {share.domain for share in shares[:-1]} == {"sketch", "paint"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PartitionConfig(hold_out="foto"), "no domain 'foto'; choose from photo, sketch, paint"),
        (PartitionConfig(clients=2), "at least the number of domains, 3, got 2"),
        (PartitionConfig(clients=5), "5 for 3 domains: use partition.scheme=dirichlet"),
        (PartitionConfig(min_samples=101), "client 2 would hold 100 images, below partition.min_samples=101"),
        (PartitionConfig("iid", clients=1000), "client 750 would hold 0 images"),
        (PartitionConfig("dirichlet", clients=900), "domain 'sketch' has 250 training images"),
    ],
)
def test_what_cannot_be_split_is_said(config: PartitionConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition_labels(config, LABELS, seed=0)


def test_holding_out_the_only_domain_is_refused() -> None:
    with pytest.raises(InputError, match="'photo' is the only domain"):
        partition_labels(PartitionConfig(hold_out="photo"), {"photo": LABELS["photo"]}, seed=0)
