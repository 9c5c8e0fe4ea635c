"""Tensors in memory that processes share: it has no name, and the system frees it with the last process that has it."""

import mmap
import os

import torch

from fedcir.types import Groups

ALIGNMENT = 64
Layout = list[tuple[str, list[tuple[str, str, list[int], int]]]]
"""Where tensors lie: by group, each one's name, dtype, shape and offset."""


class Arena:
    """Tensors in memory that processes share."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedcir")
        self._map: mmap.mmap | None = None

    def write(self, groups: Groups) -> Layout:
        layout: Layout = []
        end = 0
        for group, bag in groups.items():
            places = []
            for name, tensor in bag.items():
                places.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
                end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
            layout.append((group, places))
        if self._map is None or len(self._map) < end:
            os.ftruncate(self._file, max(end, ALIGNMENT))
        for group, bag in self.read(layout).items():
            for name, tensor in bag.items():
                tensor.copy_(groups[group][name])
        return layout

    def read(self, layout: Layout) -> Groups:
        """Views of what was written; a copy is the caller's business."""
        size = os.fstat(self._file).st_size
        if size and (self._map is None or len(self._map) < size):
            self._map = mmap.mmap(self._file, size)
        return {group: {place[0]: self._view(*place[1:]) for place in places} for group, places in layout}

    def _view(self, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
        kind, count = getattr(torch, dtype), torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=kind)
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=kind, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Views that were read stay valid as long as somebody has them."""
        self._map = None
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
