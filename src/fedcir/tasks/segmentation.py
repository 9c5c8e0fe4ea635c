"""Segmentation: one class for each pixel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.errors import InputError
from fedcir.tasks.task import Head, Sums, Task, average_known, describe_shape, divide
from fedcir.types import Metric

MAX_CLASSES = 256
"""Classes that the bytes of a mask can tell apart."""


@dataclass(frozen=True)
class Segmentation(Task):
    """Cross-entropy of pixels, Dice and IoU; `names` are the classes, and targets (N, H, W) hold their numbers.

    The head is a 1x1 convolution on a feature map (B, F, H, W). Class 0 is the background, which means leave out.
    """

    metrics_reported = (Metric("dice", "Dice"), Metric("iou", "IoU"))
    loss_name = "ce"
    uses_maps = True

    def __post_init__(self) -> None:
        if len(self.names) > MAX_CLASSES:
            raise InputError(f"a mask has {MAX_CLASSES} classes at most, got {len(self.names):,}")

    def head(self, features: int) -> Head:
        return nn.Conv2d(features, self.outputs, 1)

    def check_targets(self, targets: Tensor, source: str) -> Tensor:
        classes = len(self.names)
        if targets.ndim != 3:
            shape = describe_shape(targets.shape)
            raise InputError(f"{source} gives targets of the shape {shape}: give a class for each pixel, (N, H, W)")
        low, high = (int(number) for number in torch.aminmax(targets)) if targets.numel() else (0, 0)
        if targets.is_floating_point() or low < 0 or high >= classes:
            value = targets.dtype if targets.is_floating_point() else low if low < 0 else high
            raise InputError(f"{source} gives the class {value}: classes of pixels are 0 to {classes - 1}")
        return targets.long()

    def example_targets(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), *x.shape[-2:], dtype=torch.int64)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    @property
    def sum_names(self) -> tuple[str, ...]:
        kinds = ("hits", "predicted", "actual")
        return ("count", *(f"{kind}_{number}" for kind in kinds for number in range(len(self.names))))

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        predicted, classes = outputs.argmax(1), len(self.names)
        sums = {"count": float(len(targets))}
        for kind, pixels in (("hits", targets[predicted == targets]), ("predicted", predicted), ("actual", targets)):
            counts = pixels.flatten().bincount(minlength=classes).tolist()
            sums |= {f"{kind}_{number}": float(count) for number, count in enumerate(counts)}
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the classes that occur, without the background."""
        by_name = [scores for name, scores in self.scores_by_name(sums).items() if name != self.names[0]]
        return {metric: average_known(scores[metric] for scores in by_name) for metric in ("dice", "iou")}

    def scores_by_name(self, sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
        scores = {}
        for number, name in enumerate(self.names):
            hits, both = sums[f"hits_{number}"], sums[f"predicted_{number}"] + sums[f"actual_{number}"]
            scores[name] = {"dice": divide(2 * hits, both), "iou": divide(hits, both - hits)}
        return scores

    def find_sums_fault(self, sums: Mapping[str, float]) -> str | None:
        if fault := super().find_sums_fault(sums):
            return fault
        totals = dict.fromkeys(("hits", "predicted", "actual"), 0.0)
        for number in range(len(self.names)):
            values = {kind: sums[f"{kind}_{number}"] for kind in totals}
            if any(value % 1 for value in values.values()) or not 0 <= values["hits"] <= min(values.values()):
                return "its counts are invalid"
            totals = {kind: totals[kind] + values[kind] for kind in totals}
        return None if totals["predicted"] == totals["actual"] else "its counts are invalid"

    def summarise(self, targets: NDArray[Any]) -> dict[str, float]:
        """Share of the pixels of each class."""
        counts = np.bincount(np.asarray(targets).ravel(), minlength=len(self.names))
        return {
            f"{name} (%)": 100 * float(n) / max(1, counts.sum()) for name, n in zip(self.names, counts, strict=True)
        }

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)
