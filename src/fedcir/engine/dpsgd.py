"""Example-level differential privacy: SGD on clipped gradients of single examples, with Gaussian noise.

DP-SGD (Abadi et al., CCS 2016, https://arxiv.org/abs/1607.00133). Each example of a client takes part in a step by a
draw of its own, as the accountant assumes, and the sum is divided by the batch size that was asked for.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, PrivacyConfig
from fedcir.models.tensors import batchnorm_names
from fedcir.types import Arrays, InputError, LocalContext


def poisson_batch(samples: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of a batch of this size on average; perhaps there are none."""
    return np.flatnonzero(rng.random(samples) < size / samples)


def private_gradients(
    model: nn.Module, x: Tensor, y: Tensor, ctx: LocalContext, settings: PrivacyConfig, rng: np.random.Generator
) -> None:
    """Give the model the noised mean of clipped gradients."""
    assert settings.clip is not None
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    if len(x):
        buffers = dict(model.named_buffers())

        def of_one(weights: Arrays, image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, (weights, buffers), (image.unsqueeze(0),))
            return ctx.cross_entropy(logits, label.unsqueeze(0))

        detached = {name: p.detach() for name, p in parameters.items()}
        each = vmap(grad(of_one), (None, 0, 0), randomness="different")(detached, x, y)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()  # (B,)
        scales = (settings.clip / norms.clamp_min(1e-12)).clamp_max(1.0)
        total = {name: torch.einsum("b,b...->...", scales, g) for name, g in each.items()}
    for name, p in parameters.items():
        noise = torch.as_tensor(rng.standard_normal(p.shape), dtype=p.dtype).to(p.device)
        mean = (total[name] + settings.noise * settings.clip * noise) / ctx.batch_size
        p.grad = torch.empty_like(p).copy_(mean)  # in the memory layout of the weights


def check_examples(config: Config, algorithm: Algorithm, model: nn.Module) -> None:
    """Refuse a loss that is not one of single examples, and what else looks at all of a client's data."""
    name, local = config.algorithm.name, config.local
    if type(algorithm).local_loss is not Algorithm.local_loss or algorithm.sends:
        raise InputError(
            f"{name} does not minimise a plain cross-entropy of each image, or uploads more than its model, "
            "which privacy.unit=example does not cover: use fedavg, or set privacy.unit=client"
        )
    if local.prior != "none" or local.balance != "none":
        raise InputError(
            "privacy.unit=example does not cover the label shares of a client: "
            "set local.prior=none and local.balance=none"
        )
    if batchnorm_names(model) and config.model.batchnorm != "frozen":
        raise InputError("privacy.unit=example cannot take BatchNorm, which mixes examples: set model.norm=group")
