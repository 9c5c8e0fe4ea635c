"""Convolutions: plain ones before a norm, and standardised ones where there is none.

Scaled weight standardisation in the place of norms: Brock et al., https://arxiv.org/abs/2101.08692, and for clients
whose images look different FedWon, Zhuang and Lyu, https://arxiv.org/abs/2306.05879 (there with clipped gradients).
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))  # what comes out of a ReLU has that much less spread than what went in


def conv_layer(norm: str, channels_in: int, channels: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    """A convolution to be followed by a norm of this kind."""
    if norm == "standardised":
        return StandardisedConv(channels_in, channels, kernel, stride, padding)
    return nn.Conv2d(channels_in, channels, kernel, stride, padding, bias=False)  # a norm brings its own


class StandardisedConv(nn.Conv2d):
    """A convolution by weights of mean 0 and variance 1 / fan-in for each output channel, times the gain for ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised(self.weight), self.bias, self.stride, self.padding)


def standardised(weight: Tensor) -> Tensor:
    centred = weight - weight.mean((1, 2, 3), keepdim=True)
    variance = centred.square().mean((1, 2, 3), keepdim=True)
    return centred * (variance + 1e-6).rsqrt() * (RELU_GAIN / math.sqrt(weight[0].numel()))
