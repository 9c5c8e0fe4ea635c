"""What a round costs: FLOPs by torch's own counter, memory, and what a target accuracy took in all."""

import copy
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedcir.algorithm import Algorithm
from fedcir.types import LocalContext, Modules


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what torch's flop_counter says of every operation within.

    Its own FlopCounterMode does the same, but brings torch's compiler with it: two seconds and 90 MB.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which is what imports the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def step_flops(algorithm: Algorithm, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> int:
    """FLOPs of one local step, forward and backward, on a batch of this size. Touches neither modules nor rng.

    They are counted on two samples and scaled to the batch.
    """
    scratch = copy.deepcopy(modules)
    pair = torch.arange(2) % len(x)  # BatchNorm needs two; every counted operation is linear in the batch
    with Counter() as counter:
        apart = replace(ctx, rng=torch.Generator())
        algorithm.local_loss(scratch, x[pair], y[pair], apart).total.backward()  # type: ignore[no-untyped-call]
    return int(counter.flops) * len(x) // 2


def peak_memory() -> int:
    """Bytes that this process has held at most; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
