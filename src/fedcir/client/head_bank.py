"""Heads that a client tests on its own test images: one bit for each head and image leaves it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedcir.algorithms.fedcirone import site_keys
from fedcir.client.local_update import LocalTrainer
from fedcir.data.examples import Examples
from fedcir.errors import InputError
from fedcir.models.closed_form import LinearHead
from fedcir.types import Groups, LocalContext, Tensors

COALITIONS = "coalitions"
"""Group of the broadcast that holds heads of coalitions, and of the reply with the bits."""
MAX_HEADS = 5_000
"""Most heads that a client tests."""


@dataclass(frozen=True)
class HeadBank:
    """Linear heads on standardised features; the last ones take the features in a basis."""

    weight: Tensor  # (K, C, F)
    bias: Tensor  # (K, C)
    basis: Tensor  # (F, D); D is 0 if no head uses it
    projected_weight: Tensor  # (M, C, D)
    projected_bias: Tensor  # (M, C)

    @classmethod
    def from_heads(cls, whole: Sequence[LinearHead], others: Sequence[LinearHead], basis: Tensor | None) -> Self:
        """Pack heads in single precision: `others` take features in the basis (F, D), or as they are without one."""
        if basis is None:
            whole, others = [*whole, *others], ()
            basis = whole[0].weight.new_zeros(whole[0].weight.shape[1], 0)
        classes = len(whole[0].bias)
        projected = torch.stack([head.weight for head in others]) if others else basis.new_zeros(0, classes, 0)
        bias = torch.stack([head.bias for head in others]) if others else basis.new_zeros(0, classes)
        heads = torch.stack([head.weight for head in whole]), torch.stack([head.bias for head in whole])
        return cls(*(tensor.float() for tensor in (*heads, basis, projected, bias)))

    @classmethod
    def from_tensors(cls, tensors: Tensors, features: int, classes: int) -> Self:
        """Read the group of a broadcast, or raise InputError if it holds no heads for these features."""
        names = [field.name for field in fields(cls)]
        if {*tensors} != {*names}:
            raise InputError(f"heads of coalitions are {sorted(names)}, not {sorted(tensors)}")
        bank = cls(**tensors)
        heads, others, width = len(bank.weight), len(bank.projected_weight), bank.basis.shape[-1]
        shapes = (heads, classes, features), (heads, classes), (features, width), (others, classes, width)
        shapes_are_right = all(
            tensors[name].shape == shape and tensors[name].dtype == torch.float32
            for name, shape in zip(names, (*shapes, (others, classes)), strict=True)
        )
        if not shapes_are_right or len(bank) > MAX_HEADS:
            message = f"the heads of coalitions do not fit the model, or are more than {MAX_HEADS:,}"
            raise InputError(message, public=message)
        return bank

    def to_tensors(self) -> Tensors:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __len__(self) -> int:
        return len(self.weight) + len(self.projected_weight)

    @property
    def directions(self) -> int:
        """Number of directions of the features that the last heads use."""
        return self.basis.shape[1] or self.weight.shape[2]

    def find_hits(self, features: Tensor, labels: Tensor) -> Tensor:
        """Classify images by their standardised features (N, F): whether each head is right (K + M, N)."""
        rows = [features @ weight.T + bias for weight, bias in zip(self.weight, self.bias, strict=True)]
        projected = features @ self.basis
        pairs = zip(self.projected_weight, self.projected_bias, strict=True)
        rows += [projected @ weight.T + bias for weight, bias in pairs]
        return torch.stack([logits.argmax(1) == labels for logits in rows])


def collect_features(trainer: LocalTrainer, data: Examples, ctx: LocalContext) -> tuple[Tensor, Tensor]:
    """Standardised features (N, F) of examples of a client that is loaded, and their labels."""
    encoder = trainer.modules["model"].encoder
    pairs = [(encoder(x, site_keys(ctx)), y) for x, y in trainer.iterate_batches(data)]
    features, labels = zip(*pairs, strict=True)
    return torch.cat(features), torch.cat(labels)


def pack_head_hits(trainer: LocalTrainer, data: Examples, heads: Tensors, ctx: LocalContext) -> Groups:
    """Test the heads of a broadcast on examples: the group of a reply with a bit for each head and example."""
    features, labels = collect_features(trainer, data, ctx)
    bank = HeadBank.from_tensors(heads, features.shape[1], trainer.task.outputs)
    return {COALITIONS: {"bits": torch.from_numpy(np.packbits(bank.find_hits(features, labels).numpy(), axis=1))}}
