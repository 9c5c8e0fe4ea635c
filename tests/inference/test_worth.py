"""What each site of a run of FedCiROne gains and contributes, measured on real runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import fedcir
from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedcirone import site_keys
from fedcir.analysis import contribution
from fedcir.analysis.contribution import CoalitionHits, Worth
from fedcir.client.head_bank import collect_features
from fedcir.config import Config
from fedcir.data.federation import Federation, build_federation
from fedcir.errors import InputError
from fedcir.reporting import worth_report
from fedcir.runs.evaluation_data import open_run_data
from fedcir.runs.reader import RestoredModel, load_run, restore_model
from fedcir.server import coalitions
from fedcir.server.coalitions import Coalitions, Message, standardise_messages
from fedcir.types import ignore_progress

ONE = ("server.rounds=1", "model.freeze=true", "data.val_fraction=0.2", "algorithm.standardise=domain")
SPLIT = ("partition.scheme=dirichlet", "partition.clients=5", "partition.beta=1")


@pytest.fixture(scope="module")
def train_one(
    tiny: Callable[..., Config], train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    return lambda *settings: train(tiny("fedcirone", *ONE, *settings), tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def one(train_one: Callable[..., Path]) -> Path:
    return train_one()


@pytest.fixture(scope="module")
def five(train_one: Callable[..., Path]) -> Path:
    return train_one(*SPLIT)


def restore(path: Path) -> tuple[RestoredModel, Any, Federation]:
    run = load_run(path)
    config, domains, partitions = open_run_data(run)
    federation = build_federation(config, domains, partitions)
    algorithm = make_algorithm(config.algorithm)
    return restore_model(run, config, algorithm, federation.builder), algorithm, federation


def open_coalitions(path: Path) -> tuple[Coalitions, Federation]:
    restored, algorithm, federation = restore(path)
    messages = []
    for client in federation.clients:
        ctx = restored.load(client)
        sums = algorithm.local_summary(restored.trainer.modules, restored.trainer.iterate_batches(client.train), ctx)[
            "sums"
        ]
        messages.append(Message(client.domain, sums, site_keys(ctx)))
    return standardise_messages(algorithm, restored.trainer.modules["model"].encoder, messages), federation


def measure(path: Path) -> CoalitionHits:
    return contribution.measure_coalitions(*restore(path), ignore_progress)


def check_all_together(path: Path, worth: Worth) -> None:
    final = load_run(path).final
    assert worth.means["together"].value == pytest.approx(final["accuracy_mean"])
    for site in worth.sites:
        assert site.together.value == pytest.approx(final["accuracy"][site.site.split("(")[-1].rstrip(")")])


@pytest.mark.parametrize(
    "settings",
    [
        (),
        SPLIT,
        (*SPLIT, "algorithm.standardise=client"),
        ("algorithm.standardise=federation", "algorithm.head=lda"),
        ("algorithm.balance=domains", "data.val_fraction=0"),
    ],
    ids=" ".join,
)
def test_all_together_is_the_model_of_the_run(train_one: Callable[..., Path], settings: tuple[str, ...]) -> None:
    path = train_one(*settings)
    worth = fedcir.worth(path)
    if "algorithm.standardise=client" not in settings:  # then the run tests a domain at its first client only
        check_all_together(path, worth)
    total = sum(site.contribution.value for site in worth.sites)
    assert total + 1 / 3 == pytest.approx(worth.means["together"].value)
    assert worth.is_shapley
    assert len({site.site for site in worth.sites}) == (5 if SPLIT[0] in settings else 3)


def test_a_site_alone_and_the_others_are_ridge_regressions_on_their_own_standardised_features(one: Path) -> None:
    solved, federation = open_coalitions(one)
    z, targets = [], []
    for client in federation.clients:
        assert client.train is not None
        x, y = client.train.batch(np.arange(len(client.train)), torch.device("cpu"), torch.contiguous_format)
        features = x.double().numpy()
        spread = features.std(0)
        z.append((features - features.mean(0)) / np.where(spread > 1e-6, spread, 1))
        targets.append(np.eye(3)[y.numpy()])
    for members in ((1,), (0, 2)):
        path = solved.path(members)
        rows, labels = (np.concatenate([part[number] for number in members]) for part in (z, targets))
        ridge = Ridge(alpha=0.1 * len(rows)).fit(rows, labels)
        for head in (path.fit(0.1), path.fit_once(0.1)):
            assert np.allclose(head.weight.numpy(), ridge.coef_, atol=1e-4)
            assert np.allclose(head.bias.numpy(), ridge.intercept_, atol=1e-4)


def test_models_are_averaged_from_the_heads_of_the_others(five: Path) -> None:
    solved, federation = open_coalitions(five)
    results = measure(five)
    heads = []
    for number in range(1, 5):
        path = solved.path((number,))
        heads.append(path.fit(solved.select_penalty(path, (number,))))
    restored, _, _ = restore(five)
    features, labels = [], []
    for domain in dict.fromkeys(client.domain for client in federation.clients):
        client = next(client for client in federation.clients if client.domain == domain)
        assert client.test is not None
        x, y = collect_features(restored.trainer, client.test, restored.load(client))
        features.append(x)
        labels.append(y)
    z = torch.cat(features)
    logits = sum((z @ head.weight.float().T + head.bias.float() for head in heads), torch.zeros(3))
    assert np.array_equal(results.averaged[0], (logits.argmax(1) == torch.cat(labels)).numpy())


def test_above_the_limit_a_contribution_is_what_is_lost_without_the_site(
    five: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = fedcir.worth(five)
    for module in (coalitions, contribution, worth_report):
        monkeypatch.setattr(module, "MAX_PLAYERS", 4)
    worth = fedcir.worth(five)
    assert not worth.is_shapley
    assert any("what the mean loses without the site" in note for note in worth.notes)
    assert [site.gain for site in worth.sites] == [site.gain for site in exact.sites]
    results = measure(five)
    assert len(results.hits) == 11
    lost = results.hits[0, 1, 2, 3, 4] - results.hits[1, 2, 3, 4]
    rows = {site.domain: site.rows for site in results.sites}
    assert worth.sites[0].contribution.value == pytest.approx(np.mean([lost[part].mean() for part in rows.values()]))


def test_only_coalitions_in_between_use_fewer_directions(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = fedcir.worth(five)
    monkeypatch.setattr(coalitions, "WORK", 20 * 3**3)
    worth = fedcir.worth(five)
    assert "use the 3 directions of largest variance of the 128 features" in " ".join(worth.notes)
    assert worth.means == exact.means
    total = sum(site.contribution.value for site in worth.sites)
    assert total + 1 / 3 == pytest.approx(worth.means["together"].value)


@pytest.mark.parametrize("settings", [(), SPLIT], ids=["domains", "clients"])
def test_stored_sums_and_one_more_message_give_the_same_worth_as_the_images(
    train_one: Callable[..., Path], settings: tuple[str, ...]
) -> None:
    path = train_one("server.store_sums=true", *settings)
    root = load_run(path).config.data.root
    stored, computed = fedcir.worth(path), fedcir.worth(path, data_root=root)
    assert stored.to_json() == computed.to_json()
    assert (path / "sums").stat().st_mode & 0o077 == 0
    plain = train_one(*settings)
    assert (path / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_replies_of_a_domains_first_client_are_not_taken_for_those_of_clients_with_other_statistics(
    train_one: Callable[..., Path],
) -> None:
    path = train_one("server.store_sums=true", *SPLIT, "algorithm.standardise=client")
    with pytest.raises(InputError, match=r"standardises the images of 'ink' for each client.*: give data_root"):
        fedcir.worth(path)
    assert fedcir.worth(path, data_root=load_run(path).config.data.root).sites


def test_page_and_numbers_lie_in_the_folder_and_name_every_site(one: Path, tmp_path: Path) -> None:
    worth = fedcir.worth(one, out=tmp_path / "worth")
    assert worth.page is not None
    assert worth.numbers is not None
    numbers, page = json.loads(worth.numbers.read_text()), worth.page.read_text()
    assert numbers == worth.to_json()
    assert list(numbers["sites"]) == ["ink", "pen", "wax"]
    assert all(f"{site.site}: {site.verdict}." in page for site in worth.sites)


def test_runs_that_cannot_be_compared_are_refused(
    tiny: Callable[..., Config],
    train: Callable[..., Path],
    train_one: Callable[..., Path],
    write_domain: Callable[..., Path],
    tmp_path: Path,
) -> None:
    iterated = train(tiny("fedavg", "server.rounds=1"), tmp_path / "fedavg")
    with pytest.raises(InputError, match=r"is a run of fedavg: make one with `fedcir run --algorithm fedcirone"):
        fedcir.worth(iterated)
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("ink", "pen")):
        write_domain(tmp_path / "data" / f"{name}.npz", seed=number)
    single = train_one(f"data.root={tmp_path / 'data'}", "partition.hold_out=pen")
    with pytest.raises(InputError, match="one client with training images"):
        fedcir.worth(single)
    noise = ("algorithm.project=8", "privacy.unit=example", "privacy.noise=1", "privacy.clip=1", "data.val_fraction=0")
    with pytest.raises(InputError, match="have noise: make a run without"):
        fedcir.worth(train_one(*noise))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file: choose another folder"):
        fedcir.worth(iterated, out=tmp_path / "file")
