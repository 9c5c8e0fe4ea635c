"""What a client trains and tests on: labelled examples that give batches ready for the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcir.config import ModelConfig
from fedcir.data.domains import Split
from fedcir.models import efficientnet
from fedcir.types import InputError

Positions = NDArray[np.int64]


class Examples(Protocol):
    def __len__(self) -> int: ...

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, on the device."""
        ...

    def labels(self) -> Tensor:
        """All labels, (N,), without the inputs where they can be had apart."""
        ...


@dataclass(frozen=True)
class Normalisation:
    """Pixel values in [0, 1] minus the mean, over the standard deviation, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @cached_property
    def scale(self) -> Tensor:
        """What bytes are multiplied by."""
        return torch.tensor([1 / (255 * s) for s in self.std]).view(1, -1, 1, 1)

    @cached_property
    def shift(self) -> Tensor:
        return torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)]).view(1, -1, 1, 1)

    def apply_(self, x: Tensor) -> None:
        """Normalise bytes that were made float (B, C, H, W), in place.

        In channels_last, torch would go through three values at a time, so whole rows of pixels are taken at once.
        """
        scale, shift = self.scale.to(x.device), self.shift.to(x.device)
        rows = x.permute(0, 2, 3, 1)  # (B, H, W, C)
        if rows.is_contiguous():
            width = x.shape[-1]
            rows.flatten(2).mul_(scale.flatten().repeat(width)).add_(shift.flatten().repeat(width))
        else:
            x.mul_(scale).add_(shift)

    @classmethod
    def of(cls, model: ModelConfig, channels: int) -> "Normalisation":
        """What a configured encoder takes images in: as it is set, as the encoder was trained, or ImageNet's."""
        if model.mean is not None and model.std is not None:
            if len(model.mean) != channels:
                raise InputError(f"model.mean has {len(model.mean)} values, but the images have {channels} channels")
            return cls(model.mean, model.std)
        if model.name == efficientnet.NAME:
            return cls((efficientnet.MEAN,) * channels, (efficientnet.STD,) * channels)
        return cls.of_channels(channels)

    @classmethod
    def of_channels(cls, channels: int) -> "Normalisation":
        """ImageNet's: constants that need no look at any client's data and fit its published weights."""
        if channels == 3:
            return cls((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return cls((0.449,) * channels, (0.226,) * channels)


class ImageExamples:
    """Samples of a split; a batch is gathered as bytes, moved to the device and only there made float."""

    def __init__(self, split: Split, normalisation: Normalisation) -> None:
        self.split, self.normalisation = split, normalisation

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(self.split.pixels(positions)).to(device).permute(0, 3, 1, 2)  # (B, C, H, W)
        x = pixels.to(torch.float32, memory_format=layout)
        self.normalisation.apply_(x)
        return x, torch.from_numpy(self.split.labels[positions]).to(device)

    def labels(self) -> Tensor:
        return torch.from_numpy(np.array(self.split.labels))  # a copy, since they may be a map to read only


class PooledExamples:
    """Several clients' examples as one."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        owners = np.searchsorted(self._ends, positions, side="right")
        x = y = None
        for owner in np.unique(owners):
            part, places = self.parts[owner], np.flatnonzero(owners == owner)
            some_x, some_y = part.batch(positions[places] - (self._ends[owner] - len(part)), device, layout)
            if x is None or y is None:
                x = some_x.new_empty((len(positions), *some_x.shape[1:])).contiguous(
                    memory_format=fitting(some_x, layout)
                )
                y = some_y.new_empty(len(positions))
            if some_x.shape[1:] != x.shape[1:]:
                shapes = f"{list(x.shape[1:])} and {list(some_x.shape[1:])}"
                raise InputError(
                    f"clients give inputs of the shapes {shapes}, which cannot be in one batch: make them equal"
                )
            rows = torch.from_numpy(places).to(device)
            x[rows], y[rows] = some_x, some_y
        assert x is not None
        assert y is not None
        return x, y

    def labels(self) -> Tensor:
        return torch.cat([part.labels() for part in self.parts])


def fitting(x: Tensor, layout: torch.memory_format) -> torch.memory_format:
    """Only images have channels to put last."""
    return layout if x.ndim == 4 else torch.contiguous_format
