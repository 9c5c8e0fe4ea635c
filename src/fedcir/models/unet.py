"""A small U-Net, whose feature maps a head of 1x1 convolutions turns into a class for each pixel."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.models.networks import make_conv
from fedcir.models.normalisation import make_norm

LEVELS = 4
"""Resolutions, each half of the one before."""


class UNet(nn.Module):
    """Maps (B, C, H, W) to (B, width, H, W); after Ronneberger et al. (2015), https://arxiv.org/abs/1505.04597."""

    def __init__(self, channels: int = 3, width: int = 16, norm: str = "batch") -> None:
        super().__init__()
        self.features = width
        widths = [width * 2**level for level in range(LEVELS)]
        sizes = enumerate(pairwise([channels, *widths]))
        self.down = nn.ModuleList(DoubleConv(a, b, norm, first=level == 0) for level, (a, b) in sizes)
        self.up = nn.ModuleList(DoubleConv(a + b, b, norm) for b, a in reversed(list(pairwise(widths))))

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.down[0](x)]
        for block in self.down[1:]:
            maps.append(block(F.max_pool2d(maps[-1], 2, ceil_mode=True)))
        x = maps.pop()
        for block in self.up:
            skipped = maps.pop()
            x = block(torch.cat([skipped, F.interpolate(x, size=skipped.shape[-2:])], dim=1))
        return x


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each with a norm and a ReLU."""

    def __init__(self, channels_in: int, channels: int, norm: str, first: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(make_conv(norm, c, channels, 3, padding=1) for c in (channels_in, channels))
        self.norms = nn.ModuleList(make_norm(norm, channels, is_first) for is_first in (first, False))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return x
