"""FedCiROne: one message of exact sums, whose head is that of pooled training, for any partition."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from fedcir import Config, InputError, Predictor, load_run
from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedcirone import FedCiROne, site_key
from fedcir.data.federation import open_federation
from fedcir.models.site_statistics import StandardisedEncoder
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import make_trainer, open_session
from fedcir.runtime.simulation import open_run
from fedcir.types import Tensors

ONE = ("model.freeze=true", "data.val_fraction=0.2")


def train_model(config: Config, out: Path | None = None) -> Tensors:
    with open_run(config, out) as (session, rounds):
        list(rounds)
        return session.state.shared["model"]


def test_the_message_holds_sums_and_nothing_else(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedCiROne(), rounds=1)
    for reply in transport.train(session.state, [0, 1, 2]):
        assert {group: sorted(bag) for group, bag in reply.tensors.items()} == {"sums": ["train_high", "train_low"]}
    (record,) = run_rounds(session, transport)
    width = 6 + 3  # features and classes
    assert record.bytes_up == 3 * 2 * 8 * width * (width + 1) // 2
    assert record.losses == {}


@pytest.mark.parametrize("standardise", ["federation", "domain", "none"])
def test_the_model_has_the_same_bits_for_any_partition(tiny: Callable[..., Config], standardise: str) -> None:
    settings = (*ONE, f"algorithm.standardise={standardise}")
    models = [
        train_model(tiny("fedcirone", *settings, *partition))
        for partition in (
            (),
            ("partition.scheme=dirichlet", "partition.clients=7", "partition.beta=0.1"),
            ("partition.scheme=dirichlet", "partition.clients=12", "partition.beta=100"),
        )
    ]
    for other in models[1:]:
        assert other.keys() == models[0].keys()
        assert all(torch.equal(tensor, models[0][name]) for name, tensor in other.items() if "site" not in name)
        order = models[0]["encoder.site_keys"].argsort(), other["encoder.site_keys"].argsort()
        for name in ("encoder.site_keys", "encoder.site_means", "encoder.site_scales"):
            assert torch.equal(models[0][name][order[0]], other[name][order[1]])


def test_the_head_is_ridge_regression_on_all_features_standardised(tiny: Callable[..., Config]) -> None:
    config = tiny("fedcirone", *ONE, "algorithm.standardise=federation", "algorithm.penalty=0.01")
    with open_run(config) as (session, rounds):
        list(rounds)
        model, clients = session.state.shared["model"], session.roster.clients
        data = [c.train.batch(np.arange(len(c.train)), torch.device("cpu"), torch.contiguous_format) for c in clients]
    z = torch.cat([x for x, _ in data]).double().numpy()
    labels = torch.cat([y for _, y in data]).numpy()
    spread = np.where(z.std(0) > 1e-6, z.std(0), 1.0)
    standardised = (z - z.mean(0)) / spread
    targets = np.eye(labels.max() + 1)[labels]
    pooled = Ridge(alpha=0.01 * len(z)).fit(standardised, targets)
    scale = float(np.linalg.norm(model["head.weight"].numpy()) / np.linalg.norm(pooled.coef_))  # calibrates the outputs
    assert np.allclose(model["head.weight"].numpy() / scale, pooled.coef_, atol=1e-5)
    assert np.allclose(model["head.bias"].numpy() / scale, pooled.intercept_, atol=1e-5)


def test_a_domain_is_predicted_by_its_own_statistics(tiny: Callable[..., Config]) -> None:
    config = tiny("fedcirone", *ONE, "algorithm.standardise=domain")
    with open_run(config) as (session, rounds):
        list(rounds)
        model, client = session.state.shared["model"], session.roster.clients[1]
        x, _ = client.train.batch(np.arange(len(client.train)), torch.device("cpu"), torch.contiguous_format)
    row = model["encoder.site_keys"].tolist().index(site_key("domain", client.domain, 1))
    assert torch.allclose(model["encoder.site_means"][row], x.mean(0), atol=1e-5)
    encoder = StandardisedEncoder(torch.nn.Identity(), x.shape[1])
    encoder.load_state_dict({n.removeprefix("encoder."): t for n, t in model.items() if n.startswith("encoder.")})
    z = encoder(x, [site_key("domain", client.domain, 1)])
    assert z.mean(0).abs().max() < 1e-4


def test_evaluation_and_prediction_use_the_saved_statistics(tiny: Callable[..., Config], tmp_path: Path) -> None:
    train_model(tiny("fedcirone", *ONE, "algorithm.standardise=client"), tmp_path / "run")
    run = load_run(tmp_path / "run")
    size, channels = run.card["image_size"], run.card["channels"]
    images = np.random.default_rng(0).integers(0, 255, (2, size, size, channels), np.uint8)
    own, general = (Predictor(tmp_path / "run", site=site)(images) for site in ("pen", None))
    assert [p.probability for p in own] != [p.probability for p in general]


def test_sums_that_no_examples_have_are_dropped(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedCiROne(), rounds=1)
    algorithm, ctx = session.algorithm, session.context(1)
    (reply,) = transport.train(session.state, [0])
    assert algorithm.find_reply_fault(reply, ctx) is None
    sums = reply.tensors["sums"]
    for name, change, reason in (
        ("train_high", -sums["train_high"], "not those of any examples"),
        ("train_low", sums["train_low"] - 1, "not those of any examples"),
        ("train_high", sums["train_high"] * 2, "examples, not 12"),
    ):
        wrong = replace(reply, tensors={"sums": {**sums, name: change}})
        assert reason in str(algorithm.find_reply_fault(wrong, ctx))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("server.aggregation=median", "server.aggregation=median"),
        ("server.upload=int8", "server.upload=int8"),
        ("privacy.clip=1.0", "set privacy.unit=example and privacy.noise"),
    ],
)
def test_settings_about_changes_to_a_model_are_refused(tiny: Callable[..., Config], setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message), open_run(tiny("fedcirone", *ONE, setting)):
        pass


NOISED = (*ONE, "algorithm.project=5", "privacy.unit=example", "privacy.clip=1")


def test_noised_sums_have_the_epsilon_of_one_gaussian_mechanism(tiny: Callable[..., Config], tmp_path: Path) -> None:
    with open_run(tiny("fedcirone", *NOISED, "privacy.noise=3.7307"), tmp_path / "run") as (session, rounds):
        (record,) = rounds
    assert record.epsilon == pytest.approx(1.0, abs=1e-4)  # the analytic Gaussian mechanism at delta 1e-5
    assert session.guarantee is not None
    assert session.guarantee["unit"] == "example"
    assert session.guarantee["place"] == "client"
    assert not (tmp_path / "run" / "calibration.json").exists()
    card = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert card["privacy"]["epsilon"] == record.epsilon
    size, channels = session.roster.card["image_size"], session.roster.card["channels"]
    assert len(Predictor(tmp_path / "run")(np.zeros((2, size, size, channels), np.uint8))) == 2


def test_a_noised_message_holds_training_sums_only(tiny: Callable[..., Config]) -> None:
    config = tiny("fedcirone", *NOISED, "privacy.noise=1")
    federation, algorithm = open_federation(config), make_algorithm(config.algorithm)
    session = open_session(config, algorithm, federation)
    transport = SerialTransport(make_trainer(session.config, algorithm, federation.builder), federation.clients)
    first, again = (next(iter(transport.train(session.state, [0]))).tensors["sums"] for _ in range(2))
    assert sorted(first) == ["train_high", "train_low"], "validation images have no noise of their own"
    assert torch.equal(first["train_high"], again["train_high"]), "a simulated run can be repeated"
    transport.trainer.deployed = True
    assert not torch.equal(
        first["train_high"], next(iter(transport.train(session.state, [0]))).tensors["sums"]["train_high"]
    )


def test_little_noise_leaves_the_head_as_it_is(tiny: Callable[..., Config]) -> None:
    accuracies = []
    for noise in (("privacy.noise=0.01",), ()):
        settings = (*NOISED, *noise) if noise else (*ONE, "algorithm.project=5", "algorithm.penalty=0.01")
        with open_run(tiny("fedcirone", *settings, "algorithm.standardise=domain")) as (_, rounds):
            (record,) = rounds
        accuracies.append(record.accuracy_mean)
    assert accuracies[0] is not None
    assert accuracies[0] > 0.5  # of three classes
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("algorithm.project=0",), "algorithm.project, such as 512"),
        (("privacy.clip=2",), "privacy.clip=1, the length"),
        (("algorithm.head=lda",), "algorithm.head=ridge"),
        (("algorithm.balance=domains",), "algorithm.balance=none"),
    ],
)
def test_settings_that_noise_does_not_suit_are_refused(
    tiny: Callable[..., Config], settings: tuple[str, ...], message: str
) -> None:
    config = tiny("fedcirone", *NOISED, "privacy.noise=1", *settings)
    with pytest.raises(InputError, match=message), open_run(config):
        pass


def test_labels_are_balanced_by_the_discriminant_only() -> None:
    with pytest.raises(InputError, match="head=lda"):
        FedCiROne(balance="labels")
    assert FedCiROne(balance="labels", head="lda").head == "lda"


@pytest.mark.parametrize("standardise", ["federation", "client", "none"])
def test_domains_are_balanced_by_sums_of_each_domain_only(standardise: Any) -> None:
    with pytest.raises(InputError, match=rf"standardise={standardise} does not keep apart: set it to domain"):
        FedCiROne(balance="domains", standardise=standardise)


def test_balanced_domains_take_their_own_statistics(tiny: Callable[..., Config]) -> None:
    models = {}
    for settings in (("balance=domains",), ("balance=domains", "standardise=domain"), ("standardise=domain",)):
        with open_run(tiny("fedcirone", *ONE, *(f"algorithm.{setting}" for setting in settings))) as (session, rounds):
            list(rounds)
        models[settings] = session.model
    balanced, named, plain = models.values()
    assert len(plain["encoder.site_keys"]) == 3
    assert all(torch.equal(balanced[name], named[name]) for name in balanced)


@pytest.mark.parametrize("settings", [("algorithm.head=lda",), ("algorithm.balance=domains",)])
def test_every_kind_of_head_learns(tiny: Callable[..., Config], settings: tuple[str, ...]) -> None:
    with open_run(tiny("fedcirone", *ONE, *settings)) as (_, rounds):
        (record,) = rounds
    assert record.accuracy_mean is not None
    assert record.accuracy_mean > 0.5  # of three classes


def test_a_run_has_one_round_whatever_a_file_says_for_other_methods(tiny: Callable[..., Config]) -> None:
    with open_run(tiny("fedcirone", *ONE, "server.rounds=60", "server.eval_every=5")) as (_, rounds):
        (record,) = rounds
    assert record.accuracy_mean is not None
