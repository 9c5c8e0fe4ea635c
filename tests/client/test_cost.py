import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedcir.client.cost import FlopCounter, cost_to_target, peak_memory, sum_costs
from fedcir.models.networks import ResNet18
from fedcir.types import RoundRecord


def record(round: int, accuracy: float | None) -> RoundRecord:
    seconds = {"train": 2.0, "load": 1.0 if round == 1 else 0.0, "total": 3.0}
    return RoundRecord(round, {}, None, accuracy, accuracy, accuracy, 100, 10, 7, seconds, {})


RECORDS = [record(1, 0.3), record(2, None), record(3, 0.5), record(4, 0.4), record(5, 0.6)]


@pytest.mark.parametrize(("target", "rounds"), [(0.0, 1), (0.3, 1), (0.4, 3), (0.5, 3), (0.6, 5)])
def test_the_cost_to_a_target_is_that_of_all_rounds_until_one_is_as_good(target: float, rounds: int) -> None:
    cost = cost_to_target(RECORDS, target)
    assert cost is not None
    assert (cost.rounds, cost.bytes_down, cost.bytes_up, cost.flops) == (rounds, 100 * rounds, 10 * rounds, 7 * rounds)
    assert cost.seconds == {"train": 2.0 * rounds, "load": 1.0, "total": 3.0 * rounds}


@pytest.mark.parametrize("records", [RECORDS, []])
def test_a_target_that_is_never_reached_has_no_cost(records: list[RoundRecord]) -> None:
    assert cost_to_target(records, 0.7) is None


def test_a_ledger_of_no_rounds_is_empty() -> None:
    empty = sum_costs([])
    assert (empty.rounds, empty.bytes_down, empty.flops, empty.seconds) == (0, 0, 0, {})


@pytest.mark.parametrize("network", [ResNet18(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(3600, 2))])
def test_our_counter_counts_as_torchs_own(network: nn.Module) -> None:
    x = torch.randn(2, 3, 32, 32)
    with FlopCounterMode(display=False) as theirs:
        network(x).sum().backward()
    with FlopCounter() as ours:
        network(x).sum().backward()
    assert ours.flops == theirs.get_total_flops() > 0


def test_peak_memory_is_at_least_what_is_held() -> None:
    held = torch.ones(50_000_000, dtype=torch.uint8)
    assert peak_memory() > held.numel()
