"""The caller's own torch Datasets as examples. What they give is checked, and named where it cannot be used."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedcir.data.examples.images import Examples, Positions, fitting
from fedcir.types import InputError


class TensorExamples:
    """Inputs and labels that are whole tensors already."""

    def __init__(self, x: Tensor, y: Tensor, num_classes: int, whose: str) -> None:
        self.x, self.y = x, _class_numbers(y, num_classes, whose)

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(positions)
        return _as_input(self.x[rows].to(device), layout), self.y[rows].to(device)

    def labels(self) -> Tensor:
        return self.y


class DatasetExamples:
    """Any Dataset of (input, label) pairs."""

    def __init__(self, dataset: Any, num_classes: int, whose: str) -> None:
        self.dataset, self.num_classes, self.whose = dataset, num_classes, whose
        self._labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        items = [self._item(int(position)) for position in positions]
        x = _stacked([item[0] for item in items], "inputs", self.whose)
        y = _stacked([item[1] for item in items], "labels", self.whose)
        return _as_input(x.to(device), layout), _class_numbers(y, self.num_classes, self.whose).to(device)

    def labels(self) -> Tensor:
        """Once over the whole Dataset: it gives no label without its input."""
        if self._labels is None:
            given = [self._item(position)[1] for position in range(len(self))]
            self._labels = _class_numbers(_stacked(given, "labels", self.whose), self.num_classes, self.whose)
        return self._labels

    def _item(self, position: int) -> Sequence[Any]:
        item = self.dataset[position]
        if not isinstance(item, tuple | list) or len(item) < 2:
            held = f" ({', '.join(map(str, item))})" if isinstance(item, Mapping) else ""
            kind = f"{type(item).__name__}{held}"
            raise InputError(f"{self.whose} gives items of type {kind}: it must give (input, label) pairs")
        return item


def examples_of(dataset: Any, num_classes: int, whose: str) -> Examples:
    """A torch Dataset as examples; one of whole tensors is not taken apart and put together again.

    `whose` is what it is called where something is wrong with it.
    """
    if isinstance(dataset, DataLoader):
        raise InputError(f"{whose} is a DataLoader: give the Dataset that it loads, its .dataset")
    if isinstance(dataset, Tensor | np.ndarray | tuple):
        raise InputError(f"{whose} is of type {type(dataset).__name__}: give TensorDataset(inputs, labels)")
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not indexed or isinstance(dataset, IterableDataset | Mapping | str):
        raise InputError(
            f"{whose} is of type {type(dataset).__name__}: give one with a length and an index, such as a list of pairs"
        )
    if len(dataset) == 0:
        raise InputError(f"{whose} is empty")
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return TensorExamples(*dataset.tensors, num_classes, whose)
    return DatasetExamples(dataset, num_classes, whose)


def _class_numbers(labels: Tensor, num_classes: int, whose: str) -> Tensor:
    """Labels of any number type, one a sample, as whole numbers (N,)."""
    if labels.numel() != len(labels):
        rows = labels.flatten(1).double()
        is_one_hot = bool(((rows == 0) | (rows == 1)).all() and (rows.sum(1) == 1).all())
        advice = (
            "these are one-hot, so labels.argmax(-1) gives them"
            if is_one_hot
            else "several targets a sample (multi-label, soft labels, masks) are not supported"
        )
        raise InputError(
            f"{whose} gives labels of the shape {list(labels.shape[1:])}: give one class number a sample; {advice}"
        )
    given = labels.reshape(-1)
    numbers = given.long()
    wrong = (given.double() != numbers) | (numbers < 0) | (numbers >= num_classes)
    if wrong.any():
        raise InputError(
            f"{whose} gives the label {given[wrong][0].item()}: "
            f"with num_classes={num_classes}, labels are whole numbers from 0 to {num_classes - 1}"
        )
    return numbers


def _stacked(values: Sequence[Any], what: str, whose: str) -> Tensor:
    """What several items hold, as one tensor."""
    tensors = []
    for value in values:
        try:
            tensors.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise InputError(f"{whose} gives {what} of type {kind}: give tensors, arrays or numbers") from error
    other = next((tensor for tensor in tensors if tensor.shape != tensors[0].shape), None)
    if other is not None:
        shapes = f"{list(tensors[0].shape)} and {list(other.shape)}"
        raise InputError(f"{whose} gives {what} of the shapes {shapes}: make them equal")
    return torch.stack(tensors)


def _as_input(x: Tensor, layout: torch.memory_format) -> Tensor:
    """A batch in its memory layout: bytes become fractions from 0 to 1, other whole numbers stay what they are."""
    if x.dtype == torch.uint8:
        return x.to(torch.float32, memory_format=fitting(x, layout)).div_(255)
    kept = x.dtype if not x.is_floating_point() and x.dtype != torch.bool else torch.float32
    return x.to(kept).contiguous(memory_format=fitting(x, layout))
