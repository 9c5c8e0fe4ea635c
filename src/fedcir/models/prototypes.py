"""Class prototypes: sums and means of features by class; and counts of labels."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedcir.types import Arrays


class Prototypes(nn.Module):
    """A mean feature of each class, and of how many samples; none at first."""

    mean: Tensor
    count: Tensor

    def __init__(self, num_classes: int, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_classes, features))
        self.register_buffer("count", torch.zeros(num_classes))

    @property
    def known(self) -> Tensor:
        """Which classes have one, (C,)."""
        return self.count > 0


class LabelCounter(nn.Module):
    """How many samples of each class a client has trained on in this round."""

    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(num_classes))

    def add(self, labels: Tensor) -> None:
        self.counts += labels.bincount(minlength=len(self.counts))


def class_sums(features: Callable[[Tensor], Tensor], data: Iterable[tuple[Tensor, Tensor]], like: Tensor) -> Arrays:
    """Sums of features (C, Z) and numbers of samples (C,) by class, on the CPU; `like` is a head's weight (C, Z)."""
    sums, counts = torch.zeros(like.shape), torch.zeros(len(like))
    for x, y in data:
        sums.index_add_(0, y.cpu(), features(x).cpu())
        counts += torch.bincount(y.cpu(), minlength=len(like))
    return {"sums": sums, "counts": counts}


def class_means(summary: Arrays) -> Tensor:
    """The prototypes (C, Z) of a client; that of a class that it does not hold is zero."""
    return summary["sums"] / summary["counts"].clamp_min(1).unsqueeze(-1)


def means_by(labels: Tensor, points: Tensor, count: int) -> Tensor:
    """The mean of the points (N, Z) of each label below `count`, (count, Z); zero where there are none."""
    sums = points.new_zeros(count, points.shape[-1]).index_add_(0, labels, points)
    return sums / labels.bincount(minlength=count).clamp_min(1).unsqueeze(-1)
