"""Small Datasets and encoders for tests of fedcir.train."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

Pairs = list[tuple[Dataset, Dataset]]

TINY = {"num_classes": 3, "rounds": 3, "local_steps": 3, "batch_size": 8, "workers": 1}


def vectors(count: int, site: int) -> TensorDataset:
    """Three classes, each a corner of its own, on a background that differs from site to site."""
    labels = torch.arange(count) % 3
    noise = 0.3 * torch.randn(count, 5, generator=torch.Generator().manual_seed(100 * site + count))
    return TensorDataset(2 * torch.eye(5)[labels] + noise + 0.2 * site, labels)


def images(count: int, site: int) -> TensorDataset:
    labels = torch.arange(count) % 3
    noise = 0.3 * torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(100 * site + count))
    bands = torch.eye(6)[2 * labels].view(count, 1, 6, 1)
    return TensorDataset(noise + 2 * bands, labels)


def clients(make: Callable[[int, int], TensorDataset]) -> Pairs:
    return [(make(24 - site, site), make(12, site)) for site in range(3)]


def on_vectors() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU())


def on_images() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
