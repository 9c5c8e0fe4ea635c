"""What hooks are told and may keep: class counts, a client's own groups, a server's state for each client."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedcir import Algorithm, Losses
from fedcir.client.client_requests import evaluate_client
from fedcir.client.local_update import LocalTrainer, train_client
from fedcir.config import Config, LocalConfig, RunConfig, ServerConfig
from fedcir.conformance import check_algorithm
from fedcir.data.examples import PooledExamples
from fedcir.data.federation import Client
from fedcir.data.torch_datasets import federation_from_datasets
from fedcir.runtime.session import open_session
from fedcir.runtime.simulation import open_rounds
from fedcir.types import ClientReply, Groups, LocalContext, Modules, ServerContext, ServerState

LABELS = ([0, 0, 2, 2, 2, 1], [1, 1, 1, 1], [2, 0, 2, 0, 2])


@dataclass(frozen=True)
class Watching(Algorithm):
    """Notes what each hook is told, and remembers how often each client has trained."""

    remembers: ClassVar[tuple[str, ...]] = ("count",)
    told: list[tuple[str, LocalContext]] = field(default_factory=list, init=False, compare=False)

    def local_start(self, modules: Modules, ctx: LocalContext) -> None:
        assert not torch.is_grad_enabled()
        self.told.append(("start", ctx))

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        self.told.append(("loss", ctx))
        return super().local_loss(modules, x, y, ctx)

    def local_finish(self, modules: Modules, data: Iterable[tuple[Tensor, Tensor]], ctx: LocalContext) -> Groups:
        assert not any(module.training for module in modules.values())
        assert torch.equal(torch.bincount(torch.cat([y for _, y in data]), minlength=3), ctx.class_counts)
        self.told.append(("finish", ctx))
        done = ctx.client_state["count"]["rounds"] if ctx.client_state else torch.zeros(())
        return {"count": {"rounds": done + 1}}

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        self.told.append(("predict", ctx))
        return super().predict(modules, x, ctx)


class Pairs(Dataset[tuple[Tensor, int]]):
    """A Dataset that gives a label only with its input, and counts how often it was asked."""

    def __init__(self, labels: list[int]) -> None:
        self.labels, self.asked = labels, 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        self.asked += 1
        return torch.full((2,), float(position)), self.labels[position]


def config(**server: int) -> Config:
    return Config(
        local=LocalConfig(steps=2, batch_size=2, lr=0.25, schedule="cosine"),
        server=ServerConfig(**{"rounds": 4, **server}),
        run=RunConfig(device="cpu", layout="contiguous"),
    )


Opened = tuple[LocalTrainer, tuple[Client, ...], Groups]


def opened(algorithm: Algorithm, pairs: list[object] | None = None) -> Opened:
    sites = [TensorDataset(torch.randn(len(y), 2), torch.tensor(y)) for y in LABELS]
    federation = federation_from_datasets(pairs or [(site, site) for site in sites], nn.Flatten(), 3, None, 0)
    session = open_session(config(), algorithm, federation)
    return session.make_trainer(), federation.clients, session.state.shared


def test_a_client_knows_its_own_class_counts_in_training_and_in_evaluation() -> None:
    method = Watching()
    trainer, clients, shared = opened(method)
    for client, labels in zip(clients, LABELS, strict=True):
        method.told.clear()
        train_client(trainer, client, shared, {}, 1)
        evaluate_client(trainer, client, shared, {}, 1)
        assert {hook for hook, _ in method.told} == {"start", "loss", "finish", "predict"}
        for _, ctx in method.told:
            assert ctx.class_counts.tolist() == [labels.count(c) for c in range(3)]
            assert ctx.class_counts.dtype == torch.int64
            assert (ctx.steps, ctx.lr) == (2, 0.25)


def test_a_client_without_training_data_has_counted_nothing() -> None:
    method, site = Watching(), TensorDataset(torch.randn(4, 2), torch.arange(4) % 3)
    trainer, clients, shared = opened(method, [(site, site), (None, site)])
    evaluate_client(trainer, clients[1], shared, {}, 1)
    assert method.told[-1][1].class_counts.tolist() == [0, 0, 0]


def test_a_dataset_is_gone_through_once_for_its_labels_and_not_at_all_unless_they_are_asked_for() -> None:
    data = Pairs(LABELS[0])
    trainer, clients, shared = opened(Algorithm(), [(data, data)])
    data.asked = 0
    train_client(trainer, clients[0], shared, {}, 1)
    assert data.asked == 2 * 2  # batches of the steps
    examples = clients[0].train
    assert examples is not None
    data.asked = 0
    assert [examples.labels().tolist() for _ in range(3)] == [LABELS[0]] * 3
    assert data.asked == len(data)


def test_pooled_clients_count_together() -> None:
    _, clients, _ = opened(Algorithm())
    both = PooledExamples([client.train for client in clients if client.train is not None])
    assert both.labels().tolist() == [label for labels in LABELS for label in labels]


def test_the_hooks_of_a_round_come_in_order_and_each_client_finds_what_it_kept_itself() -> None:
    method = Watching()
    trainer, clients, shared = opened(method)
    _, kept = train_client(trainer, clients[0], shared, {}, 1)
    method.told.clear()
    _, again = train_client(trainer, clients[0], shared, kept, 2)
    train_client(trainer, clients[1], shared, {}, 2)
    evaluate_client(trainer, clients[0], shared, again, 2)
    hooks = [hook for hook, _ in method.told]
    assert [hooks[0], hooks[-2], hooks[-1]] == ["start", "finish", "predict"]
    seen = [
        float(ctx.client_state["count"]["rounds"]) if ctx.client_state else 0.0
        for hook, ctx in method.told
        if hook != "loss"
    ]
    assert seen == [1, 1, 0, 0, 2]
    assert method.told[0][1].lr == pytest.approx(0.25 * (1 + 0.5**0.5) / 2)  # a quarter of the cosine's half


@dataclass(frozen=True)
class Undeclared(Algorithm):
    def local_finish(self, modules: Modules, data: object, ctx: LocalContext) -> Groups:
        return {"secrets": {}}


@dataclass(frozen=True)
class Twice(Algorithm):
    remembers: ClassVar[tuple[str, ...]] = ("batchnorm",)


def test_what_a_client_keeps_must_be_declared_under_a_name_of_its_own() -> None:
    trainer, clients, shared = opened(Undeclared())
    with pytest.raises(TypeError, match=r"Undeclared.local_finish returned \['secrets'\], but the class declares \[\]"):
        train_client(trainer, clients[0], shared, {}, 1)
    with pytest.raises(TypeError, match=r"Twice.remembers names \['batchnorm'\], which clients already keep"):
        opened(Twice())


@dataclass(frozen=True)
class Tethered(Algorithm):
    """The server keeps each client's last head, and averages those of all clients it has ever heard of."""

    def server_step(
        self, state: ServerState, replies: Iterable[ClientReply], modules: Modules, ctx: ServerContext
    ) -> ServerState:
        private = dict(state.private)

        def keep(reply: ClientReply) -> None:
            private[f"heads/{reply.client_id}"] = {"bias": reply.tensors["model"]["head.bias"]}

        means, _ = self.merge(replies, ctx, keep)
        assert len(private) <= ctx.clients
        means["model"]["head.bias"] = torch.stack([bag["bias"] for bag in private.values()]).mean(0)
        return ServerState(ctx.round, means, dict(sorted(private.items())))


def test_a_server_keeps_a_state_for_each_client_and_a_resumed_run_has_it(tmp_path: Path) -> None:
    check_algorithm(Tethered())
    sites = [TensorDataset(torch.randn(6, 2), torch.arange(6) % 3) for _ in range(4)]
    federation = federation_from_datasets([(site, site) for site in sites], nn.Flatten(), 3, None, 0)
    for stop in (1, 4):
        with open_rounds(config(active=2), Tethered(), federation, tmp_path / "run", True) as (session, rounds):
            for record in rounds:
                if record.round == stop:
                    break
    heard = {client for round in range(1, 5) for client in session.cohort(round)}
    assert session.state.private.keys() == {f"heads/{client}" for client in heard}
