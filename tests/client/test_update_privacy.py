"""Clipping, noise and epsilon, against numbers worked out by hand and against Opacus itself."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcir.algorithms import find_algorithm, list_algorithms, make_algorithm
from fedcir.client.uploads import PrivateMean
from fedcir.config import Config, PrivacyConfig, config_from_tables
from fedcir.data.federation import open_federation
from fedcir.errors import InputError, RunError
from fedcir.runtime.rounds import SerialTransport, run_rounds, step_server
from fedcir.runtime.session import Session, make_trainer, open_session
from fedcir.runtime.simulation import open_run
from fedcir.server.accounting import Accountant, composed_epsilon, sample_poisson_cohort
from fedcir.types import DroppedReply, Groups

Tiny = Callable[..., Config]
ON = ("privacy.clip=1", "privacy.noise=1", "model.norm=group")


def mean_of(settings: PrivacyConfig, expected: int, seed: int = 0) -> PrivateMean:
    assert settings.clip is not None
    return PrivateMean(settings, settings.clip, expected, np.random.default_rng(seed))


def groups(*values: float, whole: int = 0) -> Groups:
    """Two groups: the first value in one, the others in the other, beside an integer."""
    return {"a": {"w": torch.tensor(values[:1])}, "b": {"w": torch.tensor(values[1:]), "steps": torch.tensor(whole)}}


def opened(config: Config) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), open_federation(config)
    session = open_session(config, algorithm, federation)
    return session, SerialTransport(make_trainer(session.config, algorithm, federation.builder), federation.clients)


def test_an_update_is_scaled_to_the_clip_over_all_groups_together() -> None:
    before, after = groups(1.0, 1.0, 1.0), groups(4.0, 5.0, 1.0, whole=7)  # an update of (3, 4, 0), whose norm is 5
    clipped = mean_of(PrivacyConfig(clip=1.0), 1).compute([after], before)
    assert clipped["a"]["w"].tolist() == pytest.approx([1.6])
    assert clipped["b"]["w"].tolist() == pytest.approx([1.8, 1.0])
    assert clipped["b"]["steps"] == 0, "an integer stays as it was sent out"
    whole = mean_of(PrivacyConfig(clip=5.0), 1).compute([after], before)
    assert torch.equal(whole["a"]["w"], after["a"]["w"])


def test_the_mean_divides_by_the_expected_clients_and_not_by_the_replies() -> None:
    before, after = groups(0.0, 0.0), groups(3.0, 4.0)
    moved = mean_of(PrivacyConfig(clip=10.0), 4).compute([after, after], before)
    assert [moved["a"]["w"].item(), moved["b"]["w"].item()] == [3.0 * 2 / 4, 4.0 * 2 / 4]


@pytest.mark.parametrize("norm", [0.3, 1.0, 50.0, 1e30])
def test_one_client_more_moves_the_sum_by_the_clip_at_most(norm: float) -> None:
    before, others = groups(0.0, 0.0, 0.0), [groups(0.1, -0.2, 0.3), groups(5.0, 5.0, 5.0)]
    more = groups(*(norm / math.sqrt(3),) * 3)
    one, other = (mean_of(PrivacyConfig(clip=1.0), 2).compute(replies, before) for replies in (others, [*others, more]))
    moved = [2 * float((one[g]["w"] - other[g]["w"]).square().sum().sqrt()) for g in ("a", "b")]
    assert math.hypot(*moved) == pytest.approx(min(norm, 1.0), rel=1e-5)


def test_the_noise_has_the_standard_deviation_that_the_accountant_is_told() -> None:
    before = {"a": {"w": torch.zeros(100_000)}}
    moved = mean_of(PrivacyConfig(clip=3.0, noise=2.0), 10).compute([], before)["a"]["w"]
    assert moved.std().item() == pytest.approx(2.0 * 3.0 / 10, rel=0.01)
    assert abs(moved.mean().item()) < 4 * 0.6 / math.sqrt(100_000)


def test_the_statistics_of_a_frozen_batchnorm_get_no_noise() -> None:
    before = {"a": {"norm.running_var": torch.ones(3), "w": torch.ones(3)}}
    moved = mean_of(PrivacyConfig(clip=1.0, noise=1.0), 1).compute([], before)["a"]
    assert torch.equal(moved["norm.running_var"], torch.ones(3))
    assert not torch.equal(moved["w"], torch.ones(3))


def test_an_adaptive_clip_goes_to_the_median_norm() -> None:
    before = {"a": {"w": torch.zeros(1)}}
    replies = [{"a": {"w": torch.tensor([norm])}} for norm in (1.0, 2.0, 3.0, 4.0, 5.0)]
    mean = mean_of(PrivacyConfig(clip=10.0, adaptive=True), 5)
    mean.compute(replies, before)
    assert mean.clip == pytest.approx(10.0 * math.exp(-0.2 * 0.5)), "all five are within the clip"
    for _ in range(200):
        mean.compute(replies, before)
    assert 2.0 < mean.clip < 4.0


def test_a_noised_count_and_a_noised_sum_cost_together_what_the_accountant_is_told() -> None:
    on_sum, on_count = mean_of(PrivacyConfig(clip=1.0, noise=1.5, adaptive=True), 100)._multipliers()
    assert on_count == 5.0  # a twentieth of the clients
    # Of one Gaussian in two parts: sensitivities 1 and 1/2 by their standard deviations.
    assert math.hypot(1 / on_sum, 0.5 / on_count) == pytest.approx(1 / 1.5)


def test_epsilon_is_opacus_own() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(20):
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
    assert Accountant(1.1, 1e-5, 0.05).epsilon(20) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert Accountant(1.1, 1e-5).epsilon(0) == 0.0


def test_divergences_of_different_mechanisms_add_up() -> None:
    """Noise of 3 and of 4 on the same sum tells what noise of 2.4 tells: 1/2.4^2 = 1/3^2 + 1/4^2."""
    both = composed_epsilon([(Accountant(3.0, 1e-5), 5), (Accountant(4.0, 1e-5), 5)], 1e-5)
    assert both == pytest.approx(Accountant(2.4, 1e-5).epsilon(5))
    halved = composed_epsilon([(Accountant(6.0, 1e-5, adjacency="replace-one"), 5)], 1e-5)
    assert halved == pytest.approx(Accountant(3.0, 1e-5).epsilon(5))


def test_epsilon_without_sampling_is_near_that_of_one_gaussian() -> None:
    # n releases with multiplier z are one with z / sqrt(n); its exact delta is that of Balle and Wang (2018).
    from scipy.stats import norm

    z, epsilon = 4.0 / math.sqrt(16), Accountant(4.0, 1e-5).epsilon(16)
    delta = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
    assert 1e-7 < delta < 1e-5, "a valid bound, and no loose one"


def test_a_poisson_cohort_is_a_draw_for_each_client() -> None:
    rng = np.random.default_rng(0)
    cohorts = [sample_poisson_cohort(range(50), 0.1, rng) for _ in range(400)]
    assert np.mean([len(cohort) for cohort in cohorts]) == pytest.approx(5.0, abs=0.4)
    assert np.var([len(cohort) for cohort in cohorts]) == pytest.approx(4.5, abs=1.0), "binomial, and not fixed"
    assert [] in cohorts
    assert all(cohort == sorted(cohort) for cohort in cohorts)


def test_a_method_sees_nothing_of_a_round_but_the_noised_mean(tiny: Tiny) -> None:
    """Fault 1 of the attack: the generator and the Gaussians of FedCiR were made from raw heads."""
    session, transport = opened(tiny("fedcir", *ON, "privacy.noise=0"))
    replies = list(transport.train(session.state, (0, 1, 2)))
    private = session.private_mean()
    assert private is not None
    mean = private.compute([reply.tensors for reply in replies], session.evaluation_groups(session.state))
    alike = [replace(reply, tensors=mean) for reply in replies]
    seen, _ = step_server(session, replies, (0, 1, 2))
    object.__setattr__(session, "config", replace(session.config, privacy=PrivacyConfig()))
    expected, _ = step_server(session, alike, (0, 1, 2))
    for group in ("model", "generator", "gaussians"):
        for name, tensor in expected.shared[group].items():
            assert torch.equal(seen.shared[group][name], tensor), f"{group}/{name}"


def test_a_dropped_reply_counts_as_no_change(tiny: Tiny) -> None:
    session, transport = opened(tiny("fedavg", "privacy.clip=1e6", "model.norm=group"))
    first, *others = transport.train(session.state, (0, 1, 2))
    broken = [DroppedReply(other.client_id, "late") for other in others]
    state, _ = step_server(session, [first, *broken], (0, 1, 2))
    before, sent = session.state.shared["model"]["head.bias"], first.tensors["model"]["head.bias"]
    torch.testing.assert_close(state.shared["model"]["head.bias"], before + (sent - before) / 3)


def test_a_cohort_of_nobody_gives_noise_alone(tiny: Tiny) -> None:
    session, _ = opened(tiny("feddyn", *ON, "server.active=1"))
    state, collected = step_server(session, [], [])
    assert collected.count == 0
    assert not torch.equal(state.shared["model"]["head.bias"], session.state.shared["model"]["head.bias"])


REFUSED = {
    "fedcirone",
    "fednova",
    "fedgen",
    "fedproc",
    "fpl",
    "fedproto",
    "fedfa",
    "scaffold",
    "centralized",
    "centralizedbatch",
}


@pytest.mark.parametrize("name", list_algorithms())
def test_every_method_is_covered_or_refused_in_words(tiny: Tiny, name: str) -> None:
    norm = "batch" if name == "fedbn" else "group"
    config = tiny(name, *ON, f"model.norm={norm}", "server.rounds=1")
    if name in REFUSED:
        with pytest.raises(InputError, match=name):
            opened(config)
        return
    assert not find_algorithm(name).sends
    session, transport = opened(config)
    (record,) = run_rounds(session, transport)
    assert record.epsilon == Accountant(1.0, 1e-5).epsilon(1)


def test_a_resumed_run_with_an_adaptive_clip_is_the_same_to_the_bit(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedavg", *ON, "privacy.adaptive=true", "server.rounds=4", "server.active=2", "run.workers=1")
    models = []
    for stop in (4, 2):
        out = tmp_path / str(stop)
        with open_run(config, out) as (_, rounds):
            for _ in range(stop):
                next(rounds)
        with open_run(config, out, resume=True) as (session, rounds):
            list(rounds)
        models.append((out / "model.safetensors").read_bytes())
        clip = float(session.state.private["privacy"]["clip"])
    assert models[0] == models[1]
    assert clip != 1.0


def test_a_run_ends_before_the_round_that_would_exceed_epsilon(tiny: Tiny, tmp_path: Path) -> None:
    two, three = (Accountant(1.0, 1e-5).epsilon(rounds) for rounds in (2, 3))
    config = tiny("fedavg", *ON, "server.rounds=9", f"privacy.epsilon={two}", "run.workers=1")
    with open_run(config, tmp_path / "run") as (session, rounds):
        assert session.notes == (f"privacy.epsilon={two:g} is used up after 2 of 9 rounds: the run ends there",)
        records = list(rounds)
    assert [record.epsilon for record in records] == [Accountant(1.0, 1e-5).epsilon(rounds) for rounds in (1, 2)]
    assert records[-1].accuracy_mean is not None
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["privacy"] == {
        **{"epsilon": two, "delta": 1e-5, "unit": "client", "place": "server"},
        **{"adjacency": "zero-out", "randomness": "seed"},
    }
    more = replace(config, privacy=replace(config.privacy, epsilon=three))
    with open_run(more, tmp_path / "run", resume=True) as (session, rounds):
        assert [record.round for record in rounds] == [3]


def test_an_epsilon_below_that_of_one_round_is_refused(tiny: Tiny) -> None:
    with pytest.raises(InputError, match=r"privacy.epsilon=1 does not allow a single round, whose epsilon is 4\.38"):
        opened(tiny("fedavg", *ON, "privacy.epsilon=1"))


def test_in_a_deployment_noise_is_not_that_of_the_seed_and_a_repeated_round_counts(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("fedavg", *ON, "server.rounds=2", "run.workers=1", "server.checkpoint_every=2")
    with open_run(config, tmp_path / "run") as (session, rounds):
        session.deployed = True
        assert next(rounds).epsilon == Accountant(1.0, 1e-5).epsilon(1)
        start, seeded = session.state, replace(session, deployed=False)
        noised = [
            item.private_mean().compute([], session.evaluation_groups(start))
            for item in (session, session, seeded, seeded)
        ]  # type: ignore[union-attr]
        biases = [item["model"]["head.bias"] for item in noised]
        assert torch.equal(biases[2], biases[3])
        assert not any(torch.equal(one, other) for one, other in ((biases[0], biases[1]), (biases[0], biases[2])))
        assert (tmp_path / "run" / "checkpoint" / "round-000001.safetensors").exists(), "nothing released is repeated"
        assert session.releases is not None
        session.releases.add()  # as a round that was begun before a crash
        assert next(rounds).epsilon == Accountant(1.0, 1e-5).epsilon(3)


def test_a_client_that_adds_noise_itself_sends_no_losses_and_any_method_sees_its_reply(tiny: Tiny) -> None:
    config = tiny("fedcir", *ON, "privacy.noise=2", "privacy.place=client", "server.active=2", "server.rounds=4")
    session, transport = opened(config)
    reply, _ = transport.train(session.state, (0, 1))
    plain, _ = opened(tiny("fedcir", "model.norm=group"))[1].train(session.state, (0, 1))
    assert set(reply.metrics) == {"flops"}
    noise = reply.tensors["model"]["head.weight"] - plain.tensors["model"]["head.weight"]
    assert noise.std().item() == pytest.approx(2.0, rel=0.15)
    records = list(run_rounds(session, transport))
    taken = [sum(client in session.cohort(round) for round in (1, 2, 3, 4)) for client in (0, 1, 2)]
    assert records[-1].epsilon == Accountant(1.0, 1e-5).epsilon(max(taken)), "by the client that took part most"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": 1.0}, "set privacy.clip too"),
        ({"clip": 1.0, "epsilon": 3.0}, "set privacy.noise too"),
        ({"clip": 1.0, "adaptive": True, "place": "client"}, "needs privacy.place=server"),
        ({"clip": 0.0}, "privacy.clip must be a number above 0, got 0.0"),
        ({"clip": 1.0, "noise": 1e-200}, "privacy.noise must be 0, or at least 0.01, got 1e-200"),
        ({"delta": 1.0}, "privacy.delta must be .*below 1, got 1.0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_tables({"privacy": settings})


def test_weights_by_samples_and_batchnorm_statistics_are_refused(tiny: Tiny) -> None:
    with pytest.raises(InputError, match=r"set server\.weighting=uniform, got samples"):
        tiny("fedavg", *ON, "server.weighting=samples")
    with pytest.raises(InputError, match=r"set model\.norm=group, or model\.batchnorm=local"):
        opened(tiny("fedavg", *ON, "model.norm=batch"))
    opened(tiny("fedavg", *ON, "model.norm=batch", "model.batchnorm=local"))


def test_a_budget_that_repeats_have_used_up_stops_the_round(tiny: Tiny, tmp_path: Path) -> None:
    two = Accountant(1.0, 1e-5).epsilon(2)
    config = tiny("fedavg", *ON, "server.rounds=2", f"privacy.epsilon={two}", "run.workers=1")
    with open_run(config, tmp_path / "run") as (session, rounds):
        session.deployed = True
        next(rounds)
        assert session.releases is not None
        session.releases.add()
        with pytest.raises(RunError, match=r"round 2 would bring epsilon to 9\.01, above privacy\.epsilon=7\.077"):
            next(rounds)
    assert session.state.round == 1
