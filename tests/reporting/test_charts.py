"""Curves over seeds, worked out by hand."""

from pathlib import Path

import pytest

from fedcir.config import Config
from fedcir.reporting.charts import build_curve, risk, score, series_with_errors, training_loss
from fedcir.runs.reader import Run
from fedcir.runs.statistics import Estimate
from fedcir.types import RoundRecord


def record(round: int, value: float | None, bytes_up: int = 0, **more: dict[str, float]) -> RoundRecord:
    return RoundRecord(round, more.get("losses", {}), None, value, value, value, 0, bytes_up, 0, {}, {})


def run(path: Path, records: list[RoundRecord]) -> Run:
    return Run(path, Config(), {}, tuple(records), None)


def test_a_curve_is_the_mean_over_seeds_with_the_lowest_and_the_highest(tmp_path: Path) -> None:
    one = run(tmp_path / "one", [record(1, 0.2), record(2, 0.4)])
    two = run(tmp_path / "two", [record(1, 0.4), record(2, 0.5)])
    made = build_curve("m", [one, two], score)
    assert made is not None
    assert made.x == (1.0, 2.0)
    assert made.y == pytest.approx((30, 45))
    assert made.low == pytest.approx((20, 40))
    assert made.high == pytest.approx((40, 50))


def test_rounds_that_not_all_seeds_have_are_left_out(tmp_path: Path) -> None:
    one = run(tmp_path / "one", [record(1, 0.2), record(2, None), record(3, 0.4)])
    two = run(tmp_path / "two", [record(1, 0.2), record(2, 0.5), record(3, 0.6)])
    made = build_curve("m", [one, two], score)
    assert made is not None
    assert made.x == (1.0, 3.0)


def test_what_was_spent_adds_up_over_rounds_that_were_not_evaluated_too(tmp_path: Path) -> None:
    one = run(tmp_path / "one", [record(1, None, 5), record(2, 0.3, 7), record(3, 0.4, 1)])
    made = build_curve("m", [one], score, lambda each: float(each.bytes_up))
    assert made is not None
    assert made.x == (12.0, 13.0)
    assert made.low is None


def test_there_is_no_curve_of_what_was_never_measured(tmp_path: Path) -> None:
    assert build_curve("m", [run(tmp_path / "one", [record(1, 0.2)])], risk) is None
    assert build_curve("m", [], score) is None


def test_the_training_loss_is_the_cross_entropy() -> None:
    assert training_loss(record(1, None, losses={"ce": 2.0, "total": 3.0})) == 2.0


def test_a_mean_is_spread_by_its_deviation_where_it_has_one() -> None:
    made = series_with_errors("m", [Estimate(50.0, 2.0), Estimate(60.0, None)])
    assert (made.x, made.low, made.high) == ((0.0, 1.0), (48.0, 60.0), (52.0, 60.0))
    assert series_with_errors("m", [Estimate(50.0, None)]).low is None
