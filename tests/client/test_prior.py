"""local.prior and local.balance: a client's own label shares correct its cross-entropy. An algorithm may set them."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.client.local_update import LocalTrainer, train_client
from fedcir.config import Config, LocalConfig, RunConfig
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder, make_module_builder
from fedcir.models.tensors import snapshot
from fedcir.runtime.session import open_session
from fedcir.types import LocalContext, ServerContext

LABELS = torch.tensor([0, 0, 0, 0, 0, 2])
SITE = TensorDataset(torch.eye(6), LABELS)


def trained(algorithm: Any, **options: Any) -> fedcir.Result:
    settings = {"num_classes": 3, "rounds": 2, "local_steps": 2, "batch_size": 6, "device": "cpu", "workers": 1}
    return fedcir.train([(SITE, SITE)], encoder=nn.Identity(), algorithm=algorithm, **settings, **options)


def same(one: fedcir.Result, other: fedcir.Result) -> bool:
    return all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


def first_loss(prior: Any = "none", balance: Any = "none", bias: float = 0.0) -> float:
    """The cross-entropy of a client's first step, on its six samples."""
    federation = federation_from_datasets([(SITE, SITE)], nn.Identity(), 3, None, 0)
    local = LocalConfig(steps=1, batch_size=6, prior=prior, balance=balance)
    config = Config(local=local, run=RunConfig(device="cpu", layout="contiguous"))
    session = open_session(config, fedcir.FedAvg(), federation)
    trainer: LocalTrainer = session.make_trainer()
    session.state.shared["model"]["head.weight"].zero_()
    session.state.shared["model"]["head.bias"].copy_(torch.tensor([bias, 0.0, 0.0]))
    reply, _ = train_client(trainer, federation.clients[0], session.state.shared, {}, 1)
    return reply.metrics["loss/ce"]


def test_under_equal_logits_the_loss_is_the_entropy_of_the_clients_own_labels() -> None:
    entropy = -(5 / 6 * math.log(5 / 6) + 1 / 6 * math.log(1 / 6))
    assert first_loss("client") == pytest.approx(entropy, rel=1e-6)
    assert first_loss("none") == pytest.approx(math.log(3), rel=1e-6)


def test_with_balance_every_class_that_a_client_holds_counts_alike() -> None:
    """Logits (log 2, 0, 0): the first class has a share of 1/2, the third of 1/4, whatever the samples."""
    assert first_loss(balance="classes", bias=math.log(2)) == pytest.approx((math.log(2) + math.log(4)) / 2, rel=1e-6)
    plain = (5 * math.log(2) + math.log(4)) / 6
    assert first_loss(bias=math.log(2)) == pytest.approx(plain, rel=1e-6)


def test_prior_and_balance_are_not_taken_together(fedcir: Any) -> None:
    with pytest.raises(InputError, match=r"local\.prior=client and local\.balance=classes both correct for the la"):
        LocalConfig(prior="client", balance="classes")
    output = fedcir("run", "--set", "local.balance=classes")  # the default algorithm has a prior
    assert output.code == 2
    assert output.err.endswith("set local.prior=none or local.balance=none\n")


def test_without_a_prior_the_cross_entropy_is_torchs_to_the_bit() -> None:
    logits, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    ctx = LocalContext(1, 1, 3, 4, {}, torch.Generator())
    assert torch.equal(ctx.cross_entropy(logits, y), F.cross_entropy(logits, y))


def test_a_class_that_a_client_does_not_hold_is_left_as_it_was_received() -> None:
    federation = federation_from_datasets([(SITE, SITE)], nn.Identity(), 3, None, 0)
    local = LocalConfig(steps=3, batch_size=6, prior="client", weight_decay=0.0)
    config = Config(local=local, run=RunConfig(device="cpu", layout="contiguous"))
    session = open_session(config, fedcir.FedAvg(), federation)
    before = session.state.shared["model"]["head.weight"].clone()
    reply, _ = train_client(session.make_trainer(), federation.clients[0], session.state.shared, {}, 1)
    moved = (reply.tensors["model"]["head.weight"] - before).abs().sum(1)
    assert [bool(row) for row in moved] == [True, False, True]


@pytest.fixture(scope="module")
def builder() -> NetworkBuilder:
    return make_module_builder(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.zeros(2, 6), 3, None, seed=0
    )


@pytest.mark.parametrize("name", list_algorithms())
def test_every_method_asks_its_context_for_the_cross_entropy_of_the_clients_own_data(
    name: str, builder: NetworkBuilder
) -> None:
    settings: list[Tensor] = []

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        settings.append(labels)
        return F.cross_entropy(logits, labels)

    algorithm = find_algorithm(name)()
    modules = algorithm.build(builder)
    state = algorithm.start(modules, ServerContext(0, 2, 3, 6, "uniform", "average", torch.Generator()))
    received = {**{group: snapshot(module) for group, module in modules.items()}, **state.shared}
    ctx = LocalContext(1, 2, 3, 6, received, torch.Generator(), labels=lambda: LABELS, loss=cross_entropy)
    algorithm.local_start(modules, ctx)
    algorithm.local_loss(modules, SITE.tensors[0], LABELS, ctx)
    assert [labels is LABELS for labels in settings] == [True]


def test_python_takes_the_algorithms_default_unless_told_otherwise() -> None:
    plain, corrected = trained("fedavg"), trained("fedavg", prior="client")
    assert not same(plain, corrected)
    assert same(trained("fedcirplus"), corrected)
    assert same(trained("fedcirplus", prior="none"), plain)


def test_a_prior_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match=r"local\.prior cannot be 'global'; choose from client, none"):
        trained("fedavg", prior="global")
