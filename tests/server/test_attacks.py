"""Bad clients do what they are said to do, and the same again."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcir.algorithms.centralized import Centralized
from fedcir.algorithms.fedavg import FedAvg
from fedcir.config import AttackConfig, Config, config_from_tables
from fedcir.conformance import Subject, _make_settings
from fedcir.data.federation import Client
from fedcir.errors import InputError
from fedcir.flower.server_app import check_deployable
from fedcir.models.tensors import update_norm
from fedcir.runtime.simulation import open_rounds
from fedcir.server.attacks import (
    BRIGHT,
    PoisonedExamples,
    add_malicious_clients,
    add_patch,
    backdoor_success,
    tamper_reply,
)
from fedcir.tasks.classification import to_task
from fedcir.types import ClientReply

CPU = torch.device("cpu"), torch.contiguous_format
SENT = {"model": {"w": torch.ones(200, 200), "n.running_var": torch.ones(3), "n.num_batches_tracked": torch.tensor(1)}}
REPLY = ClientReply(
    3,
    10,
    {
        "model": {
            "w": torch.full((200, 200), 1.5),
            "n.running_var": torch.zeros(3),
            "n.num_batches_tracked": torch.tensor(2),
        }
    },
    {},
)


class Grey:
    """Ten images of zeros, of the classes 0 to 4."""

    def __len__(self) -> int:
        return 10

    def batch(self, positions: np.ndarray, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:  # type: ignore[type-arg]
        return torch.zeros(len(positions), 1, 5, 5), self.labels()[positions]

    def labels(self) -> Tensor:
        return torch.arange(10) % 5


def asked(kind: str, count: int = 1) -> AttackConfig:
    return config_from_tables({"attack": {"kind": kind, "clients": count}}).attack


def bad(kind: str, count: int = 1, seed: int = 0) -> list[Client]:
    clients = [Client(number, "d", Grey(), Grey()) for number in range(20)]
    made = add_malicious_clients(clients, asked(kind, count), ("model",), to_task(5), seed)
    return [after for before, after in zip(clients, made, strict=True) if after is not before]


def test_the_seed_draws_which_clients_are_bad() -> None:
    drawn = [[client.id for client in bad("scale", count=3, seed=seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 3


def test_label_flip_takes_the_next_class() -> None:
    (client,) = bad("label-flip")
    assert client.train is not None
    x, y = client.train.batch(np.array([0, 3, 4]), *CPU)
    assert y.tolist() == [1, 4, 0]
    assert not x.any()
    assert client.train.labels().tolist() == [1, 2, 3, 4, 0] * 2
    assert client.test is not None
    assert client.test.labels().tolist() == [0, 1, 2, 3, 4] * 2


def test_a_backdoor_patches_the_same_share_of_images_at_every_visit() -> None:
    (client,) = bad("backdoor")
    assert isinstance(client.train, PoisonedExamples)
    x, y = client.train.batch(np.arange(10), *CPU)
    chosen = torch.from_numpy(client.train.chosen)
    assert 0 < int(chosen.sum()) < 10
    assert torch.equal(x[:, 0, -3:, -3:].eq(BRIGHT).all(-1).all(-1), chosen)
    assert x.count_nonzero() == 9 * chosen.sum()
    assert torch.equal(y, torch.where(chosen, 0, Grey().labels()))


@pytest.mark.parametrize(("kind", "weight"), [("scale", 1 + 4 * 0.5), ("sign-flip", 1 - 4 * 0.5)])
def test_an_update_is_scaled_or_turned_round_and_statistics_are_left(kind: str, weight: float) -> None:
    got = tamper_reply(REPLY, SENT, 1, kind, 4.0, ("model",), 0).tensors["model"]
    assert got["w"].unique().tolist() == [weight]
    assert got["n.running_var"].tolist() == [0, 0, 0]
    assert int(got["n.num_batches_tracked"]) == 2


def test_noise_is_as_long_as_said_and_drawn_by_seed_and_round() -> None:
    first, same, other = (
        tamper_reply(REPLY, SENT, round, "noise", 4.0, ("model",), 0).tensors["model"] for round in (1, 1, 2)
    )
    assert update_norm(first, SENT["model"]) == pytest.approx(4 * 0.5 * 200, rel=0.02)
    assert torch.equal(first["w"], same["w"])
    assert not torch.equal(first["w"], other["w"])


class Corner(nn.Module):
    """Class 0 if the corner is bright, else class 1."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0, -1, -1] - 1, 1 - x[:, 0, -1, -1]], 1)


def test_the_success_of_a_backdoor_is_counted_on_the_other_classes() -> None:
    assert backdoor_success(Corner(), [Grey()]) == 1.0
    blind = nn.Sequential(nn.MaxPool2d(5), nn.Flatten(), nn.Linear(1, 2))
    blind.load_state_dict({"2.weight": torch.tensor([[0.0], [1.0]]), "2.bias": torch.zeros(2)})
    assert backdoor_success(blind, [Grey()]) == 0.0


def test_what_has_no_pixels_cannot_be_patched() -> None:
    with pytest.raises(InputError, match=r"inputs of the shape \[64\]: choose another kind"):
        add_patch(torch.zeros(2, 64))


def _with(config: Config, kind: str) -> Config:
    return replace(config, attack=asked(kind))


def test_a_run_with_a_bad_client_is_the_same_with_two_workers() -> None:
    states = []
    for workers in (1, 2):
        config, federation = _make_settings(Subject(FedAvg()), rounds=2)
        config = replace(_with(config, "noise"), run=replace(config.run, workers=workers))
        with open_rounds(config, FedAvg(), federation, None, False) as (session, rounds):
            assert all(math.isfinite(record.losses["ce"]) for record in rounds)
        states.append(session.state.shared["model"])
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_what_cannot_be_attacked_is_refused() -> None:
    config, federation = _make_settings(Subject(FedAvg()))
    with pytest.raises(InputError, match=r"attack.clients is 20, but must be below the 20 that train: lower it"):
        bad("scale", count=20)
    with (
        pytest.raises(InputError, match="has all data in one place"),
        open_rounds(_with(config, "scale"), Centralized(), federation, None, False),
    ):
        pass
    with pytest.raises(InputError, match=r"patches images, but model.freeze=true has features: leave one out"):
        config_from_tables({"attack": {"kind": "backdoor"}, "model": {"freeze": True}})
    with pytest.raises(InputError, match=r"attack.kind=scale is for experiments on one machine"):
        check_deployable(_with(config, "scale"), FedAvg())
