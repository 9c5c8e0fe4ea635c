"""The normalisation layer that a model's convolutions are followed by."""

from torch import nn


def norm_layer(kind: str, channels: int, first: bool = False) -> nn.Module:
    """A layer of this kind, which in the first stage of a network may be another than after it.

    `invariant` takes each image's own contrast and colour out in the first stage, by InstanceNorm, and normalises by
    groups of channels after it. Neither keeps statistics of the data.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "invariant" and first:
        return nn.InstanceNorm2d(channels, affine=True)
    groups = max(n for n in range(1, max(2, channels // 16 + 1)) if channels % n == 0)  # of about 16 channels
    return nn.GroupNorm(groups, channels)
