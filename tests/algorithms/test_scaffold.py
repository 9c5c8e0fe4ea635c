"""SCAFFOLD: what a client remembers, and what the server knows of all clients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import FedAvg
from fedcir.algorithms.scaffold import Scaffold, count_plain_steps
from fedcir.runtime.rounds import SerialTransport, run_rounds

Opened = Callable[..., tuple[Any, SerialTransport]]


@pytest.mark.parametrize(("server_lr", "momentum"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.9)])
def test_scaffold_is_algorithm_1_of_its_paper_with_option_2(
    line: Callable[..., Any], server_lr: float, momentum: float
) -> None:
    problem = line(Scaffold(server_lr=server_lr), rounds=4, steps=3, lr=0.5, momentum=momentum)
    x = problem.start
    c, own = np.zeros_like(x), np.zeros((3, *x.shape))
    for round in range(1, 5):
        ends, changes = [], []
        for i in problem.session.cohort(round):
            y, velocity = x.copy(), np.zeros_like(x)
            for _ in range(3):
                velocity = momentum * velocity + problem.slope(y, i) - own[i] + c
                y -= 0.5 * velocity
            after = own[i] - c + (x - y) / (0.5 * (1 + (1 + momentum) + (1 + momentum + momentum**2)))
            ends.append(y)
            changes.append(after - own[i])
            own[i] = after
        x, c = x + server_lr * np.mean([y - x for y in ends], 0), c + len(ends) / 3 * np.mean(changes, 0)
    list(run_rounds(problem.session, problem.transport))
    shared = problem.session.state.shared
    np.testing.assert_allclose(problem.of(shared["model"]), x, atol=1e-5)
    np.testing.assert_allclose(problem.of(shared["control"]), c, atol=1e-5)
    for i in range(3):
        np.testing.assert_allclose(problem.of(problem.transport.store.load(i, 9)["control"]), own[i], atol=1e-5)


def test_scaffold_ends_at_the_minimum_over_all_examples_where_clients_are_weighted_by_theirs() -> None:
    pairs = [
        TensorDataset(torch.ones(count, 1), torch.full((count,), value)) for count, value in ((10, 1.0), (30, 3.0))
    ]
    result = fedcir.train(
        [(data, data) for data in pairs],
        encoder=nn.Flatten(),
        task=fedcir.Regression(("y",)),
        algorithm=Scaffold(),
        set={"server.weighting": "samples"},
        **{"rounds": 30, "local_steps": 5, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "workers": 1},
    )
    assert result.model(torch.ones(1, 1)).item() == pytest.approx((10 * 1 + 30 * 3) / 40, abs=1e-4)


def test_count_plain_steps_without_momentum_are_the_steps_and_with_it_those_of_one_gradient() -> None:
    assert count_plain_steps(20, 0.0) == 20
    assert count_plain_steps(3, 0.5) == pytest.approx(1 + 1.5 + 1.75)


def test_scaffold_is_fedavg_in_its_first_round(opened: Opened, same_model: Callable[[Any, Any], bool]) -> None:
    ends = []
    for method in (Scaffold(), FedAvg()):
        session, transport = opened(method, rounds=1)
        list(run_rounds(session, transport))
        ends.append(session.state.shared["model"])
    assert same_model(*ends)


def test_what_a_client_remembers_is_in_no_upload(opened: Opened) -> None:
    session, transport = opened(Scaffold())
    for reply in transport.train(session.state, session.roster.trainers):
        assert reply.tensors.keys() == {"model", "change"}
        assert transport.store.load(reply.client_id, 2).keys() == {"control"}
