"""Malicious clients for experiments: poisoned data (label-flip, backdoor), tampered updates (scale, sign-flip, noise).

BatchNorm statistics are sent as trained, because implausible ones would be dropped.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedcir.config import AttackConfig
from fedcir.data.examples import Examples, Positions
from fedcir.data.federation import Client
from fedcir.errors import InputError
from fedcir.models.tensors import is_statistic, update_norm
from fedcir.rng import numpy_rng, torch_rng
from fedcir.tasks.task import Task
from fedcir.types import ClientReply, Groups, Tensors

STRENGTHS = {"label-flip": 1.0, "scale": 10.0, "sign-flip": 4.0, "noise": 10.0, "backdoor": 0.5}
PATCH = 3
"""Width and height of the patch, in the lower right corner."""
BRIGHT = 2.5
"""Pixel value of the patch: about white after normalisation."""
TARGET = 0
"""Class that the backdoor makes of images with the patch."""


def add_malicious_clients(
    clients: Iterable[Client], attack: AttackConfig, trained: tuple[str, ...], task: Task, seed: int
) -> tuple[Client, ...]:
    """Make some clients malicious, drawn by the seed. `trained` names the groups that they upload."""
    everyone = tuple(clients)
    if attack.kind == "none":
        return everyone
    trainers = [client.id for client in everyone if client.train is not None]
    if attack.clients >= len(trainers):
        raise InputError(
            f"attack.clients is {attack.clients}, but must be below the {len(trainers)} that train: lower it"
        )
    bad = numpy_rng(seed, "attack").choice(trainers, size=attack.clients, replace=False)
    return tuple(
        _make_malicious(client, attack, trained, task, seed) if client.id in bad else client for client in everyone
    )


def _make_malicious(client: Client, attack: AttackConfig, trained: tuple[str, ...], task: Task, seed: int) -> Client:
    strength = STRENGTHS[attack.kind] if attack.strength is None else attack.strength
    if attack.kind not in ("label-flip", "backdoor"):
        return replace(
            client, tamper=partial(tamper_reply, kind=attack.kind, strength=strength, groups=trained, seed=seed)
        )
    if not task.has_classes:
        raise InputError(f"attack.kind={attack.kind} changes classes, which {task.name} has not: choose another kind")
    assert client.train is not None
    chosen = numpy_rng(seed, "attack", client.id).random(len(client.train)) < strength
    if attack.kind == "backdoor":
        return replace(client, train=PoisonedExamples(client.train, chosen, target_class, patch=True))
    relabel = partial(next_class, num_classes=task.outputs)
    return replace(client, train=PoisonedExamples(client.train, chosen, relabel, patch=False))


@dataclass(frozen=True)
class PoisonedExamples:
    """Examples, some of them with another label, and with the patch if `patch`."""

    clean: Examples
    chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]
    relabel: Callable[[Tensor], Tensor]
    patch: bool

    def __len__(self) -> int:
        return len(self.clean)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        x, y = self.clean.batch(positions, device, layout)
        rows = torch.from_numpy(self.chosen[positions]).to(device)
        if self.patch:
            x = torch.where(rows.view(-1, 1, 1, 1), add_patch(x), x)
        return x, torch.where(rows, self.relabel(y), y)

    def labels(self) -> Tensor:
        clean = self.clean.labels()
        return torch.where(torch.from_numpy(self.chosen), self.relabel(clean), clean)


def next_class(labels: Tensor, num_classes: int) -> Tensor:
    return (labels + 1) % num_classes


def target_class(labels: Tensor) -> Tensor:
    return torch.full_like(labels, TARGET)


def add_patch(images: Tensor) -> Tensor:
    """Add the patch to images (B, C, H, W)."""
    if images.ndim != 4 or min(images.shape[-2:]) < PATCH:
        raise InputError(
            f"attack.kind=backdoor patches images of at least {PATCH} x {PATCH} pixels, but clients train on inputs of "
            f"the shape {list(images.shape[1:])}: choose another kind"
        )
    images = images.clone()
    images[..., -PATCH:, -PATCH:] = BRIGHT
    return images


def tamper_reply(
    reply: ClientReply, sent: Groups, round: int, kind: str, strength: float, groups: tuple[str, ...], seed: int
) -> ClientReply:
    """Scale the update of a reply, flip its sign, or replace it by noise of a multiple of its norm."""
    rng = torch_rng(seed, "attack", round, reply.client_id)
    changed = {group: _tamper_tensors(reply.tensors[group], sent[group], kind, strength, rng) for group in groups}
    return replace(reply, tensors={**reply.tensors, **changed})


def _tamper_tensors(bag: Tensors, sent: Tensors, kind: str, strength: float, rng: torch.Generator) -> Tensors:
    names = [name for name, tensor in bag.items() if tensor.is_floating_point() and not is_statistic(name)]
    if kind == "noise":
        std = strength * update_norm(bag, sent) / math.sqrt(sum(bag[name].numel() for name in names))
        moved = {name: std * torch.randn(bag[name].shape, generator=rng) for name in names}
    else:
        factor = strength if kind == "scale" else -strength
        moved = {name: factor * (bag[name] - sent[name]) for name in names}
    return {**bag, **{name: (sent[name] + step).to(bag[name].dtype) for name, step in moved.items()}}


@torch.inference_mode()
def backdoor_success(model: nn.Module, tests: Iterable[Examples]) -> float:
    """Share of test images of other classes that the model assigns to the target class once they have the patch."""
    model.eval()
    fooled = count = 0
    for data in tests:
        x, y = data.batch(np.arange(len(data)), torch.device("cpu"), torch.contiguous_format)
        is_other_class = y != TARGET
        fooled += int((model(add_patch(x[is_other_class])).argmax(-1) == TARGET).sum())
        count += int(is_other_class.sum())
    return fooled / count
