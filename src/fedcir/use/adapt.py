"""A network at a new site: BatchNorm statistics from its images, without their labels. Nothing else changes.

Li et al., 2016 (AdaBN). https://arxiv.org/abs/1603.04779
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def statistics_layers(network: nn.Module) -> list[_BatchNorm]:
    """The layers that normalise by statistics of the data that they were trained on."""
    return [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


@torch.no_grad()
def adapted(network: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of the network whose statistics are those of these inputs, each batch with the same weight."""
    own = copy.deepcopy(network).eval()
    layers = statistics_layers(own)
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.train().reset_running_stats()
        layer.momentum = None  # the plain mean of all batches
    for x in batches:
        own(x)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.eval().momentum = momentum
    return own
