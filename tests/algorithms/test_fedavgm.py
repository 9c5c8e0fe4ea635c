"""FedAvgM by hand: momentum at the server, on parameters and on nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from fedcir import FedAvg, FedAvgM
from fedcir.runtime.rounds import run_rounds
from fedcir.types import Tensors


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FedAvgM(momentum=0.5), [3.0, 6.0]),  # v = 2, then 2 + 1
        (FedAvgM(momentum=0.5, server_lr=0.5), [2.0, 4.0]),  # v = 2, then 3 + 1
        (FedAvgM(momentum=0.5, nesterov=True), [4.0, 6.0]),  # v = 2 and a step of 2 + 1, then 1 + 1 and 1 + 1
    ],
)
def test_two_rounds_by_hand(after_rounds: Callable[..., list[Tensors]], method: FedAvgM, expected: list[float]) -> None:
    ends = after_rounds(method, [(2.0, 4.0), (4.0, 6.0)])
    assert [end["0.weight"].item() for end in ends] == expected


def test_batchnorm_statistics_are_the_mean_over_clients(after_rounds: Callable[..., list[Tensors]]) -> None:
    ends = after_rounds(FedAvgM(), [(2.0, 4.0), (4.0, 6.0)])
    assert [end["1.running_mean"].item() for end in ends] == [3.0, 5.0]
    assert [end["1.num_batches_tracked"].item() for end in ends] == [4, 6]


def test_without_momentum_and_with_a_rate_of_1_it_is_fedavg(
    opened: Callable[..., Any], same_model: Callable[[Any, Any], bool]
) -> None:
    ends = []
    for method in (FedAvgM(momentum=0.0), FedAvg(), FedAvgM()):
        session, transport = opened(method)
        list(run_rounds(session, transport))
        ends.append(session.state.shared["model"])
    assert same_model(*ends[:2])
    assert not same_model(*ends[1:])
