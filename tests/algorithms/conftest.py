"""Sites of a few vectors each, for tests that look closely at one method."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir.config import AlgorithmConfig, Config, LocalConfig, ModelConfig, RunConfig, ServerConfig
from fedcir.data.federation import federation_of, pooled
from fedcir.engine.session import Session, hyper_parameters, open_session
from fedcir.engine.transports.serial import SerialTransport
from fedcir.models.task import Task, module_task

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
def task() -> Task:
    return module_task(_encoder(), torch.zeros(2, 5), CLASSES, None, seed=0)


@pytest.fixture(scope="session")
def trained() -> Callable[..., fedcir.Result]:
    """fedcir.train on three sites: `trained(FedProx(mu=0.0), rounds=2)`."""

    def run(algorithm: fedcir.Algorithm, *, sizes: Sequence[int] = (12, 9, 7), **options: Any) -> fedcir.Result:
        settings = {"num_classes": CLASSES, "rounds": 3, "local_steps": 3, "batch_size": 6, "device": "cpu", **options}
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
            algorithm=AlgorithmConfig(type(algorithm).__name__.lower(), hyper_parameters(algorithm)),
            run=RunConfig(seed=seed, device="cpu", layout="contiguous"),
        )
        federation = federation_of(_sites(sizes), _encoder(), CLASSES, None, seed)
        federation = pooled(federation) if algorithm.pools else federation
        session = open_session(config, algorithm, federation)
        return session, SerialTransport(session.workbench(), federation.clients)

    return open_


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
