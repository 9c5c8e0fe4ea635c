"""Centralized: everybody's data in one place, as many steps as all clients together, or their batches as one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedcir
from fedcir import FedAvg
from fedcir.algorithms.centralized import Centralized
from fedcir.algorithms.centralizedbatch import CentralizedBatch
from fedcir.runtime.rounds import run_rounds
from fedcir.runtime.simulation import open_run


class Recorded(Dataset):
    """A Dataset that counts how often each of its samples is read."""

    def __init__(self, data: Dataset) -> None:
        self.data, self.read = data, Counter[int]()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read[i] += 1
        return self.data[i]


def counters(model: dict[str, Tensor]) -> list[int]:
    return [int(tensor) for name, tensor in model.items() if name.endswith("num_batches_tracked")]


@pytest.mark.parametrize(("active", "steps"), [(None, 3 * 3), (3, 3 * 3), (2, 2 * 3), (1, 3)])
def test_a_round_takes_as_many_steps_as_all_active_clients_together(
    opened: Callable[..., Any], active: int | None, steps: int
) -> None:
    session, transport = opened(Centralized(), steps=3, active=active)
    rounds = run_rounds(session, transport)
    for round in (1, 2):
        next(rounds)
        assert counters(session.state.shared["model"]) == [round * steps]


@pytest.mark.parametrize(("active", "batch"), [(None, 3 * 6), (2, 2 * 6), (1, 6)])
def test_as_one_batch_a_round_takes_a_clients_steps_on_the_images_of_all(
    opened: Callable[..., Any], active: int | None, batch: int
) -> None:
    session, transport = opened(CentralizedBatch(), steps=3, active=active)
    assert (transport.trainer.local.steps, transport.trainer.local.batch_size) == (3, batch)
    next(run_rounds(session, transport))
    assert counters(session.state.shared["model"]) == [3]


def test_one_client_trains_and_it_holds_all_the_data(opened: Callable[..., Any]) -> None:
    session, transport = opened(Centralized(), sizes=(12, 9, 7))
    assert session.roster.trainers == (0,)
    (reply,) = transport.train(session.state, session.roster.trainers)
    assert reply.num_examples == 28
    assert [client.train is None for client in transport.clients] == [False, True, True]


def test_its_batches_draw_from_everybodys_data_each_sample_as_often(
    vectors: Callable[..., Any], encoder: Callable[[], nn.Module]
) -> None:
    sites = [(Recorded(vectors(size, site)), vectors(10, site)) for site, size in enumerate((12, 9, 9))]
    # Three clients of two steps on five samples each: 30 samples, once over all there are.
    fedcir.train(
        sites,
        encoder=encoder(),
        num_classes=3,
        algorithm=Centralized(),
        rounds=1,
        local_steps=2,
        batch_size=5,
        workers=1,  # a worker process would count in its own memory
        device="cpu",
    )
    for site, _ in sites:
        site.read.subtract([0])  # looked at before training
        assert site.read == dict.fromkeys(range(len(site)), 1)


def test_it_is_tested_on_each_domain(vectors: Callable[..., Any], trained: Callable[..., Any]) -> None:
    result = trained(Centralized())
    want = {}
    for site in range(3):
        x, y = vectors(10, site).tensors
        want[f"client-{site}"] = float((result.model(x).argmax(-1) == y).double().mean())
    assert result.records[-1].accuracy == want


def test_nothing_travels(trained: Callable[..., Any]) -> None:
    for record in trained(Centralized()).records:
        assert (record.bytes_down, record.bytes_up) == (0, 0)
        assert record.flops > 0


def test_flops_of_a_round_are_those_of_all_clients_of_fedavg(trained: Callable[..., Any]) -> None:
    ceilings = Centralized(), CentralizedBatch()
    (plain,) = trained(FedAvg(), rounds=1).records
    assert [trained(ceiling, rounds=1).records[0].flops for ceiling in ceilings] == [plain.flops] * 2


def test_with_one_client_it_is_fedavg_bit_for_bit(trained: Callable[..., Any], same_model: Callable[..., bool]) -> None:
    pooled, plain = (trained(algorithm, sizes=(12,)) for algorithm in (Centralized(), FedAvg()))
    assert same_model(pooled, plain)
    assert same_model(trained(CentralizedBatch(), sizes=(12,)), plain)
    assert [record.losses for record in pooled.records] == [record.losses for record in plain.records]
    assert not same_model(trained(Centralized()), trained(FedAvg()))


def test_a_held_out_domain_is_not_pooled(tiny: Callable[..., Any]) -> None:
    with open_run(tiny("centralized", "partition.hold_out=ink", "server.rounds=1")) as (session, rounds):
        (record,) = rounds
    assert list(record.accuracy or {}) == ["pen", "wax", "ink"]
    assert counters(session.state.shared["model"]) == [2 * 2] * 3  # two clients, two steps


def test_local_statistics_are_those_of_the_pooled_data(opened: Callable[..., Any]) -> None:
    session, transport = opened(Centralized(), batchnorm="local", rounds=1)
    assert [record.round for record in run_rounds(session, transport)] == [1]
