"""Predictions of a method, and which test images a client got right."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.errors import InputError
from fedcir.models.classifier import Classifier, GaussianClassifier
from fedcir.types import Groups, LocalContext, Modules


@dataclass(frozen=True)
class Output:
    """Outputs of a method for a batch of examples."""

    logits: Tensor  # (B, C), or the outputs of another task
    z: Tensor | None
    """Representations (B, Z); None where the network has no part called `encoder` that gives them."""
    sigma: Tensor | None
    """Their standard deviations (B, Z), where the encoder is Gaussian."""
    class_weights: Tensor | None
    """Weights of the linear head (C, Z)."""

    @property
    def novelty(self) -> Tensor:
        """Novelty of each image, from 0 to 1 (B,).

        That is how far the features point away from the weights of every class. Of the scores that need no further
        statistics of clients, it ranked images of an unknown class best (docs/use.md).
        """
        if self.z is None or self.class_weights is None:
            return 1 - self.logits.softmax(-1).amax(-1)
        nearest = (F.normalize(self.z, dim=-1) @ F.normalize(self.class_weights, dim=-1).T).amax(-1)
        return ((1 - nearest) / 2).clamp(0, 1)


def predict(algorithm: Algorithm, modules: Modules, x: Tensor, ctx: LocalContext) -> Output:
    """Predict a batch as the method does.

    Every batch sees the same random numbers, so a method that samples gives the same answer whenever it is asked.
    """
    model, outputs = modules["model"], []
    with ExitStack() as hooks:
        if isinstance(encoder := getattr(model, "encoder", None), nn.Module):
            hooks.enter_context(encoder.register_forward_hook(lambda module, inputs, output: outputs.append(output)))
        logits = algorithm.predict(modules, x, replace(ctx, rng=ctx.rng.clone_state()))
    class_weights = model.head.weight if isinstance(model, Classifier | GaussianClassifier) else None
    for output in outputs:  # z is the first that is (B, Z), or z and sigma are two of these
        parts = output if isinstance(output, tuple) else (output,)
        fit = all(isinstance(part, Tensor) and part.ndim == 2 and len(part) == len(x) for part in parts)
        if fit and len(parts) == 1:
            return Output(logits, parts[0], None, class_weights)
        if fit and len(parts) == 2 and parts[0].shape == parts[1].shape:
            return Output(logits, parts[0], parts[1], class_weights)
    return Output(logits, None, None, class_weights)


GROUP = "hits"
"""Group of an evaluation reply that holds the packed bits and the label counts."""


class SavedDomain(TypedDict):
    """One domain in hits.json."""

    images: int
    hits: str
    """Packed bits as hexadecimal digits."""
    labels: list[int]


class SavedHits(TypedDict):
    """Contents of hits.json."""

    round: int
    domains: dict[str, SavedDomain]


@dataclass(frozen=True)
class DomainHits:
    """Correctly classified test images of a domain, and the number of images of each class."""

    correct: NDArray[np.bool_]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Hits:
    """Results of a round's test, image by image."""

    round: int
    domains: Mapping[str, DomainHits]

    @classmethod
    def from_replies(cls, arrays: Mapping[str, Groups], round: int) -> Self | None:
        """Unpack what the clients that test replied, by domain; None unless every reply holds bits."""
        if not arrays or not all(GROUP in groups for groups in arrays.values()):
            return None
        domains = {}
        for domain, groups in arrays.items():
            bits, labels = groups[GROUP]["bits"], groups[GROUP]["labels"]
            correct = np.unpackbits(bits.numpy(), count=int(labels.sum())).astype(bool)
            domains[domain] = DomainHits(correct, tuple(labels.tolist()))
        return cls(round, domains)

    @classmethod
    def from_json(cls, values: SavedHits) -> Self:
        domains = {}
        for domain, saved in values["domains"].items():
            images, labels = saved["images"], saved["labels"]
            try:
                packed = np.frombuffer(bytes.fromhex(saved["hits"]), np.uint8)
            except ValueError as error:
                raise InputError("hits are not hexadecimal digits") from error
            if images < 1 or len(packed) != -(-images // 8) or min(labels, default=-1) < 0 or sum(labels) != images:
                raise InputError(f"hits and labels are not those of {images} images")
            domains[domain] = DomainHits(np.unpackbits(packed, count=images).astype(bool), tuple(labels))
        return cls(values["round"], domains)

    def to_json(self) -> dict[str, Any]:
        domains = {}
        for domain, hits in self.domains.items():
            packed = np.packbits(hits.correct).tobytes().hex()
            domains[domain] = {"images": len(hits.correct), "hits": packed, "labels": list(hits.labels)}
        return {"round": self.round, "domains": domains}


def pack_hits(correct: Tensor, labels: Tensor, classes: int) -> Groups:
    """Arrays of an evaluation reply: the bits (N,), packed, and the test images of each class (C,)."""
    bits = np.packbits(correct.cpu().numpy())
    return {GROUP: {"bits": torch.from_numpy(bits), "labels": labels.cpu().bincount(minlength=classes)}}
