"""What a round costs: FLOPs by torch's own counter, memory, and what a target accuracy took in all."""

import copy
import sys
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedcir.algorithm import Algorithm
from fedcir.types import LocalContext, Modules


def step_flops(algorithm: Algorithm, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> int:
    """FLOPs of one local step, forward and backward, on a batch of this size. Touches neither modules nor rng.

    They are counted on two samples and scaled to the batch.
    """
    scratch = copy.deepcopy(modules)
    pair = torch.arange(2) % len(x)  # BatchNorm needs two; every counted operation is linear in the batch
    with FlopCounterMode(display=False) as counter:
        apart = replace(ctx, rng=torch.Generator())
        algorithm.local_loss(scratch, x[pair], y[pair], apart).total.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops()) * len(x) // 2


def peak_memory() -> int:
    """Bytes that this process has held at most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
