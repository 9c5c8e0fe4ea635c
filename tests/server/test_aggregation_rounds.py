"""Robust aggregation in whole rounds: which runs can have it, and methods that do more than average."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedcir.algorithms.algorithm import Algorithm
from fedcir.algorithms.centralized import Centralized
from fedcir.algorithms.fedavg import FedAvg
from fedcir.algorithms.fedcir import FedCiR
from fedcir.algorithms.fedfa import FedFA
from fedcir.algorithms.fedproto import FedProto
from fedcir.algorithms.fedsr import FedSR
from fedcir.algorithms.scaffold import Scaffold
from fedcir.conformance import Subject, _make_settings
from fedcir.errors import InputError
from fedcir.machine import use_threads
from fedcir.runtime.rounds import SerialTransport, step_server
from fedcir.runtime.session import Session, open_session


def stepped(algorithm: Algorithm, rounds: int = 2, **server: Any) -> Session:
    """A short run of four clients."""
    config, federation = _make_settings(Subject(algorithm), rounds=rounds)
    with use_threads(1):
        session = open_session(replace(config, server=replace(config.server, **server)), algorithm, federation)
        transport = SerialTransport(session.make_trainer(), federation.clients)
        for round in range(1, rounds + 1):
            cohort = session.cohort(round)
            session.state, _ = step_server(session, transport.train(session.state, cohort), cohort)
    return session


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [(FedCiR(), "krum"), (Scaffold(), "krum"), (FedFA(), "krum"), (FedSR(share_reference=True), "median")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_methods_that_do_more_than_average_take_a_robust_form(algorithm: Algorithm, form: str) -> None:
    state = stepped(algorithm, aggregation=form).state
    assert set(algorithm.trains) <= state.shared.keys()
    assert all(t.isfinite().all() for bag in state.shared.values() for t in bag.values() if t.is_floating_point())


def test_krum_gives_the_model_of_one_client_and_the_median_none() -> None:
    config, federation = _make_settings(Subject(FedAvg()), rounds=1)
    with use_threads(1):
        session = open_session(config, FedAvg(), federation)
        alone = [
            reply.tensors["model"]["head.weight"]
            for reply in SerialTransport(session.make_trainer(), federation.clients).train(session.state, range(4))
        ]
    for form, among in (("krum", 1), ("median", 0)):
        got = stepped(FedAvg(), rounds=1, aggregation=form).state.shared["model"]["head.weight"]
        assert sum(torch.equal(got, item) for item in alone) == among
    torch.testing.assert_close(got, torch.stack(alone).sort(0).values[1:3].mean(0))  # of four, the two in the middle


@pytest.mark.parametrize(
    ("algorithm", "server", "message"),
    [
        (
            FedAvg(),
            {"aggregation": "krum", "byzantine": 1},
            "krum needs 5 active clients, but there are 4: lower",
        ),
        (FedAvg(), {"aggregation": "krum", "active": 2}, "krum needs 3 active clients, but there are 2"),
        (FedAvg(), {"aggregation": "median", "active": 2}, "median needs 3 active clients, but there are 2"),
        (FedAvg(), {"aggregation": "median", "weighting": "samples"}, "does not weight clients: set server.weighting"),
        (FedAvg(), {"aggregation": "middle"}, "no aggregator 'middle'; choose from krum"),
        (FedProto(), {"aggregation": "median"}, "combines models, but .* shares none: set it to mean"),
    ],
)
def test_a_run_that_cannot_have_a_form_is_refused(algorithm: Algorithm, server: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        stepped(algorithm, **server)


def test_one_client_with_all_data_needs_no_form() -> None:
    plain, robust = (
        stepped(Centralized(), rounds=1, aggregation=form).state.shared["model"] for form in ("mean", "krum")
    )
    assert all(torch.equal(plain[name], robust[name]) for name in plain)


def test_pooled_statistics_need_a_rule_that_averages() -> None:
    config, federation = _make_settings(Subject(FedAvg()), rounds=1)
    pooled = replace(config.model, batchnorm="pooled")
    with pytest.raises(InputError, match=r"set model\.batchnorm=average"):
        open_session(
            replace(config, model=pooled, server=replace(config.server, aggregation="median")), FedAvg(), federation
        )
