"""Methods side by side: their results as rows of tables, and advice on what to do next with their runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice
from math import hypot
from statistics import fmean
from typing import Any

from scipy.special import stdtrit

from fedcir.reporting.charts import build_curve, score
from fedcir.reporting.page import Rows
from fedcir.runs.reader import Run
from fedcir.runs.statistics import MIN_SEEDS, Estimate, MethodResult, describe_cover
from fedcir.text import format_bytes, format_flops
from fedcir.types import ACCURACY, Metric

Runs = Mapping[str, Mapping[int, Run]]

UNSEEN = "not trained on"
MIN_EVALUATIONS = 5
"""Evaluated rounds that a trend needs at least."""
RECENT_EVALUATIONS = 8
"""Evaluated rounds in which a trend is looked for, at least; of many, a third."""
MIN_GAIN = 0.5
"""Points of a share in the last rounds that make more rounds worthwhile; of other metrics, per cent of their value."""
FAR_BELOW = 10.0
"""Points below the mean of the other domains from which a domain is pointed out."""
MAX_SEEDS = 12
"""Most seeds to ask for."""


def comparison_rows(methods: Sequence[MethodResult], baseline: str, seeds: int, target: float | None = None) -> Rows:
    """Build a table with a row for each method: scores of the last round, shares in per cent."""
    metric = methods[0].metric
    has_unseen = any(method.unseen for method in methods)
    means = ["seen mean", "worst", "unseen mean"] if has_unseen else ["mean", "worst"]
    header = ["method", *domain_header(methods), *means, *goal_header(baseline, target, metric)[:2]]
    rows = [[*header, f"difference to {baseline} ({describe_cover(metric)})"] if seeds > 1 else header]
    for method in methods:
        row = [method.algorithm, *(domain_cell(methods, method, domain) for domain in domains_of(methods))]
        estimates = (method.mean, method.worst, method.unseen_mean) if has_unseen else (method.mean, method.worst)
        row += [*(format_estimate(estimate, metric) for estimate in estimates), *goal_cells(method, seeds)[:2]]
        rows.append([*row, format_difference(method)] if seeds > 1 else row)
    return rows


def comparison_numbers(methods: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """Return the same table as numbers by name, shares as fractions."""
    has_unseen = any(method.unseen for method in methods)
    rows = []
    for method in methods:
        estimates = {name: method.domains.get(name) for name in domains_of(methods)}
        estimates |= {"mean": method.mean, "worst": method.worst}
        estimates |= {"unseen_mean": method.unseen_mean} if has_unseen else {}
        row: dict[str, Any] = {"method": method.algorithm}
        for name, estimate in estimates.items():
            row |= {name: estimate.mean if estimate else None, f"{name}_std": estimate.std if estimate else None}
        goal, difference = method.to_target, method.difference
        row |= {"rounds_to_target": goal.rounds, "bytes_to_target": goal.bytes, "reached": goal.reached}
        rows.append({**row, "difference": difference.mean if difference else None, "half_width": method.half_width})
    return rows


def domains_of(methods: Sequence[MethodResult]) -> list[str]:
    return list(dict.fromkeys(domain for method in methods for domain in method.domains))


def mark_unseen(name: str, is_unseen: bool) -> str:
    return f"{name} ({UNSEEN})" if is_unseen else name


def domain_header(methods: Sequence[MethodResult]) -> list[str]:
    """Return the domains, marked if no method trains on them."""
    unseen = set.intersection(*(set(method.unseen) for method in methods))
    return [mark_unseen(domain, domain in unseen) for domain in domains_of(methods)]


def domain_cell(methods: Sequence[MethodResult], method: MethodResult, domain: str) -> str:
    """Format a domain's score, marked if this method does not train on it but another one does."""
    is_unseen = domain in method.unseen and any(domain not in other.unseen for other in methods)
    return mark_unseen(format_estimate(method.domains.get(domain), method.metric), is_unseen)


def format_estimate(estimate: Estimate | None, metric: Metric = ACCURACY) -> str:
    """Format mean and standard deviation, shares in per cent."""
    if estimate is None:
        return ""
    spread = "" if estimate.std is None else f" ± {metric.format(estimate.std, 1 if metric.is_share else 0)}"
    return metric.format(estimate.mean) + spread


def show_estimate(method: MethodResult, estimate: Estimate | None) -> str:
    """Format mean and standard deviation with the unit, for a sentence."""
    return format_estimate(estimate, method.metric) + (" %" if method.metric.is_share else "")


