"""The normalisation layer that a model's convolutions are followed by."""

from torch import nn


def norm_layer(kind: str, channels: int) -> nn.Module:
    """BatchNorm, or GroupNorm with about 16 channels a group, which keeps no running statistics."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = max(n for n in range(1, max(2, channels // 16 + 1)) if channels % n == 0)
    return nn.GroupNorm(groups, channels)
