"""Labelled examples that yield batches for the model, normalisation and augmentation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedcir.config import PRETRAINED_SIZES, ModelConfig
from fedcir.data.domains import Split
from fedcir.errors import InputError
from fedcir.models import pretrained as efficientnet
from fedcir.models.hugging_face import find_folder, read_normalisation

SMALLEST_CROP = 0.75  # smallest crop as a fraction of the side; it is enlarged to the full size
COLOUR = 0.4  # largest change of brightness (in standard deviations), and of contrast and saturation (as a fraction)


def augment(x: Tensor, kinds: Sequence[str], rng: torch.Generator) -> Tensor:
    """Augment a batch of normalised images (B, C, H, W), each with its own random draws, made on the CPU."""
    for kind in kinds:
        draws = torch.rand(3, len(x), generator=rng).to(x.device)
        x = {"flip": _flip, "crop": _crop, "colour": _jitter_colour}[kind](x, draws)
    return x


def _flip(x: Tensor, draws: Tensor) -> Tensor:
    """Mirror half of the images."""
    return torch.where((draws[0] < 0.5).view(-1, 1, 1, 1), x.flip(3), x)


def _crop(x: Tensor, draws: Tensor) -> Tensor:
    """Crop a square window at a random position and enlarge it."""
    scale = SMALLEST_CROP + (1 - SMALLEST_CROP) * draws[0]
    offset = 1 - scale  # largest one of the window's centre
    across, down = (2 * draws[1] - 1) * offset, (2 * draws[2] - 1) * offset
    zero = torch.zeros_like(scale)
    theta = torch.stack([scale, zero, across, zero, scale, down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    cropped = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return cropped.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _jitter_colour(x: Tensor, draws: Tensor) -> Tensor:
    """Change brightness, contrast and saturation."""
    brightness, contrast, saturation = (COLOUR * (2 * draws - 1)).view(3, -1, 1, 1, 1).unbind()
    grey = x.mean(1, keepdim=True)
    x = grey + (1 + saturation) * (x - grey)
    middle: Tensor = x.mean((1, 2, 3), keepdim=True)
    return middle + (1 + contrast) * (x - middle) + brightness


Positions = NDArray[np.int64]


class Examples(Protocol):
    """Labelled examples in a fixed order."""

    def __len__(self) -> int: ...

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        """Return inputs and targets at these positions, on the device."""
        ...

    def labels(self) -> Tensor:
        """Return all classes, or strata of other tasks, (N,), without loading inputs if possible."""
        ...


@dataclass(frozen=True)
class Normalisation:
    """Normalisation of pixel values in [0, 1] by mean and standard deviation per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @cached_property
    def scale(self) -> Tensor:
        """Factor of the pixel bytes."""
        return torch.tensor([1 / (255 * s) for s in self.std]).view(1, -1, 1, 1)

    @cached_property
    def shift(self) -> Tensor:
        return torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)]).view(1, -1, 1, 1)

    def apply_(self, x: Tensor) -> None:
        """Normalise bytes that were converted to float (B, C, H, W), in place.

        With channels_last, torch would process three values at a time, so whole rows of pixels are processed at once.
        """
        scale, shift = self.scale.to(x.device), self.shift.to(x.device)
        rows = x.permute(0, 2, 3, 1)  # (B, H, W, C)
        if rows.is_contiguous():
            width = x.shape[-1]
            rows.flatten(2).mul_(scale.flatten().repeat(width)).add_(shift.flatten().repeat(width))
        else:
            x.mul_(scale).add_(shift)

    @classmethod
    def from_model(cls, model: ModelConfig, channels: int) -> "Normalisation":
        """Return the configured normalisation, that of a pretrained encoder, or ImageNet's."""
        if model.mean is not None and model.std is not None:
            if len(model.mean) != channels:
                raise InputError(f"model.mean has {len(model.mean)} values, but the images have {channels} channels")
            return cls(model.mean, model.std)
        if set(model.names) <= set(PRETRAINED_SIZES):
            return cls((efficientnet.MEAN,) * channels, (efficientnet.STD,) * channels)
        folder = find_folder(model)
        own = None if folder is None else read_normalisation(folder)
        if own is not None and len(own[0]) in (1, channels):
            mean, std = (values * (channels // len(values)) for values in own)
            return cls(mean, std)
        return cls.default(channels)

    @classmethod
    def default(cls, channels: int) -> "Normalisation":
        """Return ImageNet's constants, which depend on no client's data."""
        if channels == 3:
            return cls((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return cls((0.449,) * channels, (0.226,) * channels)


def select_targets(split: Split, positions: Positions) -> Tensor:
    """Return the targets of these samples as a task takes them: whole numbers as int64, others as float32."""
    targets = split.select_targets(positions)
    return torch.from_numpy(targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64, copy=False))


class ImageExamples:
    """Samples of a split; a batch is moved to the device as bytes and converted to float there."""

    def __init__(self, split: Split, normalisation: Normalisation) -> None:
        self.split, self.normalisation = split, normalisation

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(self.split.pixels(positions)).to(device).permute(0, 3, 1, 2)  # (B, C, H, W)
        x = pixels.to(torch.float32, memory_format=layout)
        self.normalisation.apply_(x)
        return x, select_targets(self.split, positions).to(device)

    def labels(self) -> Tensor:
        return torch.from_numpy(np.array(self.split.labels))  # a copy, since a memory map may be read-only


class ArrayExamples:
    """Samples of a split of floats of any shape, which are passed on as they are."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        values = np.ascontiguousarray(self.split.pixels(positions), dtype=np.float32)
        x = torch.from_numpy(values).to(device)
        return x.contiguous(memory_format=fit_layout(x, layout)), select_targets(self.split, positions).to(device)

    def labels(self) -> Tensor:
        return torch.from_numpy(np.array(self.split.labels))


class PooledExamples:
    """Examples of several clients, concatenated."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        owners = np.searchsorted(self._ends, positions, side="right")
        batches = []
        for owner in np.unique(owners):
            part, selected = self.parts[owner], np.flatnonzero(owners == owner)
            x, y = part.batch(positions[selected] - (self._ends[owner] - len(part)), device, layout)
            batches.append((torch.from_numpy(selected).to(device), x, y))
        _, first, targets = batches[0]
        inputs = first.new_empty((len(positions), *first.shape[1:]))
        inputs = inputs.contiguous(memory_format=fit_layout(first, layout))
        targets = targets.new_empty((len(positions), *targets.shape[1:]))
        for rows, x, y in batches:
            if x.shape[1:] != inputs.shape[1:]:
                shapes = f"{list(inputs.shape[1:])} and {list(x.shape[1:])}"
                raise InputError(f"clients give inputs of the shapes {shapes}, which cannot be in one batch")
            inputs[rows], targets[rows] = x, y
        return inputs, targets

    def labels(self) -> Tensor:
        return torch.cat([part.labels() for part in self.parts])


def fit_layout(x: Tensor, layout: torch.memory_format) -> torch.memory_format:
    """Return the layout for images, and the contiguous format for other inputs, which have no channels."""
    return layout if x.ndim == 4 else torch.contiguous_format
