"""Figures beside accuracy, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from fedcir.analysis import metrics

# Of 10 sick and 90 healthy, 8 sick are recognised and 9 healthy are taken for sick.
SCREENED = np.array([[81, 9], [2, 8]])
THREE = np.array([[3, 1, 0], [0, 2, 2], [0, 0, 4]])


def test_confusion_has_true_classes_in_rows() -> None:
    assert metrics.confusion([0, 0, 1, 2], [0, 1, 1, 0], 3).tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_two_classes_by_hand() -> None:
    assert metrics.accuracy(SCREENED) == 0.89
    assert metrics.sensitivity(SCREENED) == 0.8
    assert metrics.specificity(SCREENED) == 0.9
    assert metrics.f1(SCREENED) == pytest.approx(2 * 8 / (2 * 8 + 9 + 2))


def test_the_other_class_may_be_the_positive_one() -> None:
    assert metrics.sensitivity(SCREENED, positive=0) == 0.9
    assert metrics.specificity(SCREENED, positive=0) == 0.8


def test_three_classes_by_hand() -> None:
    assert metrics.recall_by_class(THREE).tolist() == [0.75, 0.5, 1.0]
    assert metrics.macro_f1(THREE) == pytest.approx((6 / 7 + 4 / 7 + 8 / 10) / 3)
    assert metrics.specificity(THREE, positive=2) == 6 / 8


def test_a_class_without_samples_has_no_recall_and_does_not_enter_the_mean() -> None:
    counts = np.array([[2, 0, 0], [0, 2, 0], [0, 0, 0]])
    assert math.isnan(metrics.recall_by_class(counts)[2])
    assert metrics.macro_f1(counts) == 1.0
    assert math.isnan(metrics.sensitivity(counts, positive=2))
    assert math.isnan(metrics.macro_f1(np.zeros((2, 2), np.int64)))


def test_auc_counts_pairs_and_halves_ties() -> None:
    # Pairs (positive, other): 0.9 beats both, 0.4 beats 0.1 and ties with 0.4: 3.5 of 4.
    assert metrics.auc([1, 1, 0, 0], [0.9, 0.4, 0.4, 0.1]) == 3.5 / 4
    assert metrics.auc([0, 1], [0.2, 0.8]) == 1.0
    assert metrics.auc([1, 0], [0.2, 0.8]) == 0.0
    assert math.isnan(metrics.auc([1, 1], [0.2, 0.8]))


def test_auc_is_the_share_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    positive, scores = rng.random(60) < 0.3, rng.integers(0, 9, 60)
    ours, others = scores[positive][:, None], scores[~positive]
    assert metrics.auc(positive, scores) == pytest.approx(((ours > others) + (ours == others) / 2).mean())


def test_calibration_error_weights_bins_by_their_samples() -> None:
    # Two bins: 0.6 and 0.8 fall into (0.5, 1], of which one is right; three at 0.5 into (0, 0.5], of which one is.
    probabilities = [[0.6, 0.4], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    labels = [0, 0, 0, 1, 1]
    expected = 2 / 5 * abs(1 / 2 - 0.7) + 3 / 5 * abs(1 / 3 - 0.5)
    assert metrics.expected_calibration_error(labels, probabilities, bins=2) == pytest.approx(expected)


def test_a_sure_and_right_model_is_calibrated() -> None:
    assert metrics.expected_calibration_error([0, 1], np.eye(2)) == 0.0
    assert metrics.expected_calibration_error([1, 0], np.eye(2)) == 1.0


def test_wilson_interval_by_its_formula() -> None:
    z, p, n = 1.959964, 0.8, 10
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    found = metrics.wilson_interval(8, 10)
    assert found.value == 0.8
    assert found.low == pytest.approx((middle - half) / (1 + z**2 / n), abs=1e-6)
    assert found.high == pytest.approx((middle + half) / (1 + z**2 / n), abs=1e-6)
    assert metrics.wilson_interval(5, 5).high == 1.0
