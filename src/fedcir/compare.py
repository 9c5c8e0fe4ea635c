"""Several methods over the same seeds: their accuracies, and each one's paired difference to a baseline."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

from fedcir.records import RunFolder
from fedcir.types import InputError, RoundRecord


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and its standard deviation (ddof 1) where there is more than one."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Method:
    """One method's final round over all seeds. Accuracies are fractions."""

    algorithm: str
    domains: dict[str, Estimate]
    mean: Estimate
    worst: Estimate
    rounds_to_baseline: float | None
    """Median over seeds of the first round as good as the baseline's last; None if that is never."""
    reached: int
    """In how many seeds it got there."""
    difference: Estimate | None
    """Paired by seed, to the baseline; None for the baseline."""
    half_width: float | None
    """Half of the difference's 95 % interval, by Student's t; None with one seed."""


def compare(runs: Mapping[str, Mapping[int, RunFolder]], baseline: str) -> list[Method]:
    """One entry a method, from finished runs by method and seed."""
    seeds = sorted(next(iter(runs.values())))
    for name, by_seed in runs.items():
        if sorted(by_seed) != seeds:
            raise InputError(f"{name} was run with the seeds {sorted(by_seed)}, the others with {seeds}")
    reference = runs.get(baseline)
    methods = []
    for name, by_seed in runs.items():
        final = [by_seed[seed].summary()["final"] for seed in seeds]
        paired: list[float] = []
        to_baseline: list[float] = []
        if reference is not None:
            for seed, own in zip(seeds, final, strict=True):
                target = reference[seed].summary()["final"]["accuracy_mean"]
                paired.append(own["accuracy_mean"] - target)
                rounds = rounds_to(by_seed[seed].records(), target)
                to_baseline.append(math.inf if rounds is None else rounds)
        methods.append(
            Method(
                algorithm=name,
                domains={
                    domain: Estimate.of([each["accuracy"][domain] for each in final]) for domain in final[0]["accuracy"]
                },
                mean=Estimate.of([each["accuracy_mean"] for each in final]),
                worst=Estimate.of([each["accuracy_worst"] for each in final]),
                rounds_to_baseline=_finite_median(to_baseline),
                reached=sum(math.isfinite(rounds) for rounds in to_baseline),
                difference=Estimate.of(paired) if paired and name != baseline else None,
                half_width=half_width(paired) if len(paired) > 1 and name != baseline else None,
            )
        )
    return methods


def rounds_to(records: Sequence[RoundRecord], target: float) -> int | None:
    """The first evaluated round whose mean accuracy reaches the target; None if none does."""
    for record in records:
        if record.accuracy_mean is not None and record.accuracy_mean >= target:
            return record.round
    return None


def _finite_median(rounds: Sequence[float]) -> float | None:
    """The median, None where it is a seed that never got there."""
    middle = statistics.median(rounds) if rounds else math.inf
    return middle if math.isfinite(middle) else None


def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Half of the confidence interval of a mean, by Student's t."""
    spread = statistics.stdev(values) / len(values) ** 0.5
    return float(student.ppf((1 + confidence) / 2, len(values) - 1) * spread)
