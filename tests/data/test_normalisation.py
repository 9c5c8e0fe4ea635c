"""Bytes as a network takes them."""

import pytest
import torch

from fedcir.data.examples import Normalisation


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(5, 7), (1, 1), (4, 1)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_channel_is_normalised_by_its_own_constants(
    channels: int, size: tuple[int, int], layout: torch.memory_format
) -> None:
    means, deviations = (0.1, 0.2, 0.3, 0.4)[:channels], (0.5, 0.25, 0.2, 0.1)[:channels]
    pixels = torch.arange(2 * channels * size[0] * size[1]).reshape(2, channels, *size) % 256
    x = pixels.to(torch.float32).contiguous(memory_format=layout)
    Normalisation(means, deviations).apply_(x)
    for channel, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        torch.testing.assert_close(x[:, channel], (pixels[:, channel] / 255 - mean) / deviation)
