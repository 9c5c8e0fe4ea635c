"""Sites of a few vectors each, for tests that look closely at one method."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.config import AlgorithmConfig, Config, LocalConfig, ModelConfig, RunConfig, ServerConfig
from fedcir.data.federation import pool_clients
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.models.builder import NetworkBuilder, make_module_builder
from fedcir.runtime.resolution import get_hyper_parameters
from fedcir.runtime.rounds import SerialTransport
from fedcir.runtime.session import Session, open_session
from fedcir.types import ClientReply, ServerContext, Tensors

CLASSES = 3


def _vectors(size: int, site: int) -> TensorDataset:
    """Three classes, each a corner of its own, on a ground that differs from site to site."""
    labels = torch.arange(size) % CLASSES
    noise = 0.3 * torch.randn(size, 5, generator=torch.Generator().manual_seed(100 * site + size))
    return TensorDataset(torch.eye(5)[labels] + noise + 0.5 * site, labels)


def _encoder() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU())


def _sites(sizes: Sequence[int]) -> list[tuple[TensorDataset, TensorDataset]]:
    return [(_vectors(size, site), _vectors(10, site)) for site, size in enumerate(sizes)]


@pytest.fixture(scope="session")
def vectors() -> Callable[[int, int], TensorDataset]:
    return _vectors


@pytest.fixture(scope="session")
def encoder() -> Callable[[], nn.Module]:
    """Vectors of 5 to 6 features, with a BatchNorm between."""
    return _encoder


@pytest.fixture(scope="session")
def builder() -> NetworkBuilder:
    return make_module_builder(_encoder(), torch.zeros(2, 5), CLASSES, None, seed=0)


@pytest.fixture(scope="session")
def trained() -> Callable[..., fedcir.Result]:
    """fedcir.train on three sites: `trained(FedProx(mu=0.0), rounds=2)`."""

    def run(algorithm: fedcir.Algorithm, *, sizes: Sequence[int] = (12, 9, 7), **options: Any) -> fedcir.Result:
        settings = {"num_classes": CLASSES, "rounds": 3, "local_steps": 3, "batch_size": 6, "device": "cpu"}
        settings |= {"workers": 1, **options}
        return fedcir.train(_sites(sizes), encoder=_encoder(), algorithm=algorithm, **settings)

    return run


@pytest.fixture(scope="session")
def opened() -> Callable[..., tuple[Session, SerialTransport]]:
    """The same before its first round, with what carries its messages."""

    def open_(
        algorithm: fedcir.Algorithm,
        *,
        sizes: Sequence[int] = (12, 9, 7),
        rounds: int = 4,
        steps: int = 3,
        active: int | None = None,
        lr: float = 0.01,
        seed: int = 0,
        batchnorm: Any = "average",
    ) -> tuple[Session, SerialTransport]:
        config = Config(
            model=ModelConfig(batchnorm=batchnorm),
            local=LocalConfig(steps=steps, batch_size=6, lr=lr),
            server=ServerConfig(rounds=rounds, active=active),
            algorithm=AlgorithmConfig(type(algorithm).__name__.lower(), get_hyper_parameters(algorithm)),
            run=RunConfig(seed=seed, device="cpu", layout="contiguous"),
        )
        federation = federation_from_datasets(_sites(sizes), _encoder(), CLASSES, None, seed)
        federation = pool_clients(federation) if algorithm.pools else federation
        session = open_session(config, algorithm, federation)
        return session, SerialTransport(session.make_trainer(), federation.clients)

    return open_


class Line:
    """Logits x w_1 + w_0 of two numbers at each of three clients, beside the same in numpy, where w is (2, 2)."""

    points = (((1.0, -1.0), (0, 1)), ((2.0, 0.5), (1, 0)), ((-1.5, 1.0), (0, 0)))

    def __init__(self, algorithm: fedcir.Algorithm, rounds: int, steps: int, lr: float, momentum: float) -> None:
        self.clients = [(np.array(x), np.array(y)) for x, y in self.points]
        pairs = [(TensorDataset(torch.tensor(x)[:, None].float(), torch.tensor(y)),) * 2 for x, y in self.clients]
        config = Config(
            local=LocalConfig(steps=steps, batch_size=2, lr=lr, momentum=momentum, weight_decay=0.0),
            server=ServerConfig(rounds=rounds, active=2),
            run=RunConfig(device="cpu", layout="contiguous"),
        )
        federation = federation_from_datasets(pairs, nn.Flatten(), 2, None, 0)
        self.session = open_session(config, algorithm, federation)
        self.transport = SerialTransport(self.session.make_trainer(), federation.clients)
        self.start = self.of(self.session.state.shared["model"])

    @staticmethod
    def of(bag: dict[str, torch.Tensor]) -> np.ndarray:
        """w from what is named as the model is."""
        return np.stack([bag["head.bias"].numpy(), bag["head.weight"][:, 0].numpy()]).astype(float)

    def slope(self, w: np.ndarray, client: int) -> np.ndarray:
        """The gradient of a client's mean cross-entropy."""
        x, y = self.clients[client]
        design = np.stack([np.ones_like(x), x], 1)  # (N, 2)
        odds = np.exp(design @ w)
        return design.T @ (odds / odds.sum(1, keepdims=True) - np.eye(2)[y]) / len(x)


@pytest.fixture(scope="session")
def line() -> Callable[..., Line]:
    """A problem of four numbers, whose every batch is all data of a client: `line(Scaffold(), rounds=4)`."""

    def open_(
        algorithm: fedcir.Algorithm, rounds: int = 4, steps: int = 3, lr: float = 0.5, momentum: float = 0.0
    ) -> Line:
        return Line(algorithm, rounds, steps, lr, momentum)

    return open_


@pytest.fixture(scope="session")
def after_rounds() -> Callable[..., list[Tensors]]:
    """The model after each round of a server whose clients reply with these numbers: weight, mean and count alike.

    It starts at 1, in a network of one weight under a BatchNorm without any.
    """

    def step(algorithm: fedcir.Algorithm, rounds: Sequence[Sequence[float]]) -> list[Tensors]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
        nn.init.ones_(model[0].weight)
        ctx = ServerContext(0, len(rounds), 2, 4, "uniform", "average", torch.Generator(), clients=len(rounds[0]))
        state, ends = algorithm.start({"model": model}, ctx), []
        for number, values in enumerate(rounds, start=1):
            replies = [ClientReply(i, 1, {"model": _filled(model, value)}, {}) for i, value in enumerate(values)]
            state = algorithm.server_step(state, replies, {"model": model}, replace(ctx, round=number))
            ends.append(state.shared["model"])
        return ends

    return step


def _filled(model: nn.Module, value: float) -> Tensors:
    return {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="session")
def same_model() -> Callable[[Any, Any], bool]:
    """Whether two results, modules or bags of tensors are equal bit for bit."""

    def bag(holder: Any) -> dict[str, torch.Tensor]:
        if isinstance(holder, fedcir.Result):
            holder = holder.model
        return dict(holder.state_dict() if isinstance(holder, nn.Module) else holder)

    def compare(a: Any, b: Any) -> bool:
        first, second = bag(a), bag(b)
        return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    return compare
