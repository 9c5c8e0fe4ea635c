"""`local_update`: a method's own local phase, on the batches and with the optimiser of the round."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedcir import Algorithm, FedAvg
from fedcir.algorithms.algorithm import Batch
from fedcir.client.local_update import train_client
from fedcir.client.uploads import check_example_privacy
from fedcir.config import AlgorithmConfig, Config, LocalConfig, PrivacyConfig, RunConfig, ServerConfig
from fedcir.conformance import check_algorithm
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.errors import InputError
from fedcir.models.optimizers import SGD, RoundOptimizer
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, open_session
from fedcir.tasks.classification import to_task
from fedcir.types import LocalContext, Modules

PAGE = Path(__file__).parents[2] / "docs" / "add-an-algorithm.md"


@dataclass(frozen=True)
class Doubled(Algorithm):
    """Takes each step twice, and notes what it was given."""

    seen: list[Any] = field(default_factory=list, init=False, compare=False)

    def local_update(
        self, modules: Modules, batches: Iterable[Batch], optimizer: RoundOptimizer, ctx: LocalContext
    ) -> dict[str, float]:
        self.seen.append(optimizer)
        pairs = chain.from_iterable(repeat(batch, 2) for batch in batches)
        return super().local_update(modules, pairs, optimizer, ctx)


def opened(algorithm: Algorithm, **local: Any) -> tuple[Session, SerialTransport]:
    rng = torch.Generator().manual_seed(0)
    site = TensorDataset(torch.randn(8, 4, generator=rng), torch.arange(8) % 3)
    config = Config(
        local=LocalConfig(**{"steps": 3, "batch_size": 4, **local}),
        server=ServerConfig(rounds=2),
        algorithm=AlgorithmConfig(type(algorithm).__name__.lower()),
        run=RunConfig(device="cpu", layout="contiguous"),
    )
    session = open_session(config, algorithm, federation_from_datasets([(site, site)], nn.Flatten(), 3, None, 0))
    return session, SerialTransport(session.make_trainer(), session.roster.clients)  # type: ignore[attr-defined]


def test_flops_are_those_of_the_methods_own_local_update() -> None:
    records = [next(run_rounds(*opened(method))) for method in (FedAvg(), Doubled())]
    assert records[1].flops == 2 * records[0].flops > 0
    assert opened(Doubled())[0].expected_flops() == records[1].flops


def test_the_optimizer_has_the_settings_of_the_round() -> None:
    method = Doubled()
    session, transport = opened(method, lr=0.25, momentum=0.5, weight_decay=0.125, clip_norm=2.0)
    client = transport.clients[0]
    reply, _ = train_client(transport.trainer, client, session.state.shared, {}, 1)
    optimizer = method.seen[-1]
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay, optimizer.clip_norm) == (0.25, 0.5, 0.125, 2.0)
    assert reply.metrics.keys() == {"loss/ce", "loss/total", "flops"}


def test_an_optimizer_of_other_parameters_has_the_same_settings_and_a_state_of_its_own() -> None:
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = RoundOptimizer(SGD([first]), lr=0.5, momentum=0.5, clip_norm=1.0)
    for part in (optimizer, optimizer, optimizer.with_parameters([second])):
        for parameter in (first, second):
            parameter.grad = torch.full((1,), 4.0)  # clipped to 1 where it is the optimiser's
        part.step()
    assert first.item() == pytest.approx(1 - 0.5 * (1 + 1.5), abs=1e-5)
    assert second.item() == pytest.approx(1 - 0.5, abs=1e-5)


def test_dp_sgd_refuses_a_method_with_a_local_phase_of_its_own() -> None:
    session, _ = opened(Doubled())
    privacy = PrivacyConfig(unit="example", clip=1.0, noise=1.0)
    with pytest.raises(InputError, match=r"doubled .* privacy.unit=example does not cover: use fedavg"):
        check_example_privacy(replace(session.config, privacy=privacy), Doubled(), to_task(3), session.modules["model"])


def test_the_sam_of_the_docs_gives_every_guarantee_and_is_sgd_where_rho_is_0() -> None:
    (code,) = re.findall(
        r"```python\n(.*?class Sam.*?)```", PAGE.read_text(encoding="utf-8").split("## A local phase")[1], re.S
    )
    names: dict[str, Any] = {"__name__": "sam"}
    exec(code, names)
    check_algorithm(names["Sam"]())
    ends = []
    for method in (names["Sam"](rho=0.0), FedAvg()):
        session, transport = opened(method)
        list(run_rounds(session, transport))
        ends.append(session.state.shared["model"])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
