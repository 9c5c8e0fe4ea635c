"""FedLC: margins of tau n_y^(-1/4) off the logits in training, and plain logits in tests."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedcir import FedAvg, FedLC, InputError
from fedcir.losses import cross_entropy_to_others, label_margins
from fedcir.models.builder import NetworkBuilder
from fedcir.models.tensors import snapshot
from fedcir.types import LocalContext

LABELS = torch.tensor([0] * 16 + [1])  # class 2 has none
X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 0, 1, 0])


def test_margins_are_the_fourth_root_of_counts_upside_down() -> None:
    assert label_margins(torch.tensor([16, 1, 0]), 0.5).tolist() == pytest.approx([0.25, 0.5, 50.0])


def test_the_loss_to_the_others_leaves_the_true_class_out_of_the_sum() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0]]).log1p()  # odds of 3, 1 and 2
    assert cross_entropy_to_others(logits, torch.tensor([0])).item() == pytest.approx(math.log(3 / 3))
    assert cross_entropy_to_others(logits, torch.tensor([1])).item() == pytest.approx(math.log(5))
    assert cross_entropy_to_others(100 * logits, torch.tensor([0])).item() < -40  # no lower bound


@pytest.mark.parametrize("against", ["all", "others"])
def test_the_loss_is_the_papers_in_three_lines_of_numpy(builder: NetworkBuilder, against: Any) -> None:
    algorithm = FedLC(tau=0.5, against=against)
    modules = algorithm.build(builder)
    ctx = LocalContext(1, 4, 3, 6, {"model": snapshot(modules["model"])}, torch.Generator(), labels=lambda: LABELS)
    loss = algorithm.local_loss(modules, X, Y, ctx).total
    odds = np.exp(modules["model"](X).detach().double().numpy() - 0.5 * np.array([16.0, 1.0, 1e-8]) ** -0.25)
    own = odds[np.arange(6), Y]
    assert loss.item() == pytest.approx(-np.log(own / (odds.sum(1) - own * (against == "others"))).mean(), rel=1e-5)


def test_with_zero_tau_it_is_fedavg(trained: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    assert same_model(trained(FedLC(tau=0.0)), trained(FedAvg()))


def test_a_client_with_one_class_trains_to_finite_weights(opened: Callable[..., Any]) -> None:
    for against in ("all", "others"):
        session, transport = opened(FedLC(against=against), sizes=(1,))
        (reply,) = transport.train(session.state, [0])
        assert all(tensor.isfinite().all() for tensor in reply.tensors["model"].values())
        assert reply.tensors.keys() == {"model"}


def test_a_tau_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"algorithm\.tau must be at least 0, got -1"):
        FedLC(tau=-1.0)
