from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedcir.config import Config
from fedcir.runs.compare import Estimate, Method, ToTarget, compare, half_width
from fedcir.runs.run import Run
from fedcir.types import RoundRecord


def record(round: int, accuracy: float | None) -> RoundRecord:
    return RoundRecord(round, {}, None, accuracy, accuracy, accuracy, 100, 10, 0, {}, {})


def run(path: Path, accuracies: list[float], **more: Any) -> Run:
    """A finished run with this mean accuracy in each round, in two domains that are 0.1 to both sides of it."""
    records = tuple(record(i, accuracy) for i, accuracy in enumerate(accuracies, start=1))
    mean = accuracies[-1]
    means = {"accuracy_mean": mean, "accuracy_weighted": mean, "accuracy_worst": mean - 0.1}
    final = {"round": len(accuracies), **means, "accuracy": {"a": mean - 0.1, "b": mean + 0.1}, **more}
    about = {"algorithm": "fedavg", "dataset": "arrays", "seed": 0, "rounds": len(accuracies), "cost": {}}
    return Run(path, Config(), {}, records, {**about, "final": final, "best": final})


def test_an_estimate_has_the_standard_deviation_of_a_sample() -> None:
    assert Estimate.of([1.0, 2.0, 6.0]) == Estimate(3.0, pytest.approx(7**0.5))  # (4 + 1 + 9) / 2
    values = [0.61, 0.58, 0.64, 0.6]
    assert Estimate.of(values).std == pytest.approx(np.std(values, ddof=1))


def test_an_estimate_of_one_value_has_no_deviation() -> None:
    assert Estimate.of([0.5]) == Estimate(0.5, None)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
@pytest.mark.parametrize("values", [[0.01, 0.03], [0.02, -0.01, 0.04, 0.0, 0.03]])
def test_half_width_is_that_of_students_interval(values: list[float], confidence: float) -> None:
    low, high = stats.t.interval(confidence, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert half_width(values, confidence) == pytest.approx((high - low) / 2)


def test_half_width_of_three_seeds_by_the_table() -> None:
    # The table's t for 2 degrees of freedom is 4.303; the standard error of 1, 2, 3 is 1 / sqrt(3).
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)


@pytest.fixture
def methods(tmp_path: Path) -> dict[str, Method]:
    """A baseline that ends at .5, .6 and .7, and a method that gains .02, .04 and -.03."""
    accuracies = {
        "fedavg": [[0.4, 0.45, 0.5], [0.5, 0.55, 0.6], [0.6, 0.65, 0.7]],
        "fedcir": [[0.5, 0.51, 0.52], [0.5, 0.61, 0.64], [0.6, 0.65, 0.67]],
    }
    runs = {
        name: {seed: run(tmp_path / f"{name}-{seed}", values) for seed, values in enumerate(by_seed)}
        for name, by_seed in accuracies.items()
    }
    return {method.algorithm: method for method in compare(runs, "fedavg")}


def test_differences_are_paired_by_seed(methods: dict[str, Method]) -> None:
    ours = methods["fedcir"]
    assert ours.difference == Estimate(pytest.approx(0.01), pytest.approx(np.std([0.02, 0.04, -0.03], ddof=1)))
    assert ours.half_width == pytest.approx(half_width([0.02, 0.04, -0.03]))
    assert ours.mean.mean == pytest.approx(0.61)
    assert ours.worst.mean == pytest.approx(0.51)
    assert ours.domains["b"].mean == pytest.approx(0.71)


def test_the_baseline_has_no_difference_to_itself(methods: dict[str, Method]) -> None:
    assert methods["fedavg"].difference is None
    assert methods["fedavg"].half_width is None
    assert methods["fedavg"].to_target == ToTarget(rounds=3, bytes=330, reached=3, flops=0)


def test_seeds_that_reach_the_baseline_are_counted(methods: dict[str, Method]) -> None:
    assert methods["fedcir"].to_target.reached == 2  # in rounds 1 and 2, and never


def test_a_seed_that_never_reaches_the_baseline_counts_as_later_than_all(methods: dict[str, Method]) -> None:
    assert methods["fedcir"].to_target.rounds == 2  # the middle of 1, 2 and never


def test_a_difference_is_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    runs = {
        "fedavg": {0: run(tmp_path / "a", [0.5]), 1: run(tmp_path / "b", [0.6])},
        "fedcir": {1: run(tmp_path / "c", [0.7]), 2: run(tmp_path / "d", [0.9])},
        "fedsr": {3: run(tmp_path / "e", [0.7])},
    }
    _, fedcir, fedsr = compare(runs, "fedavg")
    assert fedcir.difference == Estimate(pytest.approx(0.1), None)
    assert fedcir.mean.mean == pytest.approx(0.8)
    assert fedsr.difference is None


def test_one_seed_has_a_difference_without_an_interval(tmp_path: Path) -> None:
    runs = {"fedavg": {0: run(tmp_path / "a", [0.5])}, "fedcir": {0: run(tmp_path / "b", [0.75])}}
    ours = compare(runs, "fedavg")[1]
    assert (ours.difference, ours.half_width) == (Estimate(0.25, None), None)


def test_domains_that_nobody_trains_on_are_named_with_their_mean(tmp_path: Path) -> None:
    apart = [{"unseen": ["b"], "accuracy_unseen": value} for value in (0.2, 0.4)]
    runs = {"fedavg": {seed: run(tmp_path / f"{seed}", [0.5], **apart[seed]) for seed in (0, 1)}}
    (ours,) = compare(runs, "fedavg")
    assert ours.unseen == ("b",)
    assert ours.unseen_mean == Estimate(pytest.approx(0.3), pytest.approx(0.02**0.5))
    (plain,) = compare({"fedavg": {0: run(tmp_path / "plain", [0.5])}}, "fedavg")
    assert (plain.unseen, plain.unseen_mean) == ((), None)


def test_a_target_of_ones_own_counts_for_all_seeds(tmp_path: Path) -> None:
    runs = {"fedavg": {seed: run(tmp_path / f"{seed}", [0.2, 0.4 + seed / 10]) for seed in (0, 1)}}
    assert compare(runs, "fedavg", target=0.45)[0].to_target == ToTarget(None, None, reached=1)
