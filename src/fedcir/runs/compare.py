"""Several methods over the same seeds: their accuracies, and each one's paired difference to a baseline."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedcir.engine.cost import to_target
from fedcir.runs.intervals import MIN_SEEDS, RunAccuracy, chance_level, is_at_chance, mean_interval
from fedcir.runs.run import Run
from fedcir.types import InputError


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and its standard deviation (ddof 1) where there is more than one."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class ToTarget:
    """What it took to reach a target accuracy: medians over seeds, None where that is a seed that never did."""

    rounds: float | None
    bytes: float | None
    """Down and up, over all clients."""
    reached: int
    """In how many seeds it got there."""
    flops: float | None = None
    """Over all clients."""


@dataclass(frozen=True)
class Method:
    """One method's final round over all seeds. Accuracies are fractions."""

    algorithm: str
    domains: dict[str, Estimate]
    mean: Estimate
    """Plain, over the domains that somebody trains on, as is the worst."""
    worst: Estimate
    to_target: ToTarget
    difference: Estimate | None
    """Paired by seed, to the baseline; None for the baseline."""
    half_width: float | None
    """Half of the difference's 95 % interval over seeds and test images; None with one seed."""
    unseen: tuple[str, ...] = ()
    """The domains that nobody trains on."""
    unseen_mean: Estimate | None = None
    """Plain, over them."""
    pools: bool = False
    """Whether it trains on all data in one place: a ceiling for the others, and no federated method."""
    paired_seeds: int = 0
    """Seeds of the difference."""
    image_half_width: float = 0.0
    """The part of the difference's half width that comes from the test images."""
    mean_half_width: float | None = None
    """Half of the mean's 95 % interval over seeds and test images, with one seed over test images."""
    chance: float | None = None
    """Accuracy of one answer to all test images, where it is known."""
    at_chance: bool = False
    """Whether its accuracy cannot be told from that."""

    @property
    def better(self) -> bool:
        """Whether it is above the baseline by more than chance, over at least three seeds."""
        return self.is_beyond_chance and self.difference is not None and self.difference.mean > 0

    @property
    def is_beyond_chance(self) -> bool:
        """Whether it differs from the baseline by more than chance, over at least three seeds."""
        if self.difference is None or self.half_width is None or self.paired_seeds < MIN_SEEDS:
            return False
        return abs(self.difference.mean) > self.half_width

    @property
    def interval(self) -> str:
        """That of the difference, in points."""
        if self.difference is None or self.half_width is None:
            return ""
        mean, half = 100 * self.difference.mean, 100 * self.half_width
        return f"95 % interval {mean - half:+.1f} to {mean + half:+.1f}"


def baseline_of(runs: Mapping[str, Mapping[int, Run]]) -> str:
    """What others are compared with: FedAvg, or the first federated method, or the first."""
    return min(runs, key=lambda name: (name.split(" ")[0] != "fedavg", _pools(runs[name])))


def compare(runs: Mapping[str, Mapping[int, Run]], baseline: str, target: float | None = None) -> list[Method]:
    """One entry a method, from finished runs by method and seed.

    Differences are over the seeds that the baseline has too. Without a target, each seed's is the accuracy of the
    baseline's last round, or their mean where the baseline lacks that seed.
    """
    reference = {seed: run.final["accuracy_mean"] for seed, run in runs[baseline].items()}
    scores = {
        name: {seed: RunAccuracy.from_run(run) for seed, run in by_seed.items()} for name, by_seed in runs.items()
    }
    usual = statistics.fmean(reference.values())
    methods = []
    for name, by_seed in runs.items():
        final = [run.final for run in by_seed.values()]
        common = [seed for seed in by_seed if seed in reference and name != baseline]
        paired = [by_seed[seed].final["accuracy_mean"] - reference[seed] for seed in common]
        own, others = ([scores[which][seed] for seed in common] for which in (name, baseline))
        change = mean_interval(own, others) if len(common) > 1 else None
        mean = mean_interval(list(scores[name].values()))
        chance = chance_level(next(iter(by_seed.values())))
        costs = [
            to_target(run.records, reference.get(seed, usual) if target is None else target)
            for seed, run in by_seed.items()
        ]
        methods.append(
            Method(
                algorithm=name,
                domains={
                    domain: Estimate.of([each["accuracy"][domain] for each in final if domain in each["accuracy"]])
                    for domain in dict.fromkeys(domain for each in final for domain in each["accuracy"])
                },
                mean=Estimate.of([each["accuracy_mean"] for each in final]),
                worst=Estimate.of([each["accuracy_worst"] for each in final]),
                to_target=ToTarget(
                    rounds=_median([math.inf if cost is None else cost.rounds for cost in costs]),
                    bytes=_median([math.inf if cost is None else cost.bytes_down + cost.bytes_up for cost in costs]),
                    reached=sum(cost is not None for cost in costs),
                    flops=_median([math.inf if cost is None else cost.flops for cost in costs]),
                ),
                difference=Estimate.of(paired) if paired else None,
                half_width=None if change is None else change.half_width,
                unseen=tuple(dict.fromkeys(domain for each in final for domain in each.get("unseen", ()))),
                unseen_mean=Estimate.of(unseen)
                if (unseen := [each["accuracy_unseen"] for each in final if "accuracy_unseen" in each])
                else None,
                pools=_pools(by_seed),
                paired_seeds=len(paired),
                image_half_width=(change.image_half_width or 0.0) if change is not None else 0.0,
                mean_half_width=mean.half_width,
                chance=chance,
                at_chance=is_at_chance(mean, chance),
            )
        )
    return methods


def _pools(by_seed: Mapping[int, Run]) -> bool:
    try:
        return next(iter(by_seed.values())).method().pools is not None
    except InputError:  # its author's own, which is not here or not trusted
        return False


def _median(values: Sequence[float]) -> float | None:
    middle = statistics.median(values)
    return middle if math.isfinite(middle) else None
