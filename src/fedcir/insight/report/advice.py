"""What to do next, from what runs came to: which method to take, how long to train, how many seeds, where to look."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import hypot
from statistics import fmean

from scipy.special import stdtrit

from fedcir.insight.charts import accuracy, curve
from fedcir.runs.compare import Method
from fedcir.runs.intervals import MIN_SEEDS
from fedcir.runs.run import Run

Runs = Mapping[str, Mapping[int, Run]]

FEW = 5
"""Evaluated rounds of which nothing can be said."""
LATEST = 8
"""Evaluated rounds at least that are the latest; of many, a third."""
WORTH = 0.5
"""Points of accuracy in the last rounds that make more of them worth while."""
FAR = 10.0
"""Points below the other domains."""
MANY = 12
"""Seeds that are too many to ask for."""


def advice(
    runs: Runs, methods: Sequence[Method], baseline: str, name: Callable[[Run], str] = lambda run: run.path.name
) -> list[str]:
    """Sentences, the most important first. `name` is how a run is called in a command."""
    federated = [method for method in methods if not method.pools]
    if not federated:
        return []
    taken = take(federated, baseline)
    one = next(iter(runs[taken.algorithm].values()))
    return [
        *chance_sentence({method.algorithm: method.chance for method in methods if method.at_chance}),
        *_choice(methods, taken, baseline, runs),
        *_rounds(runs, federated),
        *_seeds(federated, runs),
        *_far(taken, name(one)),
    ]


def take(federated: Sequence[Method], baseline: str) -> Method:
    """The best of those that are better than the baseline by more than chance; else the baseline."""
    better = [method for method in federated if method.better]
    plain = next((method for method in federated if method.algorithm == baseline), federated[0])
    return max(better, key=lambda method: method.mean.mean, default=plain)


def _choice(methods: Sequence[Method], taken: Method, baseline: str, runs: Runs) -> list[str]:
    federated, name = [method for method in methods if not method.pools], taken.algorithm
    simple = name.split(" ")[0] == "fedavg"
    if len(federated) == 1:
        only = f"Only {name} was trained. To see whether it helps, run `fedcir compare --algorithms fedavg,{name}`."
        return [] if simple or " " in name else [only]
    if taken.difference is not None:
        points = f"{100 * taken.difference.mean:.1f} points above {baseline}"
        plain = next(method for method in methods if method.algorithm == baseline)
        return [f"Use {name}: it is {points}, more than chance ({taken.interval}).", *losing_domain(taken, plain)]
    why = f", and {name} is the simplest" if simple else ""
    if _count_seeds(runs) < MIN_SEEDS:
        best = max(federated, key=lambda method: method.mean.mean)
        if best.at_chance:
            return []
        if best.mean.mean > taken.mean.mean:
            ceilings = [method for method in methods if method.pools]
            return [_first(best, taken, ceilings), *losing_domain(best, taken)]
        return [f"No other federated method came out above {name}."]
    return [] if taken.at_chance else [f"Use {name}: no other federated method is better by more than chance{why}."]


def chance_sentence(chance: Mapping[str, float | None]) -> list[str]:
    """Say which methods cannot be told from chance level, by their names."""
    if not chance:
        return []
    level = max(value for value in chance.values() if value is not None)
    verb = "is" if len(chance) == 1 else "are"
    same = "what the same answer to every test image reaches"
    return [f"{', '.join(chance)} {verb} at chance level ({100 * level:.1f} %, {same}): nothing can be read from that."]


def _count_seeds(runs: Runs) -> int:
    return len({seed for by_seed in runs.values() for seed in by_seed})


def _first(best: Method, plain: Method, ceilings: Sequence[Method]) -> str:
    """What too few seeds for a verdict say of their best method."""
    gain = best.mean.mean - plain.mean.mean
    told = f"{best.algorithm} came first: {100 * gain:.1f} points above {plain.algorithm}"
    ceiling = max(ceilings, key=lambda method: method.mean.mean, default=plain)
    gap = ceiling.mean.mean - plain.mean.mean
    if gap > gain:
        told += f", which is {100 * gain / gap:.0f} % of the way to {ceiling.algorithm}"
    return f"{told}."


def losing_domain(best: Method, plain: Method) -> list[str]:
    """Name the domain in which the better method lost most against the plain one, if it lost in any."""
    losses = {
        name: plain.domains[name].mean - best.domains[name].mean for name in plain.domains if name in best.domains
    }
    name = max(losses, key=lambda domain: losses[domain], default="")
    if not name or round(100 * losses[name], 1) <= 0:
        return []
    return [f"On {name} it is {100 * losses[name]:.1f} points below {plain.algorithm}."]


@dataclass(frozen=True)
class Rise:
    """How much accuracy has risen in the last rounds, in points."""

    gain: float
    rounds: int


def rise(runs: Iterable[Run]) -> Rise | None:
    """None unless accuracy, the mean over seeds, was still rising at the last round.

    Its latest rounds must rise (Kendall's tau, p < 0.01), and the last quarter of them be worth it over the one before.
    """
    from scipy.stats import kendalltau  # two seconds

    found = curve("", runs, accuracy)
    if found is None or len(found.x) < FEW:
        return None
    latest = max(LATEST, len(found.x) // 3)
    x, y = found.x[-latest:], found.y[-latest:]
    quarter = max(1, len(y) // 4)
    gain = fmean(y[-quarter:]) - fmean(y[-2 * quarter : -quarter])
    if gain < WORTH or not kendalltau(x, y, alternative="greater").pvalue < 0.01:
        return None
    return Rise(gain, round(x[-1] - x[-2 * quarter]))


def _rounds(runs: Runs, federated: Sequence[Method]) -> list[str]:
    by_seed = {method.algorithm: runs[method.algorithm].values() for method in federated}
    records = [run.records for each in by_seed.values() for run in each]
    rounds = max(len(each) for each in records)
    evaluated = max(sum(record.accuracy_mean is not None for record in each) for each in records)
    if evaluated < FEW:
        few = f"{evaluated} evaluated round{'s' * (evaluated != 1)} cannot show whether accuracy is still rising"
        if rounds < 2 * FEW:
            return [f"Train longer: {few}. Try `--rounds 25`."]
        return [f"Evaluate more often: {few}. Try `--eval-every {rounds // 10}`."]
    rising = {name: found for name, each in by_seed.items() if (found := rise(each)) is not None}
    if not rising:
        return []
    last = max(found.rounds for found in rising.values())
    gains = ", ".join(f"{found.gain:.1f} points under {name}" for name, found in rising.items())
    longer = -(-3 * rounds // 10) * 5  # half as many again, a multiple of five
    when = "in the last round" if last == 1 else f"over the last {last} rounds"
    return [f"Train longer: accuracy still rose {when}, by {gains}. Try `--rounds {longer}`."]


def _seeds(federated: Sequence[Method], runs: Runs) -> list[str]:
    """How many it takes to tell the most promising difference from chance."""
    seeds = sorted({seed for each in runs.values() for seed in each})
    if len(federated) > 1 and len(seeds) < MIN_SEEDS:
        few = "one" if len(seeds) == 1 else "two"
        return [
            f"Add seeds: with only {few}, any difference could be chance. Try `--seeds {_listed(seeds, MIN_SEEDS)}`."
        ]
    ahead = [m for m in federated if m.difference is not None and m.difference.mean > 0 and m.half_width is not None]
    if not ahead or any(method.better for method in ahead):
        return []
    best = max(ahead, key=lambda method: method.mean.mean)
    told = f"{best.algorithm} is ahead, but that could be chance ({best.interval})"
    if best.difference is not None and best.image_half_width >= best.difference.mean:
        return [f"{told}. More seeds would not tell, only more test images would: treat the two as equal."]
    needed = seeds_to_tell(best)
    if needed is None or needed > MANY:
        return [f"{told}. Confirming so small a difference would take more than {MANY} seeds: treat the two as equal."]
    return [f"Add seeds: {told}. About {needed} seeds would be enough to tell: `--seeds {_listed(seeds, needed)}`."]


def seeds_to_tell(method: Method, most: int = 100) -> int | None:
    """The fewest seeds whose 95 % interval would leave 0 out, were the difference and its spread as they are now.

    The error of the test images stays as it is.
    """
    assert method.difference is not None
    mean, std = method.difference.mean, method.difference.std
    if std is None:
        return None
    halves = ((n, hypot(stdtrit(n - 1, 0.975) * std / n**0.5, method.image_half_width)) for n in range(3, most + 1))
    return next((n for n, half in halves if half < abs(mean)), None)


def _listed(seeds: Sequence[int], number: int) -> str:
    fresh = (seed for seed in count() if seed not in seeds)
    return ",".join(str(seed) for seed in sorted([*seeds, *islice(fresh, max(0, number - len(seeds)))]))


def _far(method: Method, run: str) -> list[str]:
    """Whether one domain is far below the others."""
    seen = {name: 100 * found.mean for name, found in method.domains.items() if name not in method.unseen}
    if len(seen) < 2:
        return []
    worst = min(seen, key=lambda name: seen[name])
    gap = fmean(value for name, value in seen.items() if name != worst) - seen[worst]
    if gap < FAR:
        return []
    told = f"{worst} is {gap:.0f} points below the mean of the other domains under {method.algorithm}"
    return [f"{told}: `fedcir diagnose {run}` shows how its images and labels differ, and which classes are confused."]
