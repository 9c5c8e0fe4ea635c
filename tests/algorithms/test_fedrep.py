"""FedRep: the head stays with the client, and is trained before the encoder."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import FedRep
from fedcir.config import Config, LocalConfig, RunConfig, ServerConfig
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError
from fedcir.models.builder import make_module_builder
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import open_session

Opened = Callable[..., tuple[Any, SerialTransport]]

HEAD = {"head.weight", "head.bias"}


def test_fedrep_is_algorithm_1_of_its_paper() -> None:
    """Three steps of each head and one of the encoder, two rounds, two clients whose batch is all their data."""
    points = (([[1.0, -1.0], [0.5, 2.0]], [0, 1]), ([[-1.5, 1.0], [2.0, 0.5]], [1, 0]))
    sites = [(TensorDataset(torch.tensor(x), torch.tensor(y)),) * 2 for x, y in points]
    torch.manual_seed(0)
    config = Config(
        local=LocalConfig(steps=4, batch_size=2, lr=0.5, momentum=0.5, weight_decay=0.0),
        server=ServerConfig(rounds=2),
        run=RunConfig(device="cpu", layout="contiguous"),
    )
    federation = federation_from_datasets(sites, nn.Linear(2, 3, bias=False), 2, None, 0)
    session = open_session(config, FedRep(tau=3.0), federation)
    transport = SerialTransport(session.make_trainer(), federation.clients)
    assert session.state.shared["model"].keys() == {"encoder.weight"}
    encoder = session.state.shared["model"]["encoder.weight"].numpy().astype(float)  # (3, 2)
    first = {name: t.numpy().astype(float) for name, t in transport.trainer.initial_state["batchnorm"].items()}
    heads = [(first["head.weight"], first["head.bias"])] * 2
    for _ in range(2):
        encoders = []
        for client, (x, y) in enumerate((np.array(x), np.array(y)) for x, y in points):
            (w, b), e = heads[client], encoder

            def slope(w: Any, b: Any, e: Any, x: Any = x, y: Any = y) -> Any:
                odds = np.exp(x @ e.T @ w.T + b)
                return (odds / odds.sum(1, keepdims=True) - np.eye(2)[y]) / 2  # (N, C)

            velocity = (np.zeros_like(w), np.zeros_like(b))
            for _ in range(3):
                g = slope(w, b, e)
                velocity = (0.5 * velocity[0] + g.T @ (x @ e.T), 0.5 * velocity[1] + g.sum(0))
                w, b = w - 0.5 * velocity[0], b - 0.5 * velocity[1]
            encoders.append(e - 0.5 * (slope(w, b, e) @ w).T @ x)
            heads[client] = w, b
        encoder = np.mean(encoders, 0)
    list(run_rounds(session, transport))
    np.testing.assert_allclose(session.state.shared["model"]["encoder.weight"], encoder, atol=1e-5)
    for client, (w, b) in enumerate(heads):
        state = transport.store.load(client, 9)["batchnorm"]
        np.testing.assert_allclose(state["head.weight"], w, atol=1e-5)
        np.testing.assert_allclose(state["head.bias"], b, atol=1e-5)


@pytest.mark.parametrize(("tau", "steps", "head", "encoder"), [(10.0, 20, 18, 2), (10.0, 3, 2, 1), (0.0, 3, 0, 3)])
def test_the_head_takes_tau_steps_for_each_of_the_encoder_which_takes_at_least_one(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tau: float, steps: int, head: int, encoder: int
) -> None:
    session, transport = opened(FedRep(tau=tau), rounds=1, steps=steps)
    trained = []

    def note(self: Any, modules: Any, x: Any, y: Any, ctx: Any) -> Any:
        trained.append([name for name, p in modules["model"].named_parameters() if p.requires_grad])
        return fedcir.Algorithm.local_loss(self, modules, x, y, ctx)

    transport.trainer.flops = {(("model",), (), steps): 1}  # counting calls it too
    monkeypatch.setattr(FedRep, "local_loss", note)
    list(transport.train(session.state, [0]))
    parts = [{name.partition(".")[0] for name in names} for names in trained]
    assert parts == [{"head"}] * head + [{"encoder"}] * encoder
    assert all(p.requires_grad for p in transport.trainer.modules["model"].parameters())


def test_the_head_is_in_no_upload_and_a_domain_is_tested_with_its_own(opened: Opened, trained: Any) -> None:
    session, transport = opened(FedRep(), rounds=2)
    for reply in transport.train(session.state, [0, 1, 2]):
        assert reply.tensors["model"].keys().isdisjoint(HEAD)
        assert transport.store.load(reply.client_id, 2)["batchnorm"].keys() == HEAD
    result = trained(FedRep(), rounds=2)
    models = [result.model_of(domain).state_dict() for domain in result.own]
    assert len(models) == 3
    assert not torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0].keys() - HEAD)


def test_a_client_that_has_not_trained_is_tested_with_the_shared_statistics(opened: Opened) -> None:
    session, transport = opened(FedRep(), rounds=1)
    shared = session.state.shared["model"]
    list(transport.evaluate(session.state, [0]))
    model = transport.trainer.modules["model"].state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in shared.items())


def test_a_frozen_encoder_and_a_domain_without_training_data_are_refused(
    vectors: Callable[..., Any], encoder: Callable[..., Any]
) -> None:
    builder = make_module_builder(nn.Flatten(), torch.zeros(2, 5), 3, None, seed=0)
    with pytest.raises(InputError, match=r"fedrep shares the encoder, but this one is frozen"):
        FedRep().build(builder)
    sites = {"here": (vectors(9, 0), vectors(6, 0)), "there": (None, vectors(6, 1))}
    with pytest.raises(InputError, match=r"fedrep needs training data at every client, but 'there' has none"):
        fedcir.train(sites, encoder=encoder(), num_classes=3, algorithm="fedrep", rounds=1)
