"""Epsilon of every combination of unit and place, against computations that share no code with the accountant."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from fedcir.config import Config, LocalConfig, PrivacyConfig
from fedcir.data.federation import open_federation
from fedcir.server.accounting import epsilon_after, get_adjacency, server_epsilon, upload_epsilon

Tiny = Callable[..., Config]
CLIENT = PrivacyConfig(clip=1.0, noise=1.0, place="client")
SERVER = PrivacyConfig(clip=1.0, noise=1.0)
EXAMPLE = PrivacyConfig(clip=1.0, noise=1.0, unit="example")
LOCAL = LocalConfig(steps=3, batch_size=8)


def gaussian_epsilon(noise: float, sensitivity: float, releases: int, delta: float = 1e-5) -> float:
    """Renyi divergence of Gaussians (Mironov, 2017), converted as by Canonne et al. (2020), over a fine grid."""
    alpha = np.linspace(1.01, 10, 100_000)
    renyi = releases * alpha * sensitivity**2 / (2 * noise**2)
    return float((renyi + np.log1p(-1 / alpha) - np.log(delta * alpha) / (alpha - 1)).min())


def exact_delta(epsilon: float, noise: float, sensitivity: float, releases: int) -> float:
    """Smallest delta of a Gaussian mechanism at this epsilon (Balle and Wang, 2018)."""
    from scipy.stats import norm

    z = noise / (sensitivity * math.sqrt(releases))
    return float(norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon + norm.logcdf(-0.5 / z - epsilon * z)))


@pytest.mark.parametrize("noise", [0.3, 0.8919, 3.7306, 50.0])
def test_epsilon_of_one_noised_sum_is_exact(noise: float) -> None:
    privacy = PrivacyConfig(clip=1.0, noise=noise, unit="example")
    counted = upload_epsilon(privacy, LOCAL, images=80, rounds=1, one_shot=True)
    assert exact_delta(counted, noise, 1.0, 1) == pytest.approx(1e-5, rel=1e-3)
    twice = upload_epsilon(privacy, LOCAL, images=80, rounds=2, one_shot=True)
    assert twice >= counted
    assert exact_delta(twice, noise, 1.0, 2) <= 1e-5


def test_noise_of_clients_is_counted_for_a_dataset_that_is_replaced_and_not_for_a_client_more() -> None:
    counted = upload_epsilon(CLIENT, LOCAL, images=1, rounds=30)
    assert counted == pytest.approx(110.7, abs=0.05)
    assert counted == pytest.approx(gaussian_epsilon(1.0, 2.0, 30), rel=2e-3)
    assert exact_delta(counted, 1.0, 2.0, 30) < 1e-5
    assert exact_delta(39.8, 1.0, 2.0, 30) > 0.95, "what was claimed before fails nearly always"


def test_noise_of_the_server_is_counted_for_a_client_that_counts_as_nothing() -> None:
    counted = server_epsilon(SERVER, rate=1.0, rounds=30)
    assert counted == pytest.approx(39.8, abs=0.05)
    assert counted == pytest.approx(gaussian_epsilon(1.0, 1.0, 30), rel=2e-3)
    assert exact_delta(counted, 1.0, 1.0, 30) < 1e-5


def test_an_image_is_counted_by_the_steps_and_its_chance_to_be_drawn() -> None:
    whole = upload_epsilon(EXAMPLE, LOCAL, images=8, rounds=10)  # a batch holds every image in each of 30 steps
    assert whole == pytest.approx(gaussian_epsilon(1.0, 1.0, 30), rel=2e-3)
    assert upload_epsilon(EXAMPLE, LOCAL, images=5, rounds=10) == whole
    assert upload_epsilon(EXAMPLE, LOCAL, images=800, rounds=10) < whole / 10


def test_a_sampled_image_is_counted_as_by_numerical_integration() -> None:
    rate, alpha = 8 / 80, np.linspace(1.5, 8, 66)[:, None]
    x = np.linspace(-20, 30, 10_001)  # Mironov, Talwar and Zhang (2019): divergence of a mixture from a Gaussian
    ratio = 1 - rate + rate * np.exp(x - 0.5)
    moments = (np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * ratio**alpha).sum(1) * (x[1] - x[0])
    alpha = alpha[:, 0]
    divergences = 30 * np.log(moments) / (alpha - 1)
    bound = (divergences + np.log1p(-1 / alpha) - np.log(1e-5 * alpha) / (alpha - 1)).min()
    assert upload_epsilon(EXAMPLE, LOCAL, images=80, rounds=10) == pytest.approx(bound, rel=2e-3)


def test_updates_without_noise_of_their_own_have_no_bound_towards_the_server() -> None:
    assert upload_epsilon(SERVER, LOCAL, images=80, rounds=1) == math.inf
    assert upload_epsilon(PrivacyConfig(clip=1.0, place="client"), LOCAL, images=80, rounds=1) == math.inf
    assert upload_epsilon(SERVER, LOCAL, images=80, rounds=0) == 0.0


def test_sampling_of_clients_lowers_epsilon_only_where_nobody_learns_who_took_part(tiny: Tiny) -> None:
    few = ("privacy.clip=1", "privacy.noise=1", "model.norm=group", "server.active=1", "server.rounds=30")
    at_server, at_client = tiny("fedavg", *few), tiny("fedavg", *few, "privacy.place=client")
    federation = open_federation(at_server)
    sampled, uploaded = (epsilon_after(config, federation, 30) for config in (at_server, at_client))
    assert sampled is not None
    assert uploaded is not None
    assert sampled < server_epsilon(SERVER, 1.0, 30) / 2
    most = max(np.bincount([_only(at_client, federation.trainers, round) for round in range(1, 31)]))
    assert uploaded == upload_epsilon(CLIENT, LOCAL, 1, int(most)), "by the client that took part most"


def _only(config: Config, trainers: object, round: int) -> int:
    from fedcir.server.accounting import sample_cohort

    (client,) = sample_cohort(list(trainers), 1, config.run.seed, round)  # type: ignore[call-overload]
    return client


@pytest.mark.parametrize(
    ("settings", "adjacency"), [(SERVER, "zero-out"), (CLIENT, "replace-one"), (EXAMPLE, "zero-out")]
)
def test_every_combination_names_its_adjacency(settings: PrivacyConfig, adjacency: str) -> None:
    assert get_adjacency(settings) == adjacency


def test_a_budget_allows_fewer_rounds_where_clients_add_the_noise(tiny: Tiny) -> None:
    from fedcir.algorithms import make_algorithm
    from fedcir.runtime.session import open_session

    limit = ("privacy.clip=1", "privacy.noise=2", "privacy.epsilon=10", "model.norm=group", "server.rounds=50")
    rounds = {}
    for path in ("server", "client"):
        config = tiny("fedavg", *limit, f"privacy.place={path}")
        session = open_session(config, make_algorithm(config.algorithm), open_federation(config))
        rounds[path] = session.config.server.rounds
    allowed = {s: max(n for n in range(1, 51) if gaussian_epsilon(2.0, s, n) <= 10) for s in (1.0, 2.0)}
    assert rounds == {"server": allowed[1.0], "client": allowed[2.0]}
