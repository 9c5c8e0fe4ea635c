"""Networks that give maps of the size of their images, for segmentation."""

import pytest
import torch

from fedcir import InputError, Segmentation
from fedcir.config import ModelConfig
from fedcir.models.builder import make_image_builder
from fedcir.models.unet import UNet

TASK = Segmentation(("0", "1", "2"))
MONAI = {"spatial_dims": 2, "in_channels": 3, "out_channels": 6, "channels": [4, 8, 16], "strides": [2, 2]}


@pytest.mark.parametrize(("norm", "size"), [("batch", 16), ("invariant", 17), ("standardised", 30)])
def test_the_unet_keeps_the_size_of_any_image(norm: str, size: int) -> None:
    x = torch.randn(2, 3, size, size + 1, requires_grad=True)
    maps = UNet(3, 4, norm)(x)
    assert maps.shape == (2, 4, size, size + 1)
    maps.sum().backward()
    assert x.grad is not None


def test_a_unet_of_monai_is_an_encoder_of_maps() -> None:
    pytest.importorskip("monai")
    builder = make_image_builder(ModelConfig("monai.networks.nets:UNet", MONAI), TASK, 3, 0, 16)
    assert builder.features == 6
    assert builder.classifier()(torch.zeros(2, 3, 16, 16)).shape == (2, 3, 16, 16)
    with pytest.raises(InputError, match="encoder must give maps of the size of the images, got 15x15 and 16x16"):
        make_image_builder(ModelConfig("monai.networks.nets:UNet", MONAI), TASK, 3, 0, 15)


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_networks_of_whole_images_are_refused_for_masks(model: str) -> None:
    with pytest.raises(InputError, match=f"{model} is not for segmentation, .*: set model.name=unet"):
        make_image_builder(ModelConfig(model), TASK, 3, 0, 32)
    with pytest.raises(InputError, match=r"unet is not for classification, .*: set model.name=cnn"):
        make_image_builder(ModelConfig("unet"), 3, 3, 0, 32)
