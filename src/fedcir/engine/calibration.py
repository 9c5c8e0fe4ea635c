"""How sure a model may be, learned from the images that clients set aside. Only sums over these images leave a client.

The temperature is that of Guo et al., 2017 (https://arxiv.org/abs/1706.04599). Its inverse, beta, is where the slope of
the log-loss in beta is 0. That slope only grows with beta, so clients send it at a few betas, added up over their
images, and the server reads off where it crosses 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.algorithms.algorithm import Batch
from fedcir.models.encoder import Classifier, GaussianClassifier
from fedcir.types import InputError

BETAS = tuple(float(beta) for beta in np.geomspace(1 / 16, 8, 29))
BINS = 50
"""Of the score, equal ones from 0 to 1. With the slopes they stay below what a Flower message may hold of metrics."""
PREFIX = "calibration/"
SUMS = (
    *(f"{PREFIX}slope/{number}" for number in range(len(BETAS))),
    *(f"{PREFIX}unlike/{number}" for number in range(BINS)),
)
"""The names of what a client tells."""


class Saved(TypedDict):
    """What is relied on in calibration.json."""

    round: int
    temperature: float
    images: int
    unlike: list[int]


def judge(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, C) of a batch, and from 0 to 1 how unlike anything seen each image is (B,).

    That is how far the features point away from the weights of every class. Of the scores that need no further
    statistics of clients, it ranked images of an unknown class best (docs/use.md).
    """
    if not isinstance(model, Classifier | GaussianClassifier):
        logits: Tensor = model(x)
        return logits, 1 - logits.softmax(-1).amax(-1)
    encoded = model.encoder(x)
    z = encoded[0] if isinstance(encoded, tuple) else encoded  # (B, Z)
    nearest = (F.normalize(z, dim=-1) @ F.normalize(model.head.weight, dim=-1).T).amax(-1)
    return cast(Tensor, model.head(z)), ((1 - nearest) / 2).clamp(0, 1)


@torch.inference_mode()
def calibration_sums(model: nn.Module, batches: Iterable[Batch], images: int) -> dict[str, float]:
    """What a client tells of the images that it set aside: slopes of the log-loss, and counts of the score by bin.

    Labels count for a little less than certain, the less the more `images` there are (Platt, 1999): a model that is
    right about a few images must not take itself for infallible.
    """
    smoothing = 1 / (images + 2)
    slopes, counts = torch.zeros(len(BETAS), dtype=torch.float64), torch.zeros(BINS, dtype=torch.float64)
    for x, y in batches:
        logits, unlike = judge(model, x)
        slopes += loss_slopes(logits, y, smoothing).cpu()
        counts += (unlike * BINS).long().clamp(0, BINS - 1).bincount(minlength=BINS).cpu()
    return dict(zip(SUMS, [*slopes.tolist(), *counts.tolist()], strict=True))


def loss_slopes(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The derivative of the summed log-loss of softmax(beta * logits) in beta, at each of BETAS.

    `smoothing` is the share of each label that is spread over all classes.
    """
    given = logits.double()  # (B, C)
    true = (1 - smoothing) * given.gather(1, labels[:, None]).sum() + smoothing * given.mean(-1).sum()
    return torch.stack([((beta * given).softmax(-1) * given).sum() - true for beta in BETAS])


@dataclass(frozen=True)
class Calibration:
    """What turns logits into probabilities, and scores into shares; made without images, it changes nothing."""

    temperature: float = 1.0
    unlike: tuple[int, ...] = (0,) * BINS
    """Images set aside by their score, in equal bins from 0 to 1."""
    round: int = 0

    @property
    def images(self) -> int:
        return sum(self.unlike)

    @classmethod
    def of(cls, replies: Iterable[Mapping[str, float]], round: int) -> Self | None:
        """From the sums of all clients that sent valid ones; None if there is none."""
        sums = [read for metrics in replies if (read := _read(metrics)) is not None]
        if not sums:
            return None
        slopes, counts = (np.sum([each[part] for each in sums], axis=0) for part in (0, 1))
        return cls(1 / crossing(slopes), tuple(int(count) for count in counts), round)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        temperature, counts = values["temperature"], tuple(values["unlike"])
        if not (math.isfinite(temperature) and temperature > 0) or len(counts) != BINS or min(counts) < 0:
            raise InputError("temperature or unlike is not as a run writes it")
        return cls(temperature, counts, values["round"])

    def to_json(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "temperature": self.temperature,
            "images": self.images,
            "unlike": list(self.unlike),
            "unlike_quantiles": {f"{share:g}": self.score_at(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)},
        }

    def share(self, unlike: Tensor) -> Tensor:
        """The share of the images set aside that score lower. Without any images it is the score itself.

        One more image is spread evenly over all scores, so that of two images that are more unlike than all that were
        set aside, the more unlike one still gets the larger share.
        """
        edges = self._shares()
        place = unlike.double().clamp(0, 1) * BINS
        low = place.long().clamp(0, BINS - 1)
        return edges[low] + (place - low) * (edges[low + 1] - edges[low])

    def score_at(self, share: float) -> float:
        """The score that this share of the images is below."""
        return float(np.interp(share, self._shares().numpy(), np.linspace(0, 1, BINS + 1)))

    def _shares(self) -> Tensor:
        """At the edges of the bins."""
        counts = torch.tensor(self.unlike, dtype=torch.float64) + 1 / BINS
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)]) / (self.images + 1)


def crossing(slopes: Any) -> float:
    """The beta at which slopes, which grow with beta, cross 0; the first or the last of BETAS if they do not."""
    return float(np.exp(np.interp(0.0, slopes, np.log(BETAS))))


def _read(metrics: Mapping[str, float]) -> tuple[list[float], list[float]] | None:
    """Slopes and counts of one client, if all are there and can be what they say."""
    told = [metrics.get(name, math.nan) for name in SUMS]
    slopes, counts = told[:-BINS], told[-BINS:]
    usable = all(math.isfinite(each) for each in (*slopes, *counts)) and all(c >= 0 and c.is_integer() for c in counts)
    return (slopes, counts) if usable and any(counts) else None