def format_difference(method: MethodResult) -> str:
    if method.difference is None or method.half_width is None:
        return ""
    metric, half = method.metric, method.half_width
    return f"{metric.format_change(method.difference.mean, 2)} ± {metric.format(half, 2 if metric.is_share else 0)}"


def goal_header(baseline: str, target: float | None, metric: Metric = ACCURACY) -> list[str]:
    """Return the names of the columns of the cost to a target."""
    goal = f"match {baseline}"
    if target is not None:
        goal = f"reach {100 * target:g} %" if metric.is_share else f"reach {target:g}"
    return [f"rounds to {goal}", f"data moved to {goal}", f"computation to {goal}"]


def goal_cells(method: MethodResult, seeds: int) -> list[str]:
    """Format the cost to a target, or how many seeds reached it if the median seed did not."""
    goal = method.to_target
    if goal.rounds is None or goal.bytes is None:
        return ["not reached"] * 3 if not goal.reached else [f"{goal.reached} of {seeds} seeds", "", ""]
    rounds = f"{goal.rounds:g}" if goal.reached == seeds else f"{goal.rounds:g} ({goal.reached} of {seeds} seeds)"
    return [rounds, format_bytes(goal.bytes), "" if goal.flops is None else format_flops(goal.flops)]


def list_advice(
    runs: Runs, methods: Sequence[MethodResult], baseline: str, name: Callable[[Run], str] = lambda run: run.path.name
) -> list[str]:
    """Advise in sentences, the most important first. `name` is how a run is called in a command."""
    federated = [method for method in methods if not method.pools]
    if not federated:
        return []
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    chosen = choose_method(federated, baseline)
    run = next(iter(runs[chosen.algorithm].values()))
    return [
        *describe_chance({method.algorithm: method.chance for method in methods if method.at_chance}),
        *_advise_method(methods, federated, chosen, baseline, len(seeds)),
        *_advise_rounds({method.algorithm: list(runs[method.algorithm].values()) for method in federated}),
        *_advise_seeds(federated, seeds),
        *_advise_domain(chosen, name(run)),
    ]


def choose_method(federated: Sequence[MethodResult], baseline: str) -> MethodResult:
    """Choose the best method that is significantly better than the baseline, else the baseline."""
    plain = next((method for method in federated if method.algorithm == baseline), federated[0])
    return find_best_method([method for method in federated if method.better]) or plain


def find_best_method(methods: Iterable[MethodResult]) -> MethodResult | None:
    return max(methods, key=lambda method: method.metric.gain(method.mean.mean, 0.0), default=None)


def _advise_method(
    methods: Sequence[MethodResult], federated: Sequence[MethodResult], chosen: MethodResult, baseline: str, seeds: int
) -> list[str]:
    name = chosen.algorithm
    is_simple = name.split(" ")[0] == "fedavg"
    if len(federated) == 1:
        only = f"Only {name} was trained. To see whether it helps, run `fedcir compare --algorithms fedavg,{name}`."
        return [] if is_simple or " " in name else [only]
    if chosen.difference is not None:
        points = f"{describe_gap(chosen, chosen.difference.mean)} {baseline}"
        plain = next(method for method in methods if method.algorithm == baseline)
        return [f"Use {name}: it is {points}, more than chance ({chosen.interval}).", *describe_losses(chosen, plain)]
    if seeds >= MIN_SEEDS:
        why = f", and {name} is the simplest" if is_simple else ""
        sentence = f"Use {name}: no other federated method is better by more than chance{why}."
        return [] if chosen.at_chance else [sentence]
    best = find_best_method(federated) or chosen
    if best.at_chance:
        return []
    metric = best.metric
    gain = metric.gain(best.mean.mean, chosen.mean.mean)
    if gain <= 0:
        return [f"No other federated method came out above {name}."]
    first = f"{best.algorithm} came first: {describe_gap(best, best.mean.mean - chosen.mean.mean)} {name}"
    ceiling = find_best_method(m for m in methods if m.pools) or chosen
    gap = metric.gain(ceiling.mean.mean, chosen.mean.mean)
    if gap > gain:
        first += f", which is {100 * gain / gap:.0f} % of the way to {ceiling.algorithm}"
    return [f"{first}.", *describe_losses(best, chosen)]


