"""What the report and `compare` say to do next."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedcir.config import Config
from fedcir.reporting.methods import choose_method, count_seeds_needed, describe_losses, list_advice, measure_rise
from fedcir.runs.reader import Run
from fedcir.runs.statistics import CostToTarget, Estimate, MethodResult
from fedcir.types import RoundRecord


def run(path: Path, accuracies: Sequence[float | None]) -> Run:
    """A run with these mean accuracies in per cent; None in a round without evaluation."""
    values = [None if value is None else value / 100 for value in accuracies]
    records = [RoundRecord(n, {}, None, v, v, v, 0, 0, 0, {}, {}) for n, v in enumerate(values, start=1)]
    return Run(path, Config(), {}, tuple(records), None)


def method(
    name: str, mean: float, change: float | None = None, half: float | None = None, std: float = 0.01
) -> MethodResult:
    """Over two domains, with a difference to the baseline in points."""
    difference = None if change is None else Estimate(change / 100, std)
    domains = {"a": Estimate(mean / 100, None), "b": Estimate(mean / 100, None)}
    half_width = None if half is None else half / 100
    goal = CostToTarget(None, None, 0)
    return MethodResult(name, domains, domains["a"], domains["a"], goal, difference, half_width, paired_seeds=3)


def told(
    tmp_path: Path, methods: Sequence[MethodResult], seeds: int = 3, curve: Sequence[float | None] = (50.0,) * 20
) -> str:
    """The advice on methods that all have this curve."""
    runs = {
        each.algorithm: {s: run(tmp_path / f"{each.algorithm}-{s}", curve) for s in range(seeds)} for each in methods
    }
    return " ".join(list_advice(runs, methods, "fedavg"))


def noisy(means: Sequence[float], seed: int = 0) -> list[float]:
    return list(np.array(means) + np.random.default_rng(seed).normal(0, 0.4, len(means)))


def test_a_curve_that_climbs_to_the_end_is_still_rising(tmp_path: Path) -> None:
    rise = measure_rise([run(tmp_path / "a", noisy(np.linspace(20, 60, 25)))])
    assert rise is not None
    gain, rounds = rise
    assert gain == pytest.approx(2 * 40 / 24, abs=1.0)  # two rounds on average, of 1.67 points each
    assert rounds == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_that_has_flattened_is_not_rising_whatever_its_noise(tmp_path: Path, seed: int) -> None:
    flat = 60 - 40 * np.exp(-np.arange(30) / 3)
    assert measure_rise([run(tmp_path / "a", noisy(list(flat), seed))]) is None


def test_a_short_run_that_flattened_is_not_rising_because_it_once_rose(tmp_path: Path) -> None:
    assert measure_rise([run(tmp_path / "a", [30, 60, 80, 85, 90, 90.4, 90.5, 90.6])]) is None


def test_four_rounds_tell_nothing(tmp_path: Path) -> None:
    assert measure_rise([run(tmp_path / "a", [10, 20, 30, 40])]) is None
    message = told(tmp_path, [method("fedavg", 40)], curve=[10, 20, 30, 40])
    assert (
        message == "Train longer: 4 evaluated rounds cannot show whether accuracy is still rising. Try `--rounds 25`."
    )


def test_rounds_that_were_hardly_evaluated_ask_for_more_evaluation(tmp_path: Path) -> None:
    message = told(tmp_path, [method("fedavg", 40)], curve=[*[None] * 39, 40.0])
    assert message.endswith(
        "Evaluate more often: 1 evaluated round cannot show whether accuracy is still rising. Try `--eval-every 4`."
    )


def test_who_is_still_rising_is_told_to_train_half_as_long_again(tmp_path: Path) -> None:
    message = told(tmp_path, [method("fedavg", 60)], curve=list(np.linspace(20, 60, 25)))
    assert (
        message
        == "Train longer: accuracy still rose over the last 3 rounds, by 3.3 points under fedavg. Try `--rounds 40`."
    )


def test_a_method_that_is_better_beyond_chance_is_taken(tmp_path: Path) -> None:
    message = told(tmp_path, [method("fedavg", 50), method("fedcir", 53, 3.0, 1.0), method("fedsr", 55, 5.0, 9.0)])
    assert message == "Use fedcir: it is 3.0 points above fedavg, more than chance (95 % interval +2.0 to +4.0)."


def test_where_nothing_is_better_beyond_chance_fedavg_is_taken_and_the_seeds_that_would_tell_are_named(
    tmp_path: Path,
) -> None:
    message = told(tmp_path, [method("fedavg", 50), method("fedcir", 51, 1.0, 2.48, std=0.01)])
    assert message == (
        "Use fedavg: no other federated method is better by more than chance, and fedavg is the simplest. "
        "Add seeds: fedcir is ahead, but that could be chance (95 % interval -1.5 to +3.5). "
        "About 7 seeds would be enough to tell: `--seeds 0,1,2,3,4,5,6`."
    )


def test_the_seeds_to_tell_are_the_fewest_by_students_t() -> None:
    # The table's t for 6 and 5 degrees of freedom: 2.447 / sqrt(7) = 0.92 < 1 < 1.05 = 2.571 / sqrt(6).
    assert count_seeds_needed(method("m", 50, 1.0, 2.48, std=0.01)) == 7
    assert count_seeds_needed(method("m", 50, 0.01, 2.48, std=0.01)) is None


def test_a_difference_that_would_take_too_many_seeds_is_none(tmp_path: Path) -> None:
    message = told(tmp_path, [method("fedavg", 50), method("fedcir", 50.1, 0.1, 2.48)])
    assert message.endswith("Confirming so small a difference would take more than 12 seeds: treat the two as equal.")


def test_of_one_seed_the_best_is_named_with_its_share_of_the_gap_and_more_are_asked_for(tmp_path: Path) -> None:
    both, ceiling = [method("fedavg", 50), method("fedcir", 60, 10.0)], replace(method("centralized", 75), pools=True)
    more = "Add seeds: with only one, any difference could be chance. Try `--seeds 0,1,2`."
    assert told(tmp_path / "a", both, seeds=1) == f"fedcir came first: 10.0 points above fedavg. {more}"
    assert told(tmp_path / "b", [*both, ceiling], seeds=1) == (
        f"fedcir came first: 10.0 points above fedavg, which is 40 % of the way to centralized. {more}"
    )


@pytest.mark.parametrize(("seeds", "few"), [(1, "one"), (2, "two")])
def test_below_three_seeds_nothing_is_recommended(tmp_path: Path, seeds: int, few: str) -> None:
    more = f"Add seeds: with only {few}, any difference could be chance. Try `--seeds 0,1,2`."
    below = [method("fedavg", 50), method("fedcir", 40, -10.0)]
    assert told(tmp_path / "a", below, seeds) == f"No other federated method came out above fedavg. {more}"
    above = [method("fedavg", 50), replace(method("decay", 50.1, 0.1, 0.0), paired_seeds=seeds)]
    message = told(tmp_path / "b", above, seeds)
    assert message == f"decay came first: 0.1 points above fedavg. {more}"
    assert "Use" not in message
    assert "more than chance" not in message


def test_a_method_at_chance_level_is_said_to_be_and_not_recommended(tmp_path: Path) -> None:
    both = [replace(method(name, 26), chance=0.25, at_chance=True) for name in ("fedavg", "fedcir")]
    why = "at chance level (25.0 %, what the same answer to every test image reaches): nothing can be read from that."
    assert told(tmp_path / "a", both) == f"fedavg, fedcir are {why}"
    assert told(tmp_path / "b", [both[0]]) == f"fedavg is {why}"


def test_seeds_that_cannot_tell_because_of_the_test_images_are_not_asked_for(tmp_path: Path) -> None:
    wide = replace(method("fedcir", 51, 1.0, 2.48), image_half_width=0.02)
    message = told(tmp_path, [method("fedavg", 50), wide])
    assert message.endswith("More seeds would not tell, only more test images would: treat the two as equal.")


def test_the_seeds_to_tell_count_the_error_of_the_test_images() -> None:
    # With b = 0.6 points, t / sqrt(n) must be below 0.8: 2.262 / sqrt(10) = 0.72 and 2.306 / sqrt(9) = 0.77.
    assert count_seeds_needed(replace(method("m", 50, 1.0, 2.48, std=0.01), image_half_width=0.006)) == 9


def test_what_moves_all_data_is_never_taken(tmp_path: Path) -> None:
    ceiling = replace(method("centralized", 90, 40.0, 1.0), pools=True)
    assert "Use fedavg" in told(tmp_path, [ceiling, method("fedavg", 50), method("fedcir", 49, -1.0, 0.5)])
    assert told(tmp_path / "alone", [ceiling]) == ""
    assert choose_method([method("fedavg", 50), method("fedcir", 60, 10.0, 1.0)], "fedavg").algorithm == "fedcir"


def test_one_method_alone_is_told_how_to_compare_it(tmp_path: Path) -> None:
    message = told(tmp_path, [method("fedcir", 50)], seeds=1)
    assert (
        message == "Only fedcir was trained. To see whether it helps, run `fedcir compare --algorithms fedavg,fedcir`."
    )


def test_a_domain_far_below_the_others_is_pointed_to_a_diagnosis(tmp_path: Path) -> None:
    low = replace(method("fedavg", 90), domains={"ink": Estimate(0.9, None), "pen": Estimate(0.7, None)})
    message = told(tmp_path, [low])
    assert message == (
        "pen is 20 points below the mean of the other domains under fedavg: "
        "`fedcir diagnose fedavg-0` shows how its images and labels differ, and which classes are confused."
    )
    assert told(tmp_path / "unseen", [replace(low, unseen=("pen",))]) == ""  # nobody trained on it


def test_the_domain_where_the_better_method_got_worse_is_named() -> None:
    def method(algorithm: str, **domains: float) -> MethodResult:
        estimates = {name: Estimate.of([value]) for name, value in domains.items()}
        mean = Estimate.of([sum(domains.values()) / len(domains)])
        return MethodResult(algorithm, estimates, mean, mean, CostToTarget(None, None, 0), None, None)

    plain = method("fedavg", printed=0.872, photo=0.782, outlined=0.855)
    best = method("fedcirplus", printed=0.917, photo=0.762, outlined=0.850)
    assert describe_losses(best, plain) == ["On photo it is 2.0 points below fedavg."]
    assert describe_losses(method("fedcirplus", printed=0.9, photo=0.782, outlined=0.86), plain) == []
