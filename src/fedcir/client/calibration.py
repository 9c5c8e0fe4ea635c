"""Calibration of probabilities on images that clients set aside. Only sums over these images leave a client.

The temperature is that of Guo et al., 2017 (https://arxiv.org/abs/1706.04599). Its inverse, beta, is where the slope of
the log-loss in beta is 0. That slope only grows with beta, so clients send it at a few betas, added up over their
images, and the server reads off where it crosses 0.

Labels count for a little less than certain, the less the more images there are (Platt, 1999): a model that is right
about a few images must not take itself for infallible. The server does this once, over the images of all clients, so
the temperature does not depend on who holds which of them.

The threshold of confidence above which as many images lie as are predicted correctly (ATC) is that of S. Garg et al.,
2022 (https://arxiv.org/abs/2201.04234). Clients send how many of their images have which confidence.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, Self, TypedDict

import numpy as np
import torch
from torch import Tensor

from fedcir.errors import InputError
from fedcir.validation import Between

BETAS = tuple(float(beta) for beta in np.geomspace(1 / 16, 8, 29))
BINS = 50
"""Of the score, equal ones from 0 to 1. With the slopes they stay below what a Flower message may hold of metrics."""
CONFIDENCE_BINS = 10
"""Of the confidence, equal ones from 0 to 1."""
TEMPERATURES = Between(0.01, 100)
"""Range of valid temperatures, wider than 1 / BETAS."""
PREFIX = "calibration/"
SUMS = (
    *(f"{PREFIX}slope/{number}" for number in range(len(BETAS))),
    f"{PREFIX}margin",
    *(f"{PREFIX}confidence/{number}" for number in range(CONFIDENCE_BINS)),
    *(f"{PREFIX}novelty/{number}" for number in range(BINS)),
)
"""Names of the sums that a client sends."""


class SavedCalibration(TypedDict):
    """Contents of calibration.json."""

    round: int
    temperature: float
    images: int
    threshold: NotRequired[float | None]
    novelty: NotRequired[list[int]]
    unlike: NotRequired[list[int]]
    """The name of `novelty` in runs of earlier versions."""


@torch.inference_mode()
def calibration_sums(batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """Sums over the images that a client set aside, from batches of logits (B, C), scores (B,) and labels (B,)."""
    slopes, counts = torch.zeros(len(BETAS), dtype=torch.float64), torch.zeros(BINS, dtype=torch.float64)
    confidence = torch.zeros(CONFIDENCE_BINS, dtype=torch.float64)
    margin = 0.0
    for logits, novelty, labels in batches:
        slopes += loss_slopes(logits, labels).cpu()
        # If a share of each label is spread over all classes, every slope grows by that share of this sum.
        values = logits.double()  # (B, C)
        margin += float((values.gather(1, labels[:, None])[:, 0] - values.mean(-1)).sum())
        confidence += _count_bins(compute_confidence(logits), CONFIDENCE_BINS)
        counts += _count_bins(novelty, BINS)
    return dict(zip(SUMS, [*slopes.tolist(), margin, *confidence.tolist(), *counts.tolist()], strict=True))


def compute_confidence(logits: Tensor) -> Tensor:
    """Confidence of predictions (B,), from 0 to 1: the largest probability p as -log(1 - p) / 10, without temperature.

    Probabilities near 1 would share a bin.
    """
    rest = 1 - logits.double().softmax(-1).amax(-1)
    return (-rest.clamp_min(1e-12).log() / 10).clamp(0, 1)


def _count_bins(values: Tensor, bins: int) -> Tensor:
    """Count values from 0 to 1 in equal bins."""
    return (values * bins).long().clamp(0, bins - 1).bincount(minlength=bins).cpu()


def loss_slopes(logits: Tensor, labels: Tensor) -> Tensor:
    """The derivative of the summed log-loss of softmax(beta * logits) in beta, at each of BETAS."""
    values = logits.double()  # (B, C)
    true = values.gather(1, labels[:, None]).sum()
    return torch.stack([((beta * values).softmax(-1) * values).sum() - true for beta in BETAS])


@dataclass(frozen=True)
class Calibration:
    """Temperature for logits and distribution of novelty scores. The default, without images, changes nothing."""

    temperature: float = 1.0
    novelty: tuple[int, ...] = (0,) * BINS
    """Images set aside by their score, in equal bins from 0 to 1."""
    round: int = 0
    threshold: float | None = None
    """Confidence above which as many images set aside lie as were predicted correctly; None in earlier versions."""

    @property
    def images(self) -> int:
        return sum(self.novelty)

    @classmethod
    def of(cls, replies: Iterable[Mapping[str, float]], round: int) -> Self | None:
        """Build it from the valid sums of all clients; None if there are none."""
        sums = []
        tested = []
        for metrics in replies:
            values = [float(metrics.get(name, math.nan)) for name in SUMS]
            counts = values[-BINS:]
            if all(map(math.isfinite, values)) and any(counts) and all(c >= 0 and c.is_integer() for c in counts):
                sums.append(values)
                tested.append([metrics.get(f"validation/{name}", 0.0) for name in ("correct", "count")])
        if not sums:
            return None
        total = np.sum(sums, axis=0)
        slopes, margin, images = total[: len(BETAS)], total[len(BETAS)], total[-BINS:]
        smoothing = 1 / (images.sum() + 2)
        correct, tests = np.sum(tested, axis=0)
        threshold = find_threshold(total[len(BETAS) + 1 : -BINS], 1 - correct / tests) if tests else None
        temperature = 1 / find_zero(slopes + smoothing * margin)
        return cls(temperature, tuple(int(count) for count in images), round, threshold)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        temperature, counts = values["temperature"], tuple(values.get("novelty", values.get("unlike", ())))
        TEMPERATURES.check("temperature", temperature)
        if (threshold := values.get("threshold")) is not None:
            Between(0, 1).check("threshold", threshold)
        if len(counts) != BINS or min(counts) < 0:
            raise InputError("novelty is not as a run writes it")
        return cls(temperature, counts, values["round"], threshold)

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "temperature": self.temperature,
            "images": self.images,
            "threshold": self.threshold,
            "novelty": list(self.novelty),
            "novelty_quantiles": {f"{share:g}": self.score_at(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)},
        }

    def share(self, novelty: Tensor) -> Tensor:
        """The share of the images set aside that score lower. Without any images it is the score itself.

        One more image is spread evenly over all scores, so that of two images whose novelty exceeds that of all
        images set aside, the more novel one still gets the larger share.
        """
        edges = self._shares()
        position = novelty.double().clamp(0, 1) * BINS
        low = position.long().clamp(0, BINS - 1)
        return edges[low] + (position - low) * (edges[low + 1] - edges[low])

    def score_at(self, share: float) -> float:
        """The score that this share of the images is below."""
        return float(np.interp(share, self._shares().numpy(), np.linspace(0, 1, BINS + 1)))

    def _shares(self) -> Tensor:
        """Shares of images below the edges of the bins."""
        counts = torch.tensor(self.novelty, dtype=torch.float64) + 1 / BINS
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)]) / (self.images + 1)


def find_threshold(counts: Any, share: float) -> float:
    """The value that this share of images is below, by their counts in equal bins from 0 to 1."""
    below = np.concatenate([[0.0], np.cumsum(counts)]) / max(float(np.sum(counts)), 1.0)
    return float(np.interp(share, below, np.linspace(0, 1, len(below))))


def find_zero(slopes: Any) -> float:
    """Find the beta at which slopes, which grow with beta, cross 0; the first or last of BETAS if they do not."""
    return float(np.exp(np.interp(0.0, slopes, np.log(BETAS))))
