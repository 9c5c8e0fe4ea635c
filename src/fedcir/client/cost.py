"""Cost of rounds: FLOPs by torch's counter, memory, bytes and seconds, and a profile of one round."""

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedcir.algorithms.algorithm import Algorithm
from fedcir.models.networks import use_standard_conv
from fedcir.models.optimizers import SGD, RoundOptimizer
from fedcir.rng import keep_generators
from fedcir.types import LocalContext, Modules, RoundRecord

OPERATIONS = 4


class Profiler:
    """Profiles the second round of a run (or the only one), and times all of them."""

    def __init__(self) -> None:
        self._records: list[RoundRecord] = []
        self._operations: list[tuple[str, float]] = []

    def watch(self, rounds: Iterable[RoundRecord], remaining: int) -> Iterator[RoundRecord]:
        """Pass the records of `remaining` rounds on while measuring them."""
        iterator = iter(rounds)
        for number in range(remaining):
            if number != min(1, remaining - 1):
                record = next(iterator, None)
            else:
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    record = next(iterator, None)
                self._operations = [(event.key, event.self_cpu_time_total) for event in profiler.key_averages()]
            if record is None:  # the run has ended early
                return
            self._records.append(record)
            yield record
        yield from iterator  # none is left, but the run is finished only then

    def rows(self) -> Sequence[tuple[str, float]]:
        """Shares of time: by phase over all rounds, then by operation in the profiled round."""
        seconds = dict(sum_costs(self._records).seconds)
        total = seconds.pop("total", 0.0) or 1.0
        phases = [(phase, value / total) for phase, value in seconds.items()]
        spent = sum(value for _, value in self._operations) or 1.0
        largest = sorted(self._operations, key=lambda operation: -operation[1])[:OPERATIONS]
        return [*phases, *((name, value / spent) for name, value in largest)]


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of all operations within, by torch's flop_counter.

    torch's FlopCounterMode does the same, but imports torch's compiler: two seconds and 90 MB.
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
    """FLOPs of one local step, forward and backward, counted on two samples and scaled to the batch.

    They are the mean over a round's steps, rounded, where a method has its own `local_update`. Modules and random
    state are not changed.
    """
    scratch = copy.deepcopy(modules)
    for network in scratch.values():
        use_standard_conv(network)  # a convolution counts the same however it is done
    pair = torch.arange(2) % len(x)  # BatchNorm needs two; every counted operation is linear in the batch
    with keep_generators(x.device), FlopCounter() as counter:
        apart = replace(ctx, rng=torch.Generator(), autocast=nullcontext)
        if algorithm.overrides_local_update:
            trained = (p for name in (*algorithm.trains, *algorithm.keeps) for p in scratch[name].parameters())
            batches, optimizer = repeat((x[pair], y[pair]), ctx.steps), RoundOptimizer(SGD(trained), ctx.lr)
            algorithm.local_update(scratch, batches, optimizer, apart)
            return int(counter.flops) * len(x) // (2 * ctx.steps)
        algorithm.local_loss(scratch, x[pair], y[pair], apart).total.backward()  # type: ignore[no-untyped-call]
    return int(counter.flops) * len(x) // 2


def peak_memory() -> int:
    """Peak memory of this process in bytes; 0 where the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


@dataclass(frozen=True)
class Cost:
    """Total cost of several rounds over all clients."""

    rounds: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: dict[str, float]
    """By phase: load, train, server, evaluate, write, and the total."""


def sum_costs(records: Sequence[RoundRecord]) -> Cost:
    seconds: dict[str, float] = {}
    for record in records:
        for phase, value in record.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    down, up, flops = (sum(getattr(record, name) for record in records) for name in ("bytes_down", "bytes_up", "flops"))
    return Cost(len(records), down, up, flops, seconds)


def cost_to_target(records: Sequence[RoundRecord], target: float) -> Cost | None:
    """Cost up to the first evaluated round whose mean score reaches the target; None if none does."""
    for number, record in enumerate(records, start=1):
        if record.score_mean is not None and not record.metric.is_better(target, record.score_mean):
            return sum_costs(records[:number])
    return None
