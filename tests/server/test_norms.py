"""A reply that is far longer than the usual one is dropped and named; honest ones never are."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import RunError
from fedcir.algorithms.fedavg import FedAvg
from fedcir.conformance import Subject, _make_settings
from fedcir.runtime.session import Session
from fedcir.runtime.simulation import open_rounds
from fedcir.server.replies import AHEAD, NormFilter
from fedcir.types import ClientReply, DroppedReply, Groups

SENT = {"model": {"w": torch.tensor([30.0, 40.0]), "n.running_var": torch.ones(4)}}
"""A model of length 50, so that no update of up to 0.5 x the limit is long."""


def reply(client: int, length: float, statistic: float = 1.0, count: float = 10.0) -> ClientReply:
    model = {"w": SENT["model"]["w"] + torch.tensor([length, 0.0]), "n.running_var": torch.full((4,), statistic)}
    return ClientReply(client, 10, {"model": model, "label_counts": {"counts": torch.tensor([count])}}, {})


def dropped(replies: Sequence[ClientReply], factor: float = 100.0) -> dict[int, str]:
    screen = NormFilter(SENT, ["model"], factor)
    return {item.client_id: item.reason for item in screen.drop_outliers(replies) if isinstance(item, DroppedReply)}


@pytest.mark.parametrize("place", range(4))
def test_one_of_four_is_found_wherever_it_comes(place: int) -> None:
    lengths = [1.0, 2.0, 3.0, 4.0]
    lengths[place] = 1e30
    assert dropped([reply(client, length) for client, length in enumerate(lengths)]).keys() == {place}


def test_the_reason_names_its_norm_and_the_usual_one() -> None:
    message = dropped([reply(0, 2.0), reply(1, 1e6), reply(2, 4.0)])[1]
    assert message.startswith("the norm of its update of model is 1e+06, 2.5e+05 times the usual 4; ")
    assert "server.max_update allows 100 times" in message


def test_the_limit_is_a_multiple_of_the_median() -> None:
    others = [reply(0, 1.0), reply(1, 2.0), reply(2, 3.0)]
    assert not dropped([*others, reply(3, 199.9)])  # the lower one of 2 and 3
    assert dropped([*others, reply(3, 200.1)]).keys() == {3}
    assert not dropped([*others, reply(3, 1e30)], factor=0.0)


def test_an_update_shorter_than_the_model_is_never_dropped_where_others_have_converged() -> None:
    converged = [reply(client, 1e-6) for client in range(3)]
    assert not dropped([*converged, reply(3, 49.9)])
    assert dropped([*converged, reply(3, 50.1)]).keys() == {3}


def test_what_grows_with_the_data_and_statistics_have_a_wider_limit() -> None:
    others = [reply(client, 1.0) for client in range(3)]
    assert not dropped([*others, reply(3, 1.0, count=99_000.0)])
    assert dropped([*others, reply(3, 1.0, count=101_000.0)]).keys() == {3}
    assert "model statistics" in dropped([*others, reply(3, 1.0, statistic=1e9)])[3]


def test_of_two_the_far_longer_one_goes_and_both_may_change_at_once() -> None:
    assert dropped([reply(0, 1e9), reply(1, 2.0)]).keys() == {0}
    assert not dropped([reply(0, 1e9), reply(1, 1e9)])


def test_a_lone_reply_is_compared_with_the_model() -> None:
    assert not dropped([reply(0, 4999.0)])  # 0.5 x 100 x 100
    assert dropped([reply(0, 5001.0)]).keys() == {0}


def test_no_more_replies_are_held_than_said_and_none_changes_places() -> None:
    taken: list[int] = []

    def replies() -> Iterator[ClientReply]:
        for client in range(30):
            taken.append(client)
            yield reply(client, 1e30 if client in (0, 20) else 1.0)

    screen = NormFilter(SENT, ["model"], 100.0)
    for index, item in enumerate(screen.drop_outliers(replies())):
        assert item.client_id == index
        assert isinstance(item, DroppedReply) == (index in (0, 20))
        assert len(taken) <= max(AHEAD, index + 1)


def poisoned_once(reply: ClientReply, sent: Groups, round: int) -> ClientReply:
    """Weights of 1e30, in round 2."""
    if round != 2:
        return reply
    bag = reply.tensors["model"]
    huge = {name: torch.full_like(t, 1e30) if t.is_floating_point() else t for name, t in bag.items()}
    return replace(reply, tensors={"model": huge})


def rounds_in(folder: Path, stop: int) -> Session:
    config, federation = _make_settings(Subject(FedAvg()), rounds=4)
    config = replace(config, run=replace(config.run, workers=1))
    clients = tuple(replace(c, tamper=poisoned_once if c.id == 2 else None) for c in federation.clients)
    with open_rounds(config, FedAvg(), replace(federation, clients=clients), folder, resume=True) as (session, rounds):
        for _ in islice(rounds, stop):
            pass
    return session


def test_a_poisoned_round_names_the_culprit_and_the_run_goes_on_and_resumes(tmp_path: Path) -> None:
    whole = rounds_in(tmp_path / "whole", 4)
    assert [list(record.dropped) for record in whole.records] == [[], ["2"], [], []]
    assert "times the usual" in whole.records[1].dropped["2"]
    for _ in range(4):
        again = rounds_in(tmp_path / "stopped", 1)
    assert [record.dropped for record in again.records] == [record.dropped for record in whole.records]
    model = again.state.shared["model"]
    assert all(torch.equal(tensor, model[name]) for name, tensor in whole.state.shared["model"].items())


def test_data_in_one_place_have_no_client_whose_update_is_dropped() -> None:
    data = TensorDataset(torch.ones(8, 1), torch.full((8,), 1e6))
    settings = {"rounds": 1, "local_steps": 1, "lr": 1e3, "workers": 1}
    for method in ("fedavg", "centralized"):
        with pytest.raises(RunError, match="times the usual") if method == "fedavg" else nullcontext():
            task = fedcir.Regression(("y",))
            fedcir.train([(data, data)], encoder=nn.Flatten(), task=task, algorithm=method, **settings)
