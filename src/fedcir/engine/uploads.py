"""Uploads in fewer bytes: a client's change to the model, rounded at random, with what was lost kept for later.

Rounding is stochastic, so it is right on average (QSGD: Alistarh et al., NeurIPS 2017, https://arxiv.org/abs/1610.02132),
and a client adds its rounding error to its next change (Karimireddy et al., ICML 2019, https://arxiv.org/abs/1901.09847).
BatchNorm's statistics and what a method sends beside the model stay as they are.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedcir.models.tensors import is_statistic
from fedcir.types import Arrays, Groups

Upload = Literal["float32", "bfloat16", "int8"]
SCALES, ROUNDING = "scales", "rounding"
"""The group of the steps that int8 counts in, one for each tensor, and the group of errors that a client keeps."""
LARGEST = 127


def encoded(
    arrays: Groups, received: Groups, kept: Arrays, kind: Upload, rng: np.random.Generator
) -> tuple[Groups, Arrays]:
    """What is sent instead of these arrays, and the rounding errors of it."""
    sent: Groups = {group: dict(bag) for group, bag in arrays.items()}
    errors: Arrays = {}
    for group, name in _rounded(arrays, received):
        key = f"{group}/{name}"
        change = arrays[group][name] - received[group][name] + kept.get(key, 0.0)
        if kind == "int8":
            scale = change.abs().max() / LARGEST if change.numel() else change.new_zeros(())
            sent.setdefault(SCALES, {})[key] = scale
            steps = _at_random(change / scale if scale else change, rng)
            sent[group][name] = steps.clamp(-LARGEST, LARGEST).to(torch.int8)
        else:
            sent[group][name] = _to_bfloat16(change, rng)
        errors[key] = change - _change(sent, group, name)
    return sent, errors


def decoded(sent: Groups, received: Groups) -> Groups:
    """The arrays again, from what was sent out and what came back."""
    whole: Groups = {group: dict(bag) for group, bag in sent.items() if group != SCALES}
    for group, name in _rounded(whole, received):
        whole[group][name] = received[group][name] + _change(sent, group, name)
    return whole


def _rounded(arrays: Groups, received: Groups) -> list[tuple[str, str]]:
    """The names of what is a change to something received, and not a statistic."""
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


def _at_random(values: Tensor, rng: np.random.Generator) -> Tensor:
    """Whole numbers next to the values, the nearer one more likely: right on average."""
    return (values + torch.as_tensor(rng.random(values.shape, dtype=np.float32))).floor()


def _to_bfloat16(values: Tensor, rng: np.random.Generator) -> Tensor:
    """Its bits, as integers that every message can carry: the upper half of float32's, rounded at random."""
    lower = torch.as_tensor(rng.integers(0, 1 << 16, values.shape, dtype=np.int32))
    return ((values.contiguous().view(torch.int32) + lower) >> 16).to(torch.int16)
