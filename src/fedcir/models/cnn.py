"""A small convolutional network for small images."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.models.conv import conv_layer
from fedcir.models.norm import norm_layer

GRID = 4  # the side of the last feature map
SMALLEST = 8  # three poolings leave one pixel


class CNN(nn.Module):
    """Three blocks of convolution, normalisation, pooling and ReLU, then a linear layer. (B, C, H, W) -> (B, 128)."""

    features = 128

    def __init__(self, channels: int = 3, width: int = 16, norm: str = "batch") -> None:
        super().__init__()
        widths = [channels, width, 2 * width, 4 * width]
        self.convs = nn.ModuleList(conv_layer(norm, a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(norm_layer(norm, b, first=b == width) for b in widths[1:])
        self.ends = nn.ModuleList(nn.Identity() for _ in widths[1:])  # for methods that look at what a block gives
        self.fc = nn.Linear(GRID * GRID * widths[-1], self.features)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, end in zip(self.convs, self.norms, self.ends, strict=True):
            # the same as ReLU first, on a quarter of the values
            x = end(F.relu(F.max_pool2d(norm(conv(x)), 2), inplace=True))
        if x.shape[-2:] != (GRID, GRID):  # images of 32 pixels come out right by themselves
            x = F.adaptive_avg_pool2d(x, GRID)
        return F.relu(self.fc(torch.flatten(x, 1)), inplace=True)
