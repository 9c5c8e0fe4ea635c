import math

import numpy as np
import pytest
import torch

from fedcir.models.networks import CNN, ResNet18, StandardisedConv, make_conv, standardise_weight

RNG = torch.Generator().manual_seed(0)


def test_standardised_weights_by_numpy() -> None:
    weight = torch.randn(4, 3, 3, 3, generator=RNG) + 2
    w, gain = weight.numpy().reshape(4, 27), math.sqrt(2 / (1 - 1 / math.pi))
    expected = (w - w.mean(1, keepdims=True)) / w.std(1, keepdims=True) / math.sqrt(27) * gain
    np.testing.assert_allclose(standardise_weight(weight).reshape(4, 27), expected, atol=1e-5)


def test_only_the_direction_of_a_filter_counts() -> None:
    conv, x = StandardisedConv(3, 4, 3), torch.randn(2, 3, 8, 8, generator=RNG)
    before = conv(x)
    conv.weight.data.mul_(5).add_(1)
    torch.testing.assert_close(conv(x), before, atol=1e-4, rtol=1e-4)


def test_a_grey_image_of_any_brightness_gives_the_same_inside() -> None:
    conv = StandardisedConv(3, 4, 3)
    outputs = [conv(torch.full((1, 3, 5, 5), brightness)) for brightness in (0.0, 9.0)]
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=0)  # weights sum to 0


@pytest.mark.parametrize("backbone", [CNN, ResNet18])
def test_networks_without_norms_keep_the_size_of_what_passes_and_nothing_of_the_data(
    backbone: type[CNN] | type[ResNet18],
) -> None:
    torch.manual_seed(0)
    network = backbone(width=16, norm="standardised")
    x = torch.randn(4, 3, 64, 64, generator=RNG)
    for item in network.convs if isinstance(network, CNN) else [network.layer1, network.layer2, network.layer4]:
        item.register_forward_hook(lambda layer, inputs, output: seen.append(float(output.detach().std())))
    seen: list[float] = []
    network(x)
    assert len(seen) == 3
    assert 0.4 < min(seen) <= max(seen) < 2.5
    assert not list(network.buffers())


def test_a_convolution_before_a_norm_has_no_bias() -> None:
    assert make_conv("batch", 3, 4, 3).bias is None
    assert make_conv("standardised", 3, 4, 3).bias is not None
