"""Multi-label classification: any number of labels, such as findings, for each example."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedcir.errors import InputError
from fedcir.tasks.task import Sums, Task, average_known, check_shape, divide
from fedcir.types import Metric


@dataclass(frozen=True)
class MultiLabel(Task):
    """Binary cross-entropy, AUROC and F1; `names` are the labels, and targets (N, L) are 0 or 1.

    AUROC counts pairs of a positive and a negative example of one client, so that it adds over clients.
    """

    metrics_reported = (Metric("auroc", "AUROC"), Metric("f1", "F1"))
    loss_name = "bce"
    adds_over_batches = False

    def check_targets(self, targets: Tensor, source: str) -> Tensor:
        check_shape(targets, [len(self.names)], source, f"give 0 or 1 for each of the {len(self.names)} labels")
        wrong = (targets != 0) & (targets != 1)
        if wrong.any():
            name = self.names[int(wrong.nonzero()[0, 1])]
            raise InputError(f"{source} gives {targets[wrong][0].item():g} for the label {name!r}: labels are 0 or 1")
        return targets.float()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets)

    @property
    def sum_names(self) -> tuple[str, ...]:
        kinds = ("concordant", "pairs", "hits", "predicted", "positive")
        return ("count", *(f"{kind}_{label}" for kind in kinds for label in range(len(self.names))))

    def metrics(self, outputs: Tensor, targets: Tensor) -> Sums:
        sums = {"count": float(len(targets))}
        for label, (scores, truth) in enumerate(zip(outputs.T.cpu().numpy(), targets.T.cpu().numpy() > 0, strict=True)):
            predicted = scores > 0
            sums[f"concordant_{label}"] = count_concordant(scores, truth)
            sums[f"pairs_{label}"] = float(truth.sum()) * float((~truth).sum())
            sums[f"hits_{label}"] = float((predicted & truth).sum())
            sums[f"predicted_{label}"] = float(predicted.sum())
            sums[f"positive_{label}"] = float(truth.sum())
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Macro averages over the labels that define a metric."""
        by_name = self.scores_by_name(sums).values()
        return {metric: average_known(scores[metric] for scores in by_name) for metric in ("auroc", "f1")}

    def scores_by_name(self, sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
        return {
            name: {
                "auroc": divide(sums[f"concordant_{label}"], sums[f"pairs_{label}"]),
                "f1": divide(2 * sums[f"hits_{label}"], sums[f"predicted_{label}"] + sums[f"positive_{label}"]),
            }
            for label, name in enumerate(self.names)
        }

    def find_sums_fault(self, sums: Mapping[str, float]) -> str | None:
        if fault := super().find_sums_fault(sums):
            return fault
        labels = len(self.names)
        for label in range(labels):
            concordant, pairs, hits, predicted, positive = (sums[name] for name in self.sum_names[label + 1 :: labels])
            is_whole = (hits + predicted + positive) % 1 == 0 <= hits <= min(predicted, positive)
            is_counted = max(predicted, positive) <= sums["count"] and pairs == positive * (sums["count"] - positive)
            if not (is_whole and is_counted and 0 <= concordant <= pairs):
                return "its counts are invalid"
        return None

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def summarise(self, targets: NDArray[Any]) -> dict[str, float]:
        """Share of the examples that have each label."""
        return {f"{name} (%)": 100 * float(share) for name, share in zip(self.names, np.mean(targets, 0), strict=True)}

    def strata(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        """Number of the rarest label that an example has, from 1; 0 for none."""
        positive = np.asarray(targets) > 0
        order = np.argsort(positive.sum(0), kind="stable")
        return np.where(positive.any(1), 1 + order[positive[:, order].argmax(1)], 0).astype(np.int64)


def count_concordant(scores: NDArray[Any], truth: NDArray[np.bool_]) -> float:
    """Pairs of a positive and a negative example in the right order; ties count half (Mann-Whitney U)."""
    _, groups, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[groups]
    positive = int(truth.sum())
    return float(ranks[truth].sum()) - positive * (positive + 1) / 2
