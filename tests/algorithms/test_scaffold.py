"""SCAFFOLD, written with the hooks alone: what a client remembers and what the server knows of all clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scaffold import Scaffold
from torch import nn
from torch.utils.data import TensorDataset

from fedcir import FedAvg
from fedcir.config import Config, LocalConfig, RunConfig, ServerConfig
from fedcir.conformance import check_algorithm
from fedcir.data.federation import federation_of
from fedcir.engine.rounds import run
from fedcir.engine.session import open_session
from fedcir.engine.transports.serial import SerialTransport

Opened = Callable[..., tuple[Any, SerialTransport]]

LR, STEPS, ROUNDS = 0.5, 3, 4
POINTS = (((1.0, -1.0), (0, 1)), ((2.0, 0.5), (1, 0)), ((-1.5, 1.0), (0, 0)))
"""Two numbers and their classes at each of three clients."""


def slope(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean cross-entropy of the logits x w_1 + w_0, each (2,); w is (2, 2)."""
    design = np.stack([np.ones_like(x), x], 1)  # (N, 2)
    odds = np.exp(design @ w)
    return design.T @ (odds / odds.sum(1, keepdims=True) - np.eye(2)[y]) / len(x)


def test_scaffold_is_algorithm_1_of_its_paper_with_option_2() -> None:
    clients = [(np.array(x), np.array(y)) for x, y in POINTS]
    pairs = [(TensorDataset(torch.tensor(x)[:, None].float(), torch.tensor(y)),) * 2 for x, y in clients]
    config = Config(
        local=LocalConfig(steps=STEPS, batch_size=2, lr=LR, momentum=0.0, weight_decay=0.0),
        server=ServerConfig(rounds=ROUNDS, active=2),
        run=RunConfig(device="cpu", layout="contiguous"),
    )
    session = open_session(config, Scaffold(), federation_of(pairs, nn.Flatten(), 2, None, 0))
    head = session.state.shared["model"]
    x = np.stack([head["head.bias"].numpy(), head["head.weight"][:, 0].numpy()]).astype(float)
    c, own = np.zeros_like(x), np.zeros((3, *x.shape))
    for round in range(1, ROUNDS + 1):
        ends, changes = [], []
        for i in session.cohort(round):
            y = x.copy()
            for _ in range(STEPS):
                y -= LR * (slope(y, *clients[i]) - own[i] + c)
            after = own[i] - c + (x - y) / (STEPS * LR)
            ends.append(y)
            changes.append(after - own[i])
            own[i] = after
        x, c = x + np.mean([y - x for y in ends], 0), c + len(ends) / 3 * np.mean(changes, 0)
    transport = SerialTransport(session.workbench(), session.roster.clients)  # type: ignore[attr-defined]
    list(run(session, transport))
    model, control = session.state.shared["model"], session.state.shared["control"]
    for found, expected in (
        (model, x),
        (control, c),
        *((transport.store.load(i, 9)["control"], own[i]) for i in (0, 1, 2)),
    ):
        assert np.allclose(found["head.bias"], expected[0], atol=1e-5)
        assert np.allclose(found["head.weight"][:, 0], expected[1], atol=1e-5)


def test_scaffold_keeps_the_promises_of_every_method() -> None:
    check_algorithm(Scaffold())


def test_scaffold_is_fedavg_in_its_first_round(opened: Opened, same_model: Callable[[Any, Any], bool]) -> None:
    ends = []
    for method in (Scaffold(), FedAvg()):
        session, transport = opened(method, rounds=1)
        list(run(session, transport))
        ends.append(session.state.shared["model"])
    assert same_model(*ends)


def test_what_a_client_remembers_is_in_no_upload(opened: Opened) -> None:
    session, transport = opened(Scaffold())
    for reply in transport.train(session.state, session.roster.trainers):
        assert reply.arrays.keys() == {"model", "change"}
        assert transport.store.load(reply.client_id, 2).keys() == {"control"}
