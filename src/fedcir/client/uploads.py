"""Protection and compression of uploads: clipped and noised updates, DP-SGD, and stochastic rounding."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, PrivacyConfig
from fedcir.errors import InputError
from fedcir.models.adapters import frozen_names
from fedcir.models.tensors import batchnorm_names, is_statistic
from fedcir.tasks.task import Task
from fedcir.types import ClientReply, ExampleNoise, Groups, LocalContext, Tensors

QUANTILE, RATE = 0.5, 0.2
"""Quantile of the norms that an adaptive clip follows, and its rate: gamma and eta_C of Andrew et al."""


@dataclass
class PrivateMean:
    """Noised mean of clipped updates, with an adaptive clip if configured.

    DP-FedAvg (McMahan et al., ICLR 2018, https://arxiv.org/abs/1710.06963) with the adaptive clipping of Andrew et al.
    (NeurIPS 2021, https://arxiv.org/abs/1905.03871). The mean divides by the expected number of active clients, never
    by the number of replies.
    """

    settings: PrivacyConfig
    clip: float
    expected: int
    """Expected number of clients in a round."""
    rng: np.random.Generator

    def release(self, replies: Iterable[ClientReply], before: Groups) -> Iterator[ClientReply]:
        """Yield the noised mean as the reply of every expected client: all that a method sees of the round."""
        mean = self.compute((reply.tensors for reply in replies), before)
        for client in range(self.expected):
            yield ClientReply(client, 1, mean, {})

    def compute(self, replies: Iterable[Groups], before: Groups) -> Groups:
        """Return the broadcast plus the noised mean update, and adapt the clip. A missing reply counts as zero."""
        sums = {
            group: {name: torch.zeros_like(t, dtype=torch.double) for name, t in bag.items() if is_private(name, t)}
            for group, bag in before.items()
        }
        within = 0.0
        for arrays in replies:
            norm = math.sqrt(
                sum(float((arrays[g][n].double() - before[g][n]).square().sum()) for g, n in _list_names(sums))
            )
            scale = min(1.0, self.clip / norm) if norm else 1.0
            within += 0.5 if norm <= self.clip else -0.5
            for g, n in _list_names(sums):
                sums[g][n].add_(arrays[g][n].double() - before[g][n], alpha=scale)
        on_sum, on_count = self._multipliers()
        for g, n in _list_names(sums):
            noise = torch.as_tensor(self.rng.standard_normal(sums[g][n].shape))
            sums[g][n].add_(noise, alpha=on_sum * self.clip).div_(self.expected).add_(before[g][n])
        if self.settings.adaptive:
            within += on_count * self.rng.standard_normal()
            self.clip *= math.exp(-RATE * (within / self.expected + 0.5 - QUANTILE))
        return {
            g: {n: sums[g][n].to(t.dtype) if n in sums[g] else t for n, t in bag.items()} for g, bag in before.items()
        }

    def _multipliers(self) -> tuple[float, float]:
        """Noise multipliers of the sum and of the clipping count; together they cost as much as `noise`."""
        z = self.settings.noise
        if not (z and self.settings.adaptive):
            return z, 0.0
        on_count = max(self.expected / 20, z)  # a twentieth in the paper; with few clients that would be too little
        return (z**-2 - (2 * on_count) ** -2) ** -0.5, on_count


def is_private(name: str, tensor: torch.Tensor) -> bool:
    """Check whether a tensor gets noise. BatchNorm statistics, which are frozen, and integer counters do not."""
    return tensor.is_floating_point() and not is_statistic(name)


def _list_names(groups: Groups) -> Iterator[tuple[str, str]]:
    """Names in sorted order, so that a resumed run draws the same noise."""
    return ((group, name) for group in sorted(groups) for name in sorted(groups[group]))


def check_update_privacy(config: Config, algorithm: Algorithm, uploads: Groups) -> None:
    """Refuse methods and settings whose uploads clipping and noise do not cover."""
    if not (config.privacy.by_server or config.privacy.by_clients):
        return
    name = config.algorithm.name
    if algorithm.sends:
        raise InputError(
            f"{name} uploads {', '.join(algorithm.sends)} beside what it trains, which privacy.clip does not cover: "
            "use a method that uploads its model only, such as fedavg, fedcir or fedcirplus"
        )
    if config.model.batchnorm != "frozen" and any(is_statistic(name) for bag in uploads.values() for name in bag):
        raise InputError(
            "privacy.clip cannot cover BatchNorm's running statistics, which noise would make useless: "
            "set model.norm=group, or model.batchnorm=local, which leaves them with the clients"
        )


def sample_poisson_batch(samples: int, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw a batch by Poisson sampling, of this size on average; it may be empty."""
    return np.flatnonzero(rng.random(samples) < size / samples)


def set_private_gradients(
    model: nn.Module, x: Tensor, y: Tensor, ctx: LocalContext, settings: PrivacyConfig, rng: np.random.Generator
) -> None:
    """Set the gradients of the model to the noised mean of per-example gradients, each clipped (DP-SGD).

    Abadi et al., CCS 2016. https://arxiv.org/abs/1607.00133
    """
    assert settings.clip is not None
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    if len(x):
        buffers = dict(model.named_buffers())

        def example_loss(weights: Tensors, image: Tensor, target: Tensor) -> Tensor:
            outputs = functional_call(model, (weights, buffers), (image.unsqueeze(0),))
            return ctx.loss(outputs, target.unsqueeze(0))

        detached = {name: p.detach() for name, p in parameters.items()}
        gradients = vmap(grad(example_loss), (None, 0, 0), randomness="different")(detached, x, y)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()  # (B,)
        scales = (settings.clip / norms.clamp_min(1e-12)).clamp_max(1.0)
        total = {name: torch.einsum("b,b...->...", scales, g) for name, g in gradients.items()}
    for name, p in parameters.items():
        noise = torch.as_tensor(rng.standard_normal(p.shape), dtype=p.dtype).to(p.device)
        mean = (total[name] + settings.noise * settings.clip * noise) / ctx.batch_size
        p.grad = torch.empty_like(p).copy_(mean)  # in the memory layout of the weights


def check_example_privacy(config: Config, algorithm: Algorithm, task: Task, model: nn.Module) -> None:
    """Refuse methods and settings that privacy.unit=example does not cover."""
    name, local = config.algorithm.name, config.local
    assert config.privacy.clip is not None
    if not algorithm.covers_examples(config.privacy.clip):
        raise InputError(
            f"{name} does not minimise the plain loss of each example, or uploads more than its model, "
            "which privacy.unit=example does not cover: use fedavg, or set privacy.unit=client"
        )
    if task.compares_examples:
        raise InputError(
            f"the loss of {task.name} compares examples, which privacy.unit=example cannot clip one by one: "
            "set privacy.unit=client"
        )
    if local.prior != "none" or local.balance != "none":
        raise InputError(
            "privacy.unit=example does not cover the label shares of a client: "
            "set local.prior=none and local.balance=none"
        )
    if batchnorm_names(model) - frozen_names(model) and config.model.batchnorm != "frozen":
        raise InputError("privacy.unit=example cannot take BatchNorm, which mixes examples: set model.norm=group")


def make_noise(privacy: PrivacyConfig) -> ExampleNoise | None:
    """Noise on sums over examples."""
    return ExampleNoise(privacy.clip, privacy.noise) if privacy.by_steps and privacy.clip is not None else None


UploadFormat = Literal["float32", "bfloat16", "int8"]
SCALES, ROUNDING = "scales", "rounding"
"""Group names of the int8 step sizes in an upload, and of the rounding errors in a client's state."""
LARGEST = 127


def compress_update(
    arrays: Groups, received: Groups, residual: Tensors, kind: UploadFormat, rng: np.random.Generator
) -> tuple[Groups, Tensors]:
    """Round the changes of an update stochastically; return the compressed groups and the rounding errors.

    Rounding is unbiased (QSGD: Alistarh et al., NeurIPS 2017, https://arxiv.org/abs/1610.02132), and the errors are
    added to the client's next update (Karimireddy et al., ICML 2019, https://arxiv.org/abs/1901.09847). BatchNorm
    statistics and groups beside the model are not rounded.
    """
    sent: Groups = {group: dict(bag) for group, bag in arrays.items()}
    errors: Tensors = {}
    for group, name in _round_values(arrays, received):
        key = f"{group}/{name}"
        change = arrays[group][name] - received[group][name] + residual.get(key, 0.0)
        if kind == "int8":
            scale = change.abs().max() / LARGEST if change.numel() else change.new_zeros(())
            sent.setdefault(SCALES, {})[key] = scale
            dither = torch.as_tensor(rng.random(change.shape, dtype=np.float32))
            steps = ((change / scale if scale else change) + dither).floor()
            sent[group][name] = steps.clamp(-LARGEST, LARGEST).to(torch.int8)
        else:  # the bits of a bfloat16 as int16, which every message can carry
            lower = torch.as_tensor(rng.integers(0, 1 << 16, change.shape, dtype=np.int32))
            sent[group][name] = ((change.contiguous().view(torch.int32) + lower) >> 16).to(torch.int16)
        errors[key] = change - _change(sent, group, name)
    return sent, errors


def decompress_update(sent: Groups, received: Groups) -> Groups:
    """Restore an update that `compress_update` rounded, given the broadcast."""
    whole: Groups = {group: dict(bag) for group, bag in sent.items() if group != SCALES}
    for group, name in _round_values(whole, received):
        whole[group][name] = received[group][name] + _change(sent, group, name)
    return whole


def _round_values(arrays: Groups, received: Groups) -> list[tuple[str, str]]:
    """Names of the tensors that are rounded: float32 changes of the broadcast, without BatchNorm statistics."""
    return [
        (group, name)
        for group, bag in arrays.items()
        for name in bag
        if name in received.get(group, {}) and received[group][name].dtype == torch.float32 and not is_statistic(name)
    ]


def _change(sent: Groups, group: str, name: str) -> Tensor:
    if SCALES in sent:
        return sent[group][name] * sent[SCALES][f"{group}/{name}"]
    return sent[group][name].view(torch.bfloat16).float()
