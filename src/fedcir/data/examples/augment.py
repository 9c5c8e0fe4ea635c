"""Training images changed at random, on tensors, a batch at a time: flip, crop, colour."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_CROP = 0.75
"""As a share of the side; the crop is enlarged to full size again."""
COLOUR = 0.4
"""The most that brightness changes, in standard deviations, and contrast and saturation, as a share."""


def augment(x: Tensor, kinds: Sequence[str], rng: torch.Generator) -> Tensor:
    """A batch of normalised images (B, C, H, W), each changed on its own. Draws are made on the CPU."""
    for kind in kinds:
        draws = torch.rand(3, len(x), generator=rng).to(x.device)
        x = {"flip": _flip, "crop": _crop, "colour": _colour}[kind](x, draws)
    return x


def _flip(x: Tensor, draws: Tensor) -> Tensor:
    """Half of the images mirrored."""
    return torch.where((draws[0] < 0.5).view(-1, 1, 1, 1), x.flip(3), x)


def _crop(x: Tensor, draws: Tensor) -> Tensor:
    """A square window anywhere, enlarged to the whole."""
    scale = SMALLEST_CROP + (1 - SMALLEST_CROP) * draws[0]
    room = 1 - scale  # how far the window's middle may be from the image's
    across, down = (2 * draws[1] - 1) * room, (2 * draws[2] - 1) * room
    zero = torch.zeros_like(scale)
    theta = torch.stack([scale, zero, across, zero, scale, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    cut = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return cut.contiguous(memory_format=_layout(x))


def _colour(x: Tensor, draws: Tensor) -> Tensor:
    """Brightness, contrast and saturation."""
    brightness, contrast, saturation = (COLOUR * (2 * draws - 1)).view(3, -1, 1, 1, 1).unbind()
    grey = x.mean(1, keepdim=True)
    x = grey + (1 + saturation) * (x - grey)
    middle: Tensor = x.mean((1, 2, 3), keepdim=True)
    return middle + (1 + contrast) * (x - middle) + brightness


def _layout(x: Tensor) -> torch.memory_format:
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format
