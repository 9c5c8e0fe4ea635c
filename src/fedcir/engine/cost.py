"""What a round costs: FLOPs by torch's own counter, memory, and what a target accuracy took in all."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedcir.algorithms.algorithm import Algorithm
from fedcir.models.taps import leave_taps
from fedcir.rng import keep_generators
from fedcir.types import LocalContext, Modules, RoundRecord


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
    for network in scratch.values():
        leave_taps(network)  # a convolution counts the same however it is done
    pair = torch.arange(2) % len(x)  # BatchNorm needs two; every counted operation is linear in the batch
    with keep_generators(x.device), Counter() as counter:
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


@dataclass(frozen=True)
class Ledger:
    """What rounds cost in all, over all clients."""

    rounds: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: dict[str, float]
    """By phase: load, train, server, evaluate, write, and the total."""


def ledger(records: Sequence[RoundRecord]) -> Ledger:
    seconds: dict[str, float] = {}
    for record in records:
        for phase, value in record.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    return Ledger(
        rounds=len(records),
        bytes_down=sum(record.bytes_down for record in records),
        bytes_up=sum(record.bytes_up for record in records),
        flops=sum(record.flops for record in records),
        seconds=seconds,
    )


def to_target(records: Sequence[RoundRecord], target: float) -> Ledger | None:
    """What it took until the first evaluated round whose mean accuracy reaches the target; None if none does."""
    for number, record in enumerate(records, start=1):
        if record.accuracy_mean is not None and record.accuracy_mean >= target:
            return ledger(records[:number])
    return None
