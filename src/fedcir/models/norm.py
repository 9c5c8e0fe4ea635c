"""The normalisation layer that a model's convolutions are followed by."""

from torch import nn


def norm_layer(kind: str, channels: int) -> nn.Module:
    """BatchNorm, or GroupNorm with about 16 channels a group, which keeps no running statistics."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(max(1, channels // 16), channels)
