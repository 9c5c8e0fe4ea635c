from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.client.prediction import DomainHits, Hits
from fedcir.config import Config
from fedcir.runs.reader import Run
from fedcir.runs.statistics import CostToTarget, Estimate, MethodResult, compare_methods, half_width
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


@pytest.fixture
def methods(tmp_path: Path) -> dict[str, MethodResult]:
    """A baseline that ends at .5, .6 and .7, and a method that gains .02, .04 and -.03."""
    accuracies = {
        "fedavg": [[0.4, 0.45, 0.5], [0.5, 0.55, 0.6], [0.6, 0.65, 0.7]],
        "fedcir": [[0.5, 0.51, 0.52], [0.5, 0.61, 0.64], [0.6, 0.65, 0.67]],
    }
    runs = {
        name: {seed: run(tmp_path / f"{name}-{seed}", values) for seed, values in enumerate(by_seed)}
        for name, by_seed in accuracies.items()
    }
    return {method.algorithm: method for method in compare_methods(runs, "fedavg")}


def test_differences_are_paired_by_seed(methods: dict[str, MethodResult]) -> None:
    ours = methods["fedcir"]
    assert ours.difference == Estimate(pytest.approx(0.01), pytest.approx(np.std([0.02, 0.04, -0.03], ddof=1)))
    assert ours.half_width == pytest.approx(half_width([0.02, 0.04, -0.03]))
    assert ours.mean.mean == pytest.approx(0.61)
    assert ours.worst.mean == pytest.approx(0.51)
    assert ours.domains["b"].mean == pytest.approx(0.71)


def test_the_baseline_has_no_difference_to_itself(methods: dict[str, MethodResult]) -> None:
    assert methods["fedavg"].difference is None
    assert methods["fedavg"].half_width is None
    assert methods["fedavg"].to_target == CostToTarget(rounds=3, bytes=330, reached=3, flops=0)


def test_seeds_that_reach_the_baseline_are_counted(methods: dict[str, MethodResult]) -> None:
    assert methods["fedcir"].to_target.reached == 2  # in rounds 1 and 2, and never


def test_a_seed_that_never_reaches_the_baseline_counts_as_later_than_all(methods: dict[str, MethodResult]) -> None:
    assert methods["fedcir"].to_target.rounds == 2  # the middle of 1, 2 and never


def test_a_difference_is_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    runs = {
        "fedavg": {0: run(tmp_path / "a", [0.5]), 1: run(tmp_path / "b", [0.6])},
        "fedcir": {1: run(tmp_path / "c", [0.7]), 2: run(tmp_path / "d", [0.9])},
        "fedsr": {3: run(tmp_path / "e", [0.7])},
    }
    _, fedcir, fedsr = compare_methods(runs, "fedavg")
    assert fedcir.difference == Estimate(pytest.approx(0.1), None)
    assert fedcir.mean.mean == pytest.approx(0.8)
    assert fedsr.difference is None


def test_one_seed_has_a_difference_without_an_interval(tmp_path: Path) -> None:
    runs = {"fedavg": {0: run(tmp_path / "a", [0.5])}, "fedcir": {0: run(tmp_path / "b", [0.75])}}
    ours = compare_methods(runs, "fedavg")[1]
    assert (ours.difference, ours.half_width) == (Estimate(0.25, None), None)


def with_hits(path: Path, correct: np.ndarray, labels: tuple[int, ...]) -> Run:
    """A finished run in one domain with these test images right."""
    mean = float(correct.mean())
    result = run(path, [mean])
    assert result.summary is not None
    final = {**result.summary["final"], "accuracy_worst": mean, "accuracy": {"a": mean}}
    made = replace(result, manifest={"test": {"a": [str(i) for i in range(len(correct))]}})
    made = replace(made, summary={**result.summary, "final": final})
    object.__setattr__(made, "hits", Hits(1, {"a": DomainHits(correct, labels)}))
    return made


@pytest.mark.parametrize("seeds", [2, 3])
def test_seeds_that_differ_by_the_same_two_images_are_not_better_than_chance(tmp_path: Path, seeds: int) -> None:
    correct = np.arange(2000) < 1600
    more = np.arange(2000) < 1602
    runs = {
        name: {seed: with_hits(tmp_path / f"{name}-{seed}", hits, (1000, 1000)) for seed in range(seeds)}
        for name, hits in (("fedavg", correct), ("decay", more))
    }
    decay = compare_methods(runs, "fedavg")[1]
    assert decay.difference == Estimate(pytest.approx(0.001), pytest.approx(0.0))
    assert decay.half_width == pytest.approx(1.96 * (0.001 * 0.999 / 2000) ** 0.5, rel=1e-4)  # two ones of 2000
    assert decay.half_width > decay.difference.mean
    assert not decay.better


def test_two_seeds_are_no_verdict_however_large_the_difference(tmp_path: Path) -> None:
    runs = {
        name: {seed: run(tmp_path / f"{name}-{seed}", [value]) for seed in range(2)}
        for name, value in (("fedavg", 0.2), ("fedcir", 0.8))
    }
    ours = compare_methods(runs, "fedavg")[1]
    assert ours.difference is not None
    assert ours.difference.mean == pytest.approx(0.6)
    assert not ours.better
    assert not ours.is_beyond_chance


def test_an_accuracy_that_one_answer_to_all_images_reaches_is_at_chance(tmp_path: Path) -> None:
    # 60 % of the images are of one class, so 62 of 100 right are within 1.96 * sqrt(0.62 * 0.38 / 100) = 9.5 of it.
    correct = np.arange(100) < 62
    (method,) = compare_methods({"fedavg": {0: with_hits(tmp_path / "a", correct, (60, 40))}}, "fedavg")
    assert (method.chance, method.at_chance) == (pytest.approx(0.6), True)
    (method,) = compare_methods({"fedavg": {0: with_hits(tmp_path / "b", correct, (50, 50))}}, "fedavg")
    assert (method.chance, method.at_chance) == (pytest.approx(0.5), False)


def test_domains_that_nobody_trains_on_are_named_with_their_mean(tmp_path: Path) -> None:
    apart = [{"unseen": ["b"], "accuracy_unseen": value} for value in (0.2, 0.4)]
    runs = {"fedavg": {seed: run(tmp_path / f"{seed}", [0.5], **apart[seed]) for seed in (0, 1)}}
    (ours,) = compare_methods(runs, "fedavg")
    assert ours.unseen == ("b",)
    assert ours.unseen_mean == Estimate(pytest.approx(0.3), pytest.approx(0.02**0.5))
    (plain,) = compare_methods({"fedavg": {0: run(tmp_path / "plain", [0.5])}}, "fedavg")
    assert (plain.unseen, plain.unseen_mean) == ((), None)


def test_a_target_of_ones_own_counts_for_all_seeds(tmp_path: Path) -> None:
    runs = {"fedavg": {seed: run(tmp_path / f"{seed}", [0.2, 0.4 + seed / 10]) for seed in (0, 1)}}
    assert compare_methods(runs, "fedavg", target=0.45)[0].to_target == CostToTarget(None, None, reached=1)
