"""The two workloads, the same for everyone: data, network and what a client does in a round."""

import sys
from typing import NamedTuple

import torch
from torch import nn


class Workload(NamedTuple):
    clients: int
    images: int
    active: int
    steps: int
    batch: int
    size: int
    rounds: int
    resnet: bool


WORKLOADS = {
    "W1": Workload(clients=100, images=200, active=10, steps=20, batch=32, size=28, rounds=10, resnet=False),
    "W2": Workload(clients=4, images=200, active=4, steps=20, batch=32, size=64, rounds=3, resnet=True),
}
CLASSES = 10
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4


def encoder(work: Workload) -> tuple[nn.Module, int]:
    """The network up to its features, and how many these are."""
    torch.manual_seed(0)
    if work.resnet:
        sys.path.insert(0, __file__.rpartition("/benchmarks/")[0] + "/src")
        from fedcir.models.networks import ResNet18

        return ResNet18(), 512
    layers = []
    for inputs, outputs in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten()), 32 * (work.size // 4) ** 2


def network(work: Workload) -> nn.Module:
    first, features = encoder(work)
    return nn.Sequential(first, nn.Linear(features, CLASSES))


def images(work: Workload, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(client)
    x = torch.randint(0, 256, (work.images, 3, work.size, work.size), generator=rng, dtype=torch.uint8)
    return x, torch.randint(CLASSES, (work.images,), generator=rng)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x.float().div_(127.5).sub_(1)


def cohort(work: Workload, round: int) -> list[int]:
    rng = torch.Generator().manual_seed(1000 + round)
    return torch.randperm(work.clients, generator=rng)[: work.active].tolist()


def batches(work: Workload, seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    stream = torch.cat(
        [torch.randperm(work.images, generator=rng) for _ in range(work.steps * work.batch // work.images + 1)]
    )
    return list(stream[: work.steps * work.batch].split(work.batch))


def local_steps(model: nn.Module, work: Workload, x: torch.Tensor, y: torch.Tensor, seed: int) -> None:
    """What a client does, as one writes it by hand."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, foreach=True)
    loss = nn.CrossEntropyLoss()
    for rows in batches(work, seed):
        optimizer.zero_grad()
        loss(model(normalised(x[rows])), y[rows]).backward()
        optimizer.step()
