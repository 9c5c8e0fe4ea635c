"""Advice on what to do next with runs: the method to take, more rounds, more seeds, a domain to look at."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice
from math import hypot
from statistics import fmean

from scipy.special import stdtrit

from fedcir.reporting.charts import accuracy, build_curve
from fedcir.runs.reader import Run
from fedcir.runs.statistics import MIN_SEEDS, MethodResult

Runs = Mapping[str, Mapping[int, Run]]

MIN_EVALUATIONS = 5
"""Evaluated rounds that a trend needs at least."""
RECENT_EVALUATIONS = 8
"""Evaluated rounds in which a trend is looked for, at least; of many, a third."""
MIN_GAIN = 0.5
"""Points of accuracy in the last rounds that make more rounds worthwhile."""
FAR_BELOW = 10.0
"""Points below the other domains that are pointed out."""
MAX_SEEDS = 12
"""Most seeds to ask for."""


def advice(
    runs: Runs, methods: Sequence[MethodResult], baseline: str, name: Callable[[Run], str] = lambda run: run.path.name
) -> list[str]:
    """Advise in sentences, the most important first. `name` is how a run is called in a command."""
    federated = [method for method in methods if not method.pools]
    if not federated:
        return []
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    taken = take(federated, baseline)
    run = next(iter(runs[taken.algorithm].values()))
    return [
        *describe_chance({method.algorithm: method.chance for method in methods if method.at_chance}),
        *_advise_method(methods, federated, taken, baseline, len(seeds)),
        *_advise_rounds({method.algorithm: list(runs[method.algorithm].values()) for method in federated}),
        *_advise_seeds(federated, seeds),
        *_advise_domain(taken, name(run)),
    ]


def take(federated: Sequence[MethodResult], baseline: str) -> MethodResult:
    """Choose the best method that is significantly better than the baseline, else the baseline."""
    plain = next((method for method in federated if method.algorithm == baseline), federated[0])
    return max((m for m in federated if m.better), key=lambda method: method.mean.mean, default=plain)


def _advise_method(
    methods: Sequence[MethodResult], federated: Sequence[MethodResult], taken: MethodResult, baseline: str, seeds: int
) -> list[str]:
    name = taken.algorithm
    is_simple = name.split(" ")[0] == "fedavg"
    if len(federated) == 1:
        only = f"Only {name} was trained. To see whether it helps, run `fedcir compare --algorithms fedavg,{name}`."
        return [] if is_simple or " " in name else [only]
    if taken.difference is not None:
        points = f"{100 * taken.difference.mean:.1f} points above {baseline}"
        plain = next(method for method in methods if method.algorithm == baseline)
        return [f"Use {name}: it is {points}, more than chance ({taken.interval}).", *describe_losses(taken, plain)]
    if seeds >= MIN_SEEDS:
        why = f", and {name} is the simplest" if is_simple else ""
        return [] if taken.at_chance else [f"Use {name}: no other federated method is better by more than chance{why}."]
    best = max(federated, key=lambda method: method.mean.mean)
    if best.at_chance:
        return []
    gain = best.mean.mean - taken.mean.mean
    if gain <= 0:
        return [f"No other federated method came out above {name}."]
    first = f"{best.algorithm} came first: {100 * gain:.1f} points above {name}"
    ceiling = max((m for m in methods if m.pools), key=lambda method: method.mean.mean, default=taken)
    gap = ceiling.mean.mean - taken.mean.mean
    if gap > gain:
        first += f", which is {100 * gain / gap:.0f} % of the way to {ceiling.algorithm}"
    return [f"{first}.", *describe_losses(best, taken)]


def describe_chance(chance: Mapping[str, float | None]) -> list[str]:
    """Name the methods whose accuracy does not differ from chance level, given their chance levels."""
    if not chance:
        return []
    level = max(value for value in chance.values() if value is not None)
    verb = "is" if len(chance) == 1 else "are"
    same = "what the same answer to every test image reaches"
    return [f"{', '.join(chance)} {verb} at chance level ({100 * level:.1f} %, {same}): nothing can be read from that."]


def describe_losses(best: MethodResult, plain: MethodResult) -> list[str]:
    """Name the domain in which the better method lost most against the plain one, if it lost in any."""
    losses = {
        name: plain.domains[name].mean - best.domains[name].mean for name in plain.domains if name in best.domains
    }
    name = max(losses, key=lambda domain: losses[domain], default="")
    if not name or round(100 * losses[name], 1) <= 0:
        return []
    return [f"On {name} it is {100 * losses[name]:.1f} points below {plain.algorithm}."]


def measure_rise(runs: Iterable[Run]) -> tuple[float, int] | None:
    """Return by how many points, and over how many rounds, accuracy still rose at the end; None if it did not.

    The latest must rise (Kendall's tau, p < 0.01), and the last quarter of them gain MIN_GAIN on the previous one.
    """
    from scipy.stats import kendalltau  # two seconds

    curve = build_curve("", runs, accuracy)
    if curve is None or len(curve.x) < MIN_EVALUATIONS:
        return None
    latest = max(RECENT_EVALUATIONS, len(curve.x) // 3)
    x, y = curve.x[-latest:], curve.y[-latest:]
    quarter = max(1, len(y) // 4)
    gain = fmean(y[-quarter:]) - fmean(y[-2 * quarter : -quarter])
    if gain < MIN_GAIN or not kendalltau(x, y, alternative="greater").pvalue < 0.01:
        return None
    return gain, round(x[-1] - x[-2 * quarter])


def _advise_rounds(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    records = [run.records for by_seed in runs.values() for run in by_seed]
    rounds = max(map(len, records))
    evaluated = max(sum(record.accuracy_mean is not None for record in run_records) for run_records in records)
    if evaluated < MIN_EVALUATIONS:
        few = f"{evaluated} evaluated round{'s' * (evaluated != 1)} cannot show whether accuracy is still rising"
        if rounds < 2 * MIN_EVALUATIONS:
            return [f"Train longer: {few}. Try `--rounds 25`."]
        return [f"Evaluate more often: {few}. Try `--eval-every {rounds // 10}`."]
    rising = {name: rise for name, by_seed in runs.items() if (rise := measure_rise(by_seed)) is not None}
    if not rising:
        return []
    last = max(total for _, total in rising.values())
    gains = ", ".join(f"{gain:.1f} points under {name}" for name, (gain, _) in rising.items())
    longer = -(-3 * rounds // 10) * 5  # half as many again, a multiple of five
    when = "in the last round" if last == 1 else f"over the last {last} rounds"
    return [f"Train longer: accuracy still rose {when}, by {gains}. Try `--rounds {longer}`."]


def _advise_seeds(federated: Sequence[MethodResult], seeds: Sequence[int]) -> list[str]:
    """Say how many seeds would tell the most promising difference from chance."""
    if len(federated) > 1 and len(seeds) < MIN_SEEDS:
        few = "one" if len(seeds) == 1 else "two"
        more = _extend_seeds(seeds, MIN_SEEDS)
        return [f"Add seeds: with only {few}, any difference could be chance. Try `--seeds {more}`."]
    ahead = [m for m in federated if m.difference is not None and m.difference.mean > 0 and m.half_width is not None]
    if not ahead or any(method.better for method in ahead):
        return []
    best = max(ahead, key=lambda method: method.mean.mean)
    unsure = f"{best.algorithm} is ahead, but that could be chance ({best.interval})"
    if best.difference is not None and best.image_half_width >= best.difference.mean:
        return [f"{unsure}. More seeds would not tell, only more test images would: treat the two as equal."]
    needed = count_seeds_needed(best)
    if needed is None or needed > MAX_SEEDS:
        many = f"Confirming so small a difference would take more than {MAX_SEEDS} seeds"
        return [f"{unsure}. {many}: treat the two as equal."]
    more = _extend_seeds(seeds, needed)
    return [f"Add seeds: {unsure}. About {needed} seeds would be enough to tell: `--seeds {more}`."]


def count_seeds_needed(method: MethodResult, most: int = 100) -> int | None:
    """Count the seeds whose 95 % interval would exclude 0, if the difference and its spread stay as they are.

    The error of the test images stays as it is.
    """
    assert method.difference is not None
    mean, std = method.difference.mean, method.difference.std
    if std is None:
        return None
    halves = ((n, hypot(stdtrit(n - 1, 0.975) * std / n**0.5, method.image_half_width)) for n in range(3, most + 1))
    return next((n for n, half in halves if half < abs(mean)), None)


def _extend_seeds(seeds: Sequence[int], number: int) -> str:
    unused = (seed for seed in count() if seed not in seeds)
    return ",".join(str(seed) for seed in sorted([*seeds, *islice(unused, max(0, number - len(seeds)))]))


def _advise_domain(method: MethodResult, run: str) -> list[str]:
    """Point out a domain far below the others."""
    seen = {name: 100 * estimate.mean for name, estimate in method.domains.items() if name not in method.unseen}
    if len(seen) < 2:
        return []
    worst = min(seen, key=lambda name: seen[name])
    gap = fmean(value for name, value in seen.items() if name != worst) - seen[worst]
    if gap < FAR_BELOW:
        return []
    below = f"{worst} is {gap:.0f} points below the mean of the other domains under {method.algorithm}"
    return [f"{below}: `fedcir diagnose {run}` shows how its images and labels differ, and which classes are confused."]
