"""FedProx: half the squared distance to what was received, and FedAvg without it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedcir import FedAvg, InputError
from fedcir.algorithms.fedprox import FedProx
from fedcir.models.builder import NetworkBuilder
from fedcir.models.tensors import snapshot
from fedcir.types import LocalContext, Modules


@pytest.fixture
def modules(builder: NetworkBuilder) -> Modules:
    return FedProx().build(builder)


@pytest.fixture
def ctx(modules: Modules) -> LocalContext:
    """The weights as built are what the client received."""
    return LocalContext(1, 4, 3, 6, {"model": snapshot(modules["model"])}, torch.Generator().manual_seed(0))


def nudge(modules: Modules) -> None:
    """Move a few trainable weights, by a squared distance of 18."""
    model = modules["model"]
    with torch.no_grad():
        model.head.bias += torch.tensor([1.0, 2.0, 3.0])
        model.encoder[0].weight[0, 0] += 2.0


X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def test_fedprox_with_zero_mu_is_fedavg(trained: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    plain = trained(FedAvg())
    assert same_model(trained(FedProx(mu=0.0)), plain)
    assert not same_model(trained(FedProx(mu=0.5)), plain)


def test_fedprox_with_zero_mu_reports_no_proximal_term(trained: Callable[..., Any]) -> None:
    assert trained(FedProx(mu=0.0), rounds=1).records[0].losses.keys() == {"ce", "total"}


def test_the_term_is_half_the_squared_distance_over_encoder_and_head(modules: Modules, ctx: LocalContext) -> None:
    nudge(modules)
    losses = FedProx(mu=0.5).local_loss(modules, X, Y, ctx)
    assert losses.terms.keys() == {"ce", "proximal"}
    assert losses.terms["proximal"].item() == pytest.approx(9.0, rel=1e-6)
    assert losses.total.item() == pytest.approx(losses.terms["ce"].item() + 0.5 * 9.0, rel=1e-6)


def test_the_anchor_is_what_was_received_not_where_the_weights_were_before(modules: Modules, ctx: LocalContext) -> None:
    for times in (1, 2, 3):
        nudge(modules)
        losses = FedProx().local_loss(modules, X, Y, ctx)
        assert losses.terms["proximal"].item() == pytest.approx(9.0 * times**2, rel=1e-6)


def test_running_statistics_are_not_trained_and_do_not_count(modules: Modules, ctx: LocalContext) -> None:
    modules["model"].encoder[1].running_mean += 5.0
    assert FedProx().local_loss(modules, X, Y, ctx).terms["proximal"].item() == 0.0


def test_the_gradient_of_the_term_is_the_distance_itself(modules: Modules, ctx: LocalContext) -> None:
    nudge(modules)
    FedProx().local_loss(modules, X, Y, ctx).terms["proximal"].backward()
    model = modules["model"]
    torch.testing.assert_close(model.head.bias.grad, torch.tensor([1.0, 2.0, 3.0]))
    want = torch.zeros(6, 5)
    want[0, 0] = 2.0
    torch.testing.assert_close(model.encoder[0].weight.grad, want)


def test_the_first_step_is_fedavgs_and_the_second_is_not(
    opened: Callable[..., Any], same_model: Callable[..., bool]
) -> None:
    def reply(algorithm: Any, steps: int) -> Any:
        session, transport = opened(algorithm, steps=steps)
        return next(iter(transport.train(session.state, [0])))

    one, two = reply(FedProx(mu=1.0), 1), reply(FedProx(mu=1.0), 2)
    assert one.metrics["loss/proximal"] == 0.0
    assert same_model(one.tensors["model"], reply(FedAvg(), 1).tensors["model"])
    assert not same_model(two.tensors["model"], reply(FedAvg(), 2).tensors["model"])
    # The mean over the two steps: nothing at the first, half the squared length of the first step at the second.
    session, _ = opened(FedProx())
    before, names = session.state.shared["model"], dict(session.modules["model"].named_parameters())
    squared = sum(float((one.tensors["model"][name] - before[name]).square().sum()) for name in names)
    assert two.metrics["loss/proximal"] == pytest.approx(0.5 * squared / 2, rel=1e-4)
    assert two.metrics["loss/proximal"] > 0


def test_every_round_has_the_anchor_of_that_round(trained: Callable[..., Any]) -> None:
    records = trained(FedProx(mu=0.5), local_steps=1).records
    assert [record.losses["proximal"] for record in records] == [0.0, 0.0, 0.0]


def test_a_large_mu_holds_clients_near_what_they_received(opened: Callable[..., Any]) -> None:
    moved = {}
    for mu in (0.0, 5.0):
        session, transport = opened(FedProx(mu=mu), steps=20, lr=0.05)
        (reply,) = transport.train(session.state, [0])
        moved[mu] = float((reply.tensors["model"]["head.weight"] - session.state.shared["model"]["head.weight"]).norm())
    assert moved[5.0] < moved[0.0] / 2


def test_a_client_uploads_its_model_and_nothing_else(opened: Callable[..., Any]) -> None:
    session, transport = opened(FedProx())
    assert [reply.tensors.keys() for reply in transport.train(session.state, [0, 1, 2])] == [{"model"}] * 3


@pytest.mark.parametrize("mu", [-0.1, -math.inf, math.inf, math.nan])
def test_a_mu_that_is_negative_or_no_number_is_refused(mu: float) -> None:
    with pytest.raises(InputError, match=rf"algorithm\.mu must be at (least 0|most 1,000,000), got {mu}"):
        FedProx(mu=mu)
