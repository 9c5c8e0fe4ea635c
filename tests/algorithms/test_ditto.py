"""Ditto: FedAvg's global model, and a personal one at each client that is drawn to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcir
from fedcir import Ditto, FedAvg
from fedcir.client.client_requests import evaluate_client
from fedcir.config import Config
from fedcir.inference.model import open_model
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.simulation import open_run

Opened = Callable[..., tuple[Any, SerialTransport]]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_ditto_is_algorithm_1_of_its_paper(line: Callable[..., Any], momentum: float) -> None:
    problem = line(Ditto(lambda_personal=0.3), rounds=4, steps=3, lr=0.5, momentum=momentum)
    w = problem.start
    personal: dict[int, np.ndarray] = {}
    for round in range(1, 5):
        ends = []
        for i in problem.session.cohort(round):
            end, v = w.copy(), personal.get(i, w).copy()
            velocity, own_velocity = np.zeros_like(w), np.zeros_like(w)
            for _ in range(3):
                own_velocity = momentum * own_velocity + problem.slope(v, i) + 0.3 * (v - w)
                velocity = momentum * velocity + problem.slope(end, i)
                v, end = v - 0.5 * own_velocity, end - 0.5 * velocity
            ends.append(end)
            personal[i] = v
        w = np.mean(ends, 0)
    list(run_rounds(problem.session, problem.transport))
    np.testing.assert_allclose(problem.of(problem.session.state.shared["model"]), w, atol=1e-5)
    assert len(personal) > 1
    for i, v in personal.items():
        np.testing.assert_allclose(problem.of(problem.transport.store.load(i, 9)["personal"]), v, atol=1e-5)


def test_the_global_model_is_fedavgs_bit_for_bit(
    trained: Callable[..., Any], same_model: Callable[[Any, Any], bool]
) -> None:
    ditto, fedavg = trained(Ditto()), trained(FedAvg())
    assert same_model(ditto, fedavg)
    models = [ditto.model_of(client) for client in ditto.own]
    assert len(models) == 3
    assert not same_model(models[0], models[1])
    assert not same_model(models[0], ditto.model)
    assert "personal" in ditto.records[-1].losses


def test_the_personal_model_is_in_no_upload_and_is_what_a_client_is_tested_with(
    opened: Opened, same_model: Callable[[Any, Any], bool]
) -> None:
    session, transport = opened(Ditto(), rounds=2, lr=0.1)
    trainer, client = transport.trainer, transport.clients[0]
    (reply,) = transport.train(session.state, [0])
    assert reply.tensors.keys() == {"model"}
    state = transport.store.load(0, 2)
    assert state.keys() == {"personal"}
    evaluate_client(trainer, client, session.state.shared, state, 1)
    assert same_model(trainer.modules["model"], state["personal"])
    evaluate_client(trainer, client, session.state.shared, {}, 1)
    assert same_model(trainer.modules["model"], session.state.shared["model"])


def test_a_saved_run_gives_a_sites_own_model_and_the_global_one_without_a_site(
    tiny: Callable[..., Config], tmp_path: Path, same_model: Callable[[Any, Any], bool]
) -> None:
    config = tiny("ditto", "server.rounds=1")
    with open_run(config, tmp_path / "run") as (session, rounds):
        list(rounds)
    (record,) = session.records
    assert {d.domain: d.accuracy for d in fedcir.evaluate(tmp_path / "run")} == pytest.approx(record.accuracy)
    domain = session.roster.clients[0].domain  # type: ignore[attr-defined]
    state = session.store.load(0, 9)["personal"]
    assert same_model(open_model(tmp_path / "run", site=domain).network, state)
    assert same_model(open_model(tmp_path / "run").network, session.state.shared["model"])
    assert not torch.equal(state["head.bias"], session.state.shared["model"]["head.bias"])
