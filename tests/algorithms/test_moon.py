"""MOON: the networks of a client's last round and of the server, beside the one that it trains."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedcir import FedAvg, Moon
from fedcir.algorithms import find_algorithm
from fedcir.models.builder import NetworkBuilder, make_module_builder
from fedcir.models.tensors import snapshot
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.types import LocalContext

Opened = Callable[..., tuple[Any, SerialTransport]]

TURNED = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
"""By a right angle."""


@pytest.mark.parametrize(
    ("everyone", "last", "expected"),
    [
        (torch.eye(2), TURNED, math.log(1 + math.exp(-2))),  # similarities of 1 and 0, over 0.5
        (TURNED, torch.eye(2), math.log(1 + math.exp(2))),
        (torch.eye(2), -torch.eye(2), math.log(1 + math.exp(-4))),
        (TURNED, -TURNED, math.log(2)),  # as far from one as from the other
    ],
)
def test_the_contrast_by_hand(everyone: torch.Tensor, last: torch.Tensor, expected: float) -> None:
    method = Moon(mu=3.0)
    modules = method.build(make_module_builder(nn.Linear(2, 2, bias=False), torch.zeros(2, 2), 2, None, seed=0))
    for name, weight in (("model", torch.eye(2)), ("global", everyone), ("last", last)):
        modules[name].encoder.weight.data = weight.clone()  # type: ignore[union-attr]
    kept = {"last": snapshot(modules["last"])}
    ctx = LocalContext(2, 4, 2, 2, {"model": snapshot(modules["global"])}, torch.Generator(), client_state=kept)
    losses = method.local_loss(modules, torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([0, 1]), ctx)
    assert losses.terms["contrast"].item() == pytest.approx(expected, rel=1e-5)
    assert losses.total.item() == pytest.approx(losses.terms["ce"].item() + 3 * expected, rel=1e-5)
    losses.total.backward()
    assert modules["global"].encoder.weight.grad is None  # type: ignore[union-attr]
    assert modules["last"].encoder.weight.grad is None  # type: ignore[union-attr]


def test_a_client_compares_with_the_model_it_received_and_the_one_it_came_to_last(
    opened: Opened, same_model: Callable[[Any, Any], bool]
) -> None:
    session, transport = opened(Moon())
    before = session.state
    first = {reply.client_id: reply.tensors["model"] for reply in transport.train(before, [0, 1, 2])}
    for client in (2, 0, 1):
        (reply,) = transport.train(type(before)(1, before.shared), [client])
        assert same_model(transport.trainer.modules["last"], first[client])
        assert same_model(transport.trainer.modules["global"], before.shared["model"])
        assert "loss/contrast" in reply.metrics


def test_moon_as_the_docs_write_it_is_this_one(
    trained: Callable[..., Any], same_model: Callable[[Any, Any], bool], tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    (tmp_path / "moon.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1], encoding="utf-8")
    theirs = find_algorithm(str(tmp_path / "moon.py"))(mu=2.0)
    assert same_model(trained(theirs), trained(Moon(mu=2.0)))
    assert not same_model(trained(theirs), trained(FedAvg()))


def test_features_are_compared_and_classified_after_a_projection_of_two_layers(builder: NetworkBuilder) -> None:
    model = Moon(projection=4).build(builder)["model"].eval()
    shapes = {name: list(p.shape) for name, p in model.encoder.projection.named_parameters()}
    assert shapes == {"0.weight": [6, 6], "0.bias": [6], "2.weight": [4, 6], "2.bias": [4]}
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    first, _, second = model.encoder.projection
    z = model.encoder.backbone(x) @ first.weight.T + first.bias
    z = z.clamp_min(0) @ second.weight.T + second.bias
    assert torch.allclose(model.encoder(x), z)
    assert torch.allclose(model(x), z @ model.head.weight.T + model.head.bias, atol=1e-6)


@pytest.mark.parametrize("batchnorm", ["average", "local"])
def test_moon_with_zero_mu_is_fedavg(opened: Opened, same_model: Callable[[Any, Any], bool], batchnorm: str) -> None:
    ends = []
    for method in (Moon(mu=0.0), FedAvg()):
        session, transport = opened(method, batchnorm=batchnorm)
        list(run_rounds(session, transport))
        ends.append(session.state.shared["model"])
    assert same_model(*ends)
