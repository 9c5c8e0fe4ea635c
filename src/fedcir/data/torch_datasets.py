"""Federations of the caller's own torch Datasets, whose items are checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedcir.data.examples import Examples, Positions, fit_layout
from fedcir.data.federation import Client, Federation
from fedcir.data.manifest import add_hash
from fedcir.errors import InputError
from fedcir.models.builder import check_features, make_module_builder
from fedcir.tasks.classification import describe_task, to_task
from fedcir.tasks.task import Task

Pairs = Mapping[str, tuple[Any, Any]] | Iterable[tuple[Any, Any]]
"""(train, test) pairs of torch Datasets, either of which may be None: one per client, by name or as a list."""


class TensorExamples:
    """Examples of a TensorDataset."""

    def __init__(self, x: Tensor, y: Tensor, task: Task, whose: str) -> None:
        self.x, self.y, self.task = x, task.check_targets(y, whose), task

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(positions)
        return _to_input(self.x[rows].to(device), layout), self.y[rows].to(device)

    def labels(self) -> Tensor:
        return _to_strata(self.y, self.task)


class DatasetExamples:
    """Examples of any Dataset of (input, target) pairs."""

    def __init__(self, dataset: Any, task: Task, whose: str) -> None:
        self.dataset, self.task, self.whose = dataset, task, whose
        self._labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*(self._get_pair(int(position)) for position in positions), strict=True)
        y = self.task.check_targets(_stack(targets, "labels", self.whose), self.whose)
        return _to_input(_stack(inputs, "inputs", self.whose).to(device), layout), y.to(device)

    def labels(self) -> Tensor:
        """Read the labels by iterating over the whole Dataset, once."""
        if self._labels is None:
            values = [self._get_pair(position)[1] for position in range(len(self))]
            targets = self.task.check_targets(_stack(values, "labels", self.whose), self.whose)
            self._labels = _to_strata(targets, self.task)
        return self._labels

    def _get_pair(self, position: int) -> tuple[Any, Any]:
        item = self.dataset[position]
        if not isinstance(item, tuple | list) or len(item) < 2:
            keys = f" ({', '.join(map(str, item))})" if isinstance(item, Mapping) else ""
            kind = f"{type(item).__name__}{keys}"
            raise InputError(f"{self.whose} gives items of type {kind}: it must give (input, label) pairs")
        return item[0], item[1]


def make_examples(dataset: Any, task: Task, whose: str) -> Examples:
    """Convert a torch Dataset to examples; `whose` describes it in errors."""
    if isinstance(dataset, DataLoader):
        raise InputError(f"{whose} is a DataLoader: give the Dataset that it loads, its .dataset")
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not indexed or isinstance(dataset, Tensor | np.ndarray | tuple | IterableDataset | Mapping | str):
        fix = "give one with a length and an index, such as a list of pairs or TensorDataset(inputs, labels)"
        raise InputError(f"{whose} is of type {type(dataset).__name__}: {fix}")
    if len(dataset) == 0:
        raise InputError(f"{whose} is empty")
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return TensorExamples(*dataset.tensors, task, whose)
    return DatasetExamples(dataset, task, whose)


def _to_strata(targets: Tensor, task: Task) -> Tensor:
    return torch.from_numpy(task.strata(targets.cpu().numpy()))


def _stack(values: Sequence[Any], noun: str, whose: str) -> Tensor:
    """Stack the values of several items into a tensor."""
    tensors = []
    for value in values:
        try:
            tensors.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise InputError(f"{whose} gives {noun} of type {kind}: give tensors, arrays or numbers") from error
    odd = next((tensor for tensor in tensors if tensor.shape != tensors[0].shape), None)
    if odd is not None:
        shapes = f"{list(tensors[0].shape)} and {list(odd.shape)}"
        raise InputError(f"{whose} gives {noun} of the shapes {shapes}: make them equal")
    return torch.stack(tensors)


def _to_input(x: Tensor, layout: torch.memory_format) -> Tensor:
    """Convert a batch to its memory layout; bytes become fractions from 0 to 1, other integers stay as they are."""
    if x.dtype == torch.uint8:
        return x.to(torch.float32, memory_format=fit_layout(x, layout)).div_(255)
    dtype = torch.float32 if x.is_floating_point() or x.dtype == torch.bool else x.dtype
    return x.to(dtype).contiguous(memory_format=fit_layout(x, layout))


def federation_from_datasets(
    pairs: Pairs, encoder: torch.nn.Module, task: Task | int, latent: int | None, seed: int
) -> Federation:
    """Build a federation of the caller's own (train, test) Datasets and encoder."""
    task = to_task(task)
    if not isinstance(pairs, Iterable):
        raise InputError(f"clients must be a list or dict of (train, test) pairs, got {type(pairs).__name__}")
    if not isinstance(pairs, Mapping):
        pairs = {f"client-{number}": pair for number, pair in enumerate(pairs)}
    if (wrong := next((name for name in pairs if not isinstance(name, str) or not name), None)) is not None:
        raise InputError(f"clients must be named by strings, got {wrong!r}")
    clients = [_make_client(number, name, pair, task) for number, (name, pair) in enumerate(pairs.items())]
    if all(client.train is None for client in clients):
        raise InputError("clients must hold at least one (train, test) pair with a train Dataset, got none")
    batches: dict[tuple[torch.Size, torch.dtype], tuple[str, Tensor]] = {}  # two inputs of each shape and type
    for client in clients:
        for part, examples in (("train", client.train), ("test", client.test)):
            if examples is not None:
                x, _ = examples.batch(np.zeros(1, dtype=np.int64), torch.device("cpu"), torch.contiguous_format)
                batches.setdefault((x.shape, x.dtype), (f"the {part} Dataset of {client.domain!r}", x[[0, 0]]))
    (first, example), *rest = batches.values()
    builder = make_module_builder(encoder, example, task, latent, seed, first)
    for whose, batch in rest:
        check_features(builder, batch, whose)
    described = [{"id": c.id, "domain": c.domain, "train": len(c.train or ())} for c in clients]
    card = describe_task(task)
    manifest = add_hash({"clients": described, **{name: value for name, value in card.items() if name == "task"}})
    unseen = tuple(client.domain for client in clients if client.train is None)
    return Federation("own", tuple(clients), builder, card, manifest, unseen=unseen)


def _make_client(number: int, name: str, pair: Any, task: Task) -> Client:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        kind = f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, tuple | list) else type(pair).__name__
        raise InputError(f"client {name!r} is of type {kind}: give (train, test), or (train, None) without a test set")
    train, test = (
        None if dataset is None else make_examples(dataset, task, f"the {part} Dataset of {name!r}")
        for part, dataset in zip(("train", "test"), pair, strict=True)
    )
    if train is None and test is None:
        raise InputError(f"client {name!r} has neither a train nor a test Dataset: leave it out")
    return Client(number, name, train, test)
