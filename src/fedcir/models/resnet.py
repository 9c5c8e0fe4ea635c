"""ResNet18 without its classifier, named as in torchvision so that its published weights load.

He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.models.conv import conv_layer
from fedcir.models.norm import norm_layer


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, norm: str, first: bool) -> None:
        super().__init__()
        self.conv1 = conv_layer(norm, channels_in, channels, 3, stride, 1)
        self.bn1 = norm_layer(norm, channels, first)
        self.conv2 = conv_layer(norm, channels, channels, 3, 1, 1)
        self.bn2 = norm_layer(norm, channels, first)
        self.grows = norm == "standardised"
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                conv_layer(norm, channels_in, channels, 1, stride), norm_layer(norm, channels, first)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        total = self.bn2(self.conv2(x)) + shortcut
        return F.relu(
            total * math.sqrt(0.5) if self.grows else total, inplace=True
        )  # two alike have twice the variance


class ResNet18(nn.Module):
    """Maps (B, C, H, W) to (B, 8 * width)."""

    def __init__(self, channels: int = 3, width: int = 64, norm: str = "batch") -> None:
        super().__init__()
        self.features = 8 * width
        self.conv1 = conv_layer(norm, channels, width, 7, 2, 3)
        self.bn1 = norm_layer(norm, width, first=True)
        self.stem = nn.Identity()  # for methods that look at what a stage gives
        self.layer1 = _stage(width, width, 1, norm, first=True)
        self.layer2 = _stage(width, 2 * width, 2, norm)
        self.layer3 = _stage(2 * width, 4 * width, 2, norm)
        self.layer4 = _stage(4 * width, 8 * width, 2, norm)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, 1))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


def _stage(channels_in: int, channels: int, stride: int, norm: str, first: bool = False) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(channels_in, channels, stride, norm, first), BasicBlock(channels, channels, 1, norm, first)
    )
