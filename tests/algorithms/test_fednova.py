"""FedNova: clients that take different numbers of steps, and a mean that their numbers do not bias."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import FedAvg, FedNova
from fedcir.config import Config, LocalConfig, PrivacyConfig, RunConfig, ServerConfig
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, open_session

POINTS = ((2, 1.0, 0), (6, -2.0, 1), (3, 0.5, 1))
"""Images of each client, all alike, so that every batch of it has the same gradient: their number, value and class."""


def opened(
    algorithm: fedcir.Algorithm, sizes: Sequence[int] = (2, 6, 3), weighting: Any = "uniform", **local: Any
) -> tuple[Session, SerialTransport]:
    pairs = [
        (TensorDataset(torch.full((size, 1), x), torch.full((size,), y)),) * 2
        for size, (_, x, y) in zip(sizes, POINTS, strict=True)
    ]
    config = Config(
        local=LocalConfig(**{"batch_size": 2, "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, **local}),
        server=ServerConfig(rounds=3, weighting=weighting),
        run=RunConfig(device="cpu", layout="contiguous"),
    )
    federation = federation_from_datasets(pairs, nn.Flatten(), 2, None, 0)
    session = open_session(config, algorithm, federation)
    return session, SerialTransport(session.make_trainer(), federation.clients)


def weights(session: Session) -> np.ndarray:
    model = session.state.shared["model"]
    return np.stack([model["head.bias"].numpy(), model["head.weight"][:, 0].numpy()]).astype(float)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fednova_is_equation_8_of_its_paper(momentum: float, weighting: str) -> None:
    """Of 2, 6 and 3 images, two epochs in batches of 2 are 2, 6 and 3 steps."""
    session, transport = opened(FedNova(), weighting=weighting, epochs=2, momentum=momentum)
    w = weights(session)
    p = np.array([2, 6, 3]) / 11 if weighting == "samples" else np.full(3, 1 / 3)
    for _ in range(3):
        directions, norms = [], []
        for size, x, y in POINTS:
            end, velocity, length, counter = w.copy(), np.zeros_like(w), 0.0, 0.0
            for _ in range(size):  # as many steps
                odds = np.exp(end[0] + x * end[1])
                gradient = np.outer([1.0, x], odds / odds.sum() - np.eye(2)[y])
                velocity = momentum * velocity + gradient
                end = end - 0.5 * velocity
                counter = momentum * counter + 1  # the authors' way to ||a_i||_1
                length += counter
            directions.append((w - end) / (0.5 * length))
            norms.append(length)
        w = w - p @ norms * 0.5 * np.tensordot(p, directions, 1)
    records = list(run_rounds(session, transport))
    np.testing.assert_allclose(weights(session), w, atol=2e-6)
    one_step = next(run_rounds(*opened(FedAvg(), steps=1))).flops / 3
    assert records[0].flops == 11 * one_step


@pytest.mark.parametrize("local", [{"steps": 3, "momentum": 0.9}, {"epochs": 1, "momentum": 0.9}])
def test_where_all_take_as_many_steps_it_is_fedavg_bit_for_bit(local: dict[str, Any]) -> None:
    ends = []
    for method in (FedNova(), FedAvg()):
        session, transport = opened(method, sizes=(3, 4, 3), **local)
        list(run_rounds(session, transport))
        ends.append(weights(session))
    assert (ends[0] == ends[1]).all()


@pytest.mark.parametrize(("epochs", "images", "steps"), [(None, 7, 20), (1, 7, 2), (3, 7, 6), (1, 1, 1), (2, 4, 2)])
def test_epochs_give_each_client_its_own_number_of_steps(epochs: int | None, images: int, steps: int) -> None:
    assert LocalConfig(epochs=epochs, batch_size=4).count_steps(images) == steps


@pytest.mark.parametrize(
    ("algorithm", "local", "privacy", "message"),
    [
        ("centralized", {"epochs": 1}, {}, "local.epochs=1: centralized takes the steps of all clients"),
        ("fedcirone", {"epochs": 1}, {}, "local.epochs=1: clients of fedcirone take no steps; leave it out"),
        ("fedavg", {"epochs": 1}, {"unit": "example", "clip": 1.0, "noise": 1.0}, "privacy.unit=example accounts for"),
        ("fednova", {}, {"clip": 1.0}, "fednova needs each client's own update, and privacy.clip shows their mean"),
        ("fednova", {"optimizer": "adam"}, {}, "fednova computes with the steps of SGD"),
    ],
)
def test_epochs_and_fednova_are_refused_where_they_cannot_work(
    opened_config: Any, algorithm: str, local: dict[str, Any], privacy: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        opened_config(algorithm, LocalConfig(**local), PrivacyConfig(**privacy))


@pytest.fixture
def opened_config() -> Callable[..., None]:
    def open_(name: str, local: LocalConfig, privacy: PrivacyConfig) -> None:
        site = TensorDataset(torch.zeros(4, 2), torch.arange(4) % 2)
        federation = federation_from_datasets([(site, site)] * 2, nn.Linear(2, 3), 2, None, 0)
        algorithm = fedcir.algorithms.find_algorithm(name)()
        run = RunConfig(device="cpu", layout="contiguous")
        config = Config(local=local, privacy=privacy, run=run, algorithm=fedcir.config.AlgorithmConfig(name))
        open_session(config, algorithm, federation)

    return open_
