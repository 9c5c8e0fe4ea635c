"""Every method trains, on every backbone and the smallest of clients, from the same start and on the same batches."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcir.algorithms import find_algorithm, list_algorithms, make_algorithm
from fedcir.config import Config
from fedcir.data.examples import Examples, ImageExamples, Positions
from fedcir.data.federation import Federation, open_federation, pool_clients
from fedcir.models.tensors import find_non_finite
from fedcir.runtime.rounds import SerialTransport, run_rounds
from fedcir.runtime.session import Session, open_session
from fedcir.types import ClientReply, LocalContext, ServerState, Tensors
from kinds import mark_others_slow

Tiny = Callable[..., Config]

FEDERATED = [name for name in list_algorithms() if not find_algorithm(name).pools]


class Recorded:
    """Examples that note the positions of every batch."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.asked = examples, list[list[int]]()

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> Any:
        self.asked.append(positions.tolist())
        return self.examples.batch(positions, device, layout)

    def labels(self) -> Tensor:
        return self.examples.labels()


@pytest.fixture(scope="module")
def root_32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three domains of six images of 32 pixels."""
    root, rng = tmp_path_factory.mktemp("pixels"), np.random.default_rng(0)
    for name in ("ink", "pen", "wax"):
        images = {f"x_{part}": rng.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8) for part in ("train", "test")}
        np.savez(root / f"{name}.npz", **images, y_train=np.arange(6) % 3, y_test=np.arange(6) % 3)
    return root


def opened(config: Config, federation: Federation | None = None) -> tuple[Session, SerialTransport]:
    algorithm, federation = make_algorithm(config.algorithm), federation or open_federation(config)
    federation = pool_clients(federation) if algorithm.pools else federation
    session = open_session(config, algorithm, federation)
    return session, SerialTransport(session.make_trainer(), federation.clients)


def with_small_clients(config: Config) -> Federation:
    """The federation, of whose clients the second holds one class only and the third one sample."""
    federation = open_federation(config)
    whole, plain, single = federation.clients
    assert isinstance(plain.train, ImageExamples)
    assert isinstance(single.train, ImageExamples)
    plain.train.split = plain.train.split.take(np.flatnonzero(plain.train.split.labels == 2))
    single.train.split = single.train.split.take([0])
    return replace(federation, clients=(whole, plain, single))


def backbone(model: Tensors) -> Tensors:
    """The weights of the backbone, which probabilistic and standardised encoders wrap."""
    named = {re.sub(r"^(encoder\.)+(backbone\.)?", "", name): tensor for name, tensor in model.items()}
    others = ("head.", "gaussian.", "mean", "scale", "site_")
    return {name: tensor for name, tensor in named.items() if not name.startswith(others)}


def check(session: Session, transport: SerialTransport) -> None:
    """All rounds go through: nothing is dropped, everything is finite, every domain is tested on."""
    for record in run_rounds(session, transport):
        assert record.dropped == {}
        assert all(np.isfinite(value) for value in record.losses.values())
        assert list(record.accuracy or {}) == ["ink", "pen", "wax"]
    assert find_non_finite(session.state.shared) is None
    assert session.finished


@pytest.mark.parametrize("name", mark_others_slow(fast=["fedcir"]))
def test_every_method_trains_resnet18(tiny: Tiny, root_32: Path, name: str) -> None:
    # Narrow: in channels_last, oneDNN would write beyond its memory (uxlfoundation/oneDNN#6035).
    sizes = ("model.name=resnet18", "model.width=4", "local.steps=1", "server.rounds=1")
    check(*opened(tiny(name, f"data.root='{root_32}'", *sizes)))


@pytest.mark.parametrize("name", mark_others_slow(fast=["fedcir", "centralized"]))
def test_every_method_trains_the_cnn(tiny: Tiny, name: str) -> None:
    check(*opened(tiny(name)))


@pytest.mark.parametrize(
    "active",
    ["server.active=1 server.rounds=4", pytest.param("server.active=3 server.rounds=2", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", mark_others_slow(fast=["fedcir", "fedproc", "fedproto", "fedbn"]))
def test_every_method_trains_clients_of_one_class_and_of_one_sample(tiny: Tiny, name: str, active: str) -> None:
    config = tiny(name, *active.split(), "local.steps=1")
    check(*opened(config, with_small_clients(config)))


@pytest.mark.parametrize("name", ["fedgen", "fedproto"])
@pytest.mark.parametrize("alter", [lambda tensor: tensor[:1], None], ids=["shape", "name"])
def test_a_malformed_summary_is_dropped(tiny: Tiny, name: str, alter: Callable[[Tensor], Tensor] | None) -> None:
    session, transport = opened(tiny(name, "server.rounds=1"))

    class Altered(SerialTransport):
        def train(self, state: ServerState, cohort: Sequence[int]) -> Iterator[ClientReply]:
            for reply in super().train(state, cohort):
                if reply.client_id == 1:
                    (group,) = session.algorithm.sends
                    key = next(iter(reply.tensors[group]))
                    tensor = reply.tensors[group].pop(key)
                    reply.tensors[group][key if alter else "other"] = alter(tensor) if alter else tensor
                yield reply

    (record,) = run_rounds(session, Altered(transport.trainer, transport.clients))
    assert record.dropped.keys() == {"1"}


@pytest.mark.parametrize("policy", ["pooled", "local"])
@pytest.mark.parametrize("name", mark_others_slow(FEDERATED, ["fedcir", "scaffold"]))
def test_every_method_trains_under_every_policy_of_running_statistics(tiny: Tiny, name: str, policy: str) -> None:
    config = tiny(name, f"model.batchnorm={policy}", "server.active=1")
    check(*opened(config, with_small_clients(config)))


@pytest.mark.parametrize("model", ["model.name=cnn", "model.name=resnet18"])
def test_all_methods_of_one_seed_start_from_the_same_backbone_and_head(tiny: Tiny, model: str) -> None:
    sessions = {name: opened(tiny(name, model, "run.seed=7"))[0] for name in list_algorithms()}
    starts = {name: item.modules["model"].state_dict() | item.model for name, item in sessions.items()}
    first, other = starts["fedavg"], opened(tiny("fedavg", model, "run.seed=8"))[0].state.shared["model"]
    for name, start in starts.items():
        assert backbone(start).keys() == backbone(first).keys(), name
        assert all(torch.equal(tensor, backbone(first)[key]) for key, tensor in backbone(start).items()), name
        assert torch.equal(start["head.weight"], first["head.weight"]), name
    assert not torch.equal(other["head.weight"], first["head.weight"])


def test_all_methods_predict_the_same_before_training(tiny: Tiny) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ctx = LocalContext(1, 3, 3, 8, {}, torch.Generator())
    logits = {}
    for name in list_algorithms():
        session, _ = opened(tiny(name))
        modules = {key: module.eval() for key, module in session.modules.items()}
        with torch.no_grad():
            logits[name] = session.algorithm.predict(modules, images, ctx)
    for name, item in logits.items():
        torch.testing.assert_close(item, logits["fedavg"], msg=name)


def test_all_federated_methods_of_one_seed_draw_the_same_batches(tiny: Tiny) -> None:
    def settings(name: str, seed: int) -> dict[int, list[list[list[int]]]]:
        """By client, the batches of each round that it trains in, without what a method reads after its training."""
        config = tiny(name, f"run.seed={seed}", "server.rounds=2", "server.active=2")
        whole = open_federation(config)
        recorders = [Recorded(client.train) for client in whole.clients if client.train is not None]
        clients = tuple(replace(c, train=r) for c, r in zip(whole.clients, recorders, strict=True))
        session, transport = opened(config, replace(whole, clients=clients))
        drawn: dict[int, list[list[list[int]]]] = {number: [] for number in range(len(recorders))}
        for record in run_rounds(session, transport):
            for number, recorder in enumerate(recorders):
                trains = number in session.cohort(record.round)
                drawn[number].append(recorder.asked[: config.local.steps] if trains else [])
                recorder.asked.clear()
        return drawn

    reference = settings("fedavg", 0)
    assert {len(batch) for rounds in reference.values() for batches in rounds for batch in batches} == {8}
    assert sum(batches != [] for rounds in reference.values() for batches in rounds) == 4  # two clients, two rounds
    for name in FEDERATED:
        if not find_algorithm(name).one_shot:  # which takes no steps
            assert settings(name, 0) == reference, name
    assert settings("fedavg", 1) != reference