def describe_gap(method: MethodResult, change: float) -> str:
    """Describe by how much a method is above or below another one, such as "2.1 points above"."""
    return f"{method.metric.show_gap(change)} {'above' if change > 0 else 'below'}"


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
    metric = best.metric
    losses = {
        name: metric.gain(plain.domains[name].mean, best.domains[name].mean)
        for name in plain.domains
        if name in best.domains
    }
    name = max(losses, key=lambda domain: losses[domain], default="")
    if not name or losses[name] <= 0 or (metric.is_share and round(100 * losses[name], 1) <= 0):
        return []
    change = best.domains[name].mean - plain.domains[name].mean
    return [f"On {name} it is {describe_gap(best, change)} {plain.algorithm}."]


def measure_rise(runs: Iterable[Run]) -> tuple[float, int] | None:
    """Return by how much, and over how many rounds, the score still improved at the end; None if it did not.

    The latest must improve (Kendall's tau, p < 0.01), and the last quarter of them gain MIN_GAIN on the previous one.
    """
    from scipy.stats import kendalltau  # two seconds

    runs = list(runs)
    curve, metric = build_curve("", runs, score), runs[0].metric
    if curve is None or len(curve.x) < MIN_EVALUATIONS:
        return None
    latest = max(RECENT_EVALUATIONS, len(curve.x) // 3)
    x, y = curve.x[-latest:], curve.y[-latest:]
    quarter = max(1, len(y) // 4)
    gain = metric.gain(fmean(y[-quarter:]), fmean(y[-2 * quarter : -quarter]))
    least = MIN_GAIN if metric.is_share else MIN_GAIN / 100 * abs(y[-1])
    direction = "greater" if metric.higher_is_better else "less"
    if gain < least or not kendalltau(x, y, alternative=direction).pvalue < 0.01:
        return None
    return gain, round(x[-1] - x[-2 * quarter])


def _advise_rounds(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    records = [run.records for by_seed in runs.values() for run in by_seed]
    rounds = max(map(len, records))
    evaluated = max(sum(record.score_mean is not None for record in run_records) for run_records in records)
    metric = records[0][-1].metric
    improved, improving = ("rose", "rising") if metric.higher_is_better else ("fell", "falling")
    if evaluated < MIN_EVALUATIONS:
        evaluations = f"{evaluated} evaluated round{'s' * (evaluated != 1)}"
        few = f"{evaluations} cannot show whether {metric.title} is still {improving}"
        if rounds < 2 * MIN_EVALUATIONS:
            return [f"Train longer: {few}. Try `--rounds 25`."]
        return [f"Evaluate more often: {few}. Try `--eval-every {rounds // 10}`."]
    rising = {name: rise for name, by_seed in runs.items() if (rise := measure_rise(by_seed)) is not None}
    if not rising:
        return []
    last = max(total for _, total in rising.values())
    gains = ", ".join(f"{metric.show_gap(gain / metric.scale)} under {name}" for name, (gain, _) in rising.items())
    longer = -(-3 * rounds // 10) * 5  # half as many again, a multiple of five
    when = "in the last round" if last == 1 else f"over the last {last} rounds"
    return [f"Train longer: {metric.title} still {improved} {when}, by {gains}. Try `--rounds {longer}`."]


def _advise_seeds(federated: Sequence[MethodResult], seeds: Sequence[int]) -> list[str]:
    """Say how many seeds would tell the most promising difference from chance."""
    if len(federated) > 1 and len(seeds) < MIN_SEEDS:
        few = "one" if len(seeds) == 1 else "two"
        more = _extend_seeds(seeds, MIN_SEEDS)
        return [f"Add seeds: with only {few}, any difference could be chance. Try `--seeds {more}`."]
    ahead = [m for m in federated if (m.gain or 0.0) > 0 and m.half_width is not None]
    if not ahead or any(method.better for method in ahead):
        return []
    best = max(ahead, key=lambda method: method.gain or 0.0)
    unsure = f"{best.algorithm} is ahead, but that could be chance ({best.interval})"
    if best.difference is not None and best.image_half_width >= abs(best.difference.mean):
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
    """Point out a domain whose accuracy is far below the others."""
    if method.metric != ACCURACY:  # which `diagnose` would explain; errors in units differ with the sites' targets
        return []
    seen = {name: 100 * estimate.mean for name, estimate in method.domains.items() if name not in method.unseen}
    if len(seen) < 2:
        return []
    worst = min(seen, key=lambda name: seen[name])
    gap = fmean(value for name, value in seen.items() if name != worst) - seen[worst]
    if gap < FAR_BELOW:
        return []
    below = f"{worst} is {gap:.0f} points below the mean of the other domains under {method.algorithm}"
    return [f"{below}: `fedcir diagnose {run}` shows how its images and labels differ, and which classes are confused."]
