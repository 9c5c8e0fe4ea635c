"""Can one tell from a model's loss on an image whether it was trained on it?

The loss-threshold attack of Yeom et al., 2018 (https://arxiv.org/abs/1709.01604). It needs no shadow models, and so is
weaker than attacks that train some (Carlini et al., 2022, https://arxiv.org/abs/2112.03570).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.bootstrap import Interval, interval, weights

Losses = NDArray[np.floating]


@dataclass(frozen=True)
class Membership:
    """How well losses tell the images that a model was trained on from others of the same domain."""

    domain: str
    trained: int
    """Images that the model was trained on and that were looked at."""
    others: int
    auc: Interval
    """The chance that an image of the training set has a lower loss than another; 0.5 is guessing."""
    advantage: Interval
    """The share of training images with a loss below their mean, less that of the others; 0 is guessing."""

    @property
    def is_beyond_chance(self) -> bool:
        """Whether either measure's interval lies above guessing."""
        return self.auc.low > 0.5 or self.advantage.low > 0


def membership(domain: str, trained: Losses, others: Losses) -> Membership:
    """The attack on the losses of training images and of others, both sets drawn anew for the intervals."""
    low, high = trained.astype(np.float64), others.astype(np.float64)
    values, place = np.unique(np.concatenate([low, high]), return_inverse=True)
    below = values <= low.mean()

    def measured(ours: NDArray[np.floating], theirs: NDArray[np.floating]) -> tuple[float, float]:
        """AUC and advantage where each image counts so often; equal losses count half."""
        one = np.bincount(place[: len(low)], ours, len(values)) / ours.sum()  # shares of each value
        two = np.bincount(place[len(low) :], theirs, len(values)) / theirs.sum()
        above = two[::-1].cumsum()[::-1] - two / 2
        return float(one @ above), float(one[below].sum() - two[below].sum())

    auc, advantage = measured(np.ones(len(low)), np.ones(len(high)))
    again = zip(weights(f"{domain}/trained", len(low)), weights(f"{domain}/others", len(high)), strict=True)
    draws = np.array([measured(ours, theirs) for ours, theirs in again])
    return Membership(domain, len(low), len(high), interval(auc, draws[:, 0]), interval(advantage, draws[:, 1]))
