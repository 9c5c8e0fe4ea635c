"""Figures beside accuracy: pure functions on labels and what a model said of them.

Most take a confusion matrix (C, C), whose rows are true classes and whose columns are predictions. What has no value,
such as the recall of a class without samples, is nan. Of two classes the second counts as positive unless told.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcir.analysis.bootstrap import LEVEL, Interval

Counts = NDArray[np.int64]
POSITIVE = 1
"""The class that counts as positive where there are two."""


def confusion(labels: ArrayLike, predicted: ArrayLike, classes: int) -> Counts:
    """How many samples of each true class (rows) were taken for each class (columns)."""
    pairs = np.asarray(labels, np.int64) * classes + np.asarray(predicted, np.int64)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def accuracy(counts: Counts) -> float:
    return _share(np.trace(counts), counts.sum())


def recall_by_class(counts: Counts) -> NDArray[np.float64]:
    """The share of each class's samples that were recognised (C,)."""
    return np.array([_share(counts[c, c], counts[c].sum()) for c in range(len(counts))])


def sensitivity(counts: Counts, positive: int = POSITIVE) -> float:
    """The share of positive samples that were recognised: the recall of that class."""
    return _share(counts[positive, positive], counts[positive].sum())


def specificity(counts: Counts, positive: int = POSITIVE) -> float:
    """The share of the other samples that were not taken for positive."""
    others = np.delete(counts, positive, axis=0)
    return _share(others.sum() - others[:, positive].sum(), others.sum())


def f1(counts: Counts, positive: int = POSITIVE) -> float:
    """The harmonic mean of precision and recall of one class."""
    return _share(2 * counts[positive, positive], counts[positive].sum() + counts[:, positive].sum())


def macro_f1(counts: Counts) -> float:
    """The mean F1 over the classes that occur, in truth or as a prediction."""
    values = np.array([f1(counts, c) for c in range(len(counts))])
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def auc(positive: ArrayLike, scores: ArrayLike) -> float:
    """The chance that a positive sample scores above another one; equal scores count half (Mann and Whitney, 1947)."""
    is_positive, given = np.asarray(positive, bool), np.asarray(scores, np.float64)
    _, place, times = np.unique(given, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[place]  # equal scores share their mean rank, from 1
    ours = int(is_positive.sum())
    return _share(ranks[is_positive].sum() - ours * (ours + 1) / 2, ours * (len(given) - ours))


def expected_calibration_error(labels: ArrayLike, probabilities: ArrayLike, bins: int = 15) -> float:
    """How far the probability of the predicted class is from the share that is right, over equal bins weighted by size.

    Guo et al., 2017. https://arxiv.org/abs/1706.04599
    """
    given = np.asarray(probabilities, np.float64)  # (N, C)
    sure, right = given.max(axis=1), given.argmax(axis=1) == np.asarray(labels)
    which = np.clip(np.ceil(sure * bins).astype(np.int64) - 1, 0, bins - 1)  # (0, 1/bins], (1/bins, 2/bins], ...
    gaps = np.bincount(which, weights=right - sure, minlength=bins)
    return _share(np.abs(gaps).sum(), len(sure))


def wilson_interval(right: int, tested: int) -> Interval:
    """A share with its 95 % interval (Wilson, 1927), which holds for few samples and near 0 or 1 too."""
    from scipy.stats import binomtest  # half a second

    ends = binomtest(right, tested).proportion_ci(LEVEL, method="wilson")
    return Interval(right / tested, float(ends.low), float(ends.high))


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else float("nan")
