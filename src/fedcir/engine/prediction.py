"""How the networks of a method predict. Tests of a round, calibration, evaluation and exports all do it here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.models.encoder import Classifier, GaussianClassifier
from fedcir.types import LocalContext, Modules


@dataclass(frozen=True)
class Output:
    """What a method makes of a batch of images."""

    logits: Tensor  # (B, C)
    z: Tensor | None
    """Representations (B, Z); None where the network has no part called `encoder` that gives them."""
    sigma: Tensor | None
    """Their standard deviations (B, Z), where the encoder is Gaussian."""
    class_weights: Tensor | None
    """Weights of the linear head (C, Z)."""

    @property
    def novelty(self) -> Tensor:
        """How unlike anything seen each image is, from 0 to 1 (B,).

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
    model = modules["model"]
    with _encoder_outputs(model) as outputs:
        logits = algorithm.predict(modules, x, replace(ctx, rng=ctx.rng.clone_state()))
    z, sigma = _representations(outputs, len(x))
    class_weights = model.head.weight if isinstance(model, Classifier | GaussianClassifier) else None
    return Output(logits, z, sigma, class_weights)


@contextmanager
def _encoder_outputs(model: nn.Module) -> Iterator[list[Any]]:
    """Collect what the part of a network that is called `encoder`, if there is one, gives while the network is used."""
    outputs: list[Any] = []
    encoder = getattr(model, "encoder", None)
    if not isinstance(encoder, nn.Module):
        yield outputs
        return
    handle = encoder.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _representations(outputs: Sequence[Any], count: int) -> tuple[Tensor | None, Tensor | None]:
    """z and sigma of a batch: the first output that is (B, Z), or two of these."""
    for output in outputs:
        parts = output if isinstance(output, tuple) else (output,)
        fit = all(isinstance(part, Tensor) and part.ndim == 2 and len(part) == count for part in parts)
        if fit and len(parts) == 1:
            return parts[0], None
        if fit and len(parts) == 2 and parts[0].shape == parts[1].shape:
            return parts[0], parts[1]
    return None, None
