"""Tables, sentences and the page of an evaluation of another task than classification."""

import math
from collections.abc import Sequence

from fedcir.inference.task_evaluation import TaskEvaluation
from fedcir.reporting.charts import Bars, Chart, Lines, Series
from fedcir.reporting.methods import mark_unseen
from fedcir.reporting.page import Block, Figure, Rows, Section, Sentences, Table, render_page, to_sentence
from fedcir.runs.statistics import Interval
from fedcir.tasks.survival import GROUPS, Survival
from fedcir.types import Metric


def build_score_rows(evaluation: TaskEvaluation) -> Rows:
    """Build a table with a row for each domain, and one for their mean."""
    metrics = evaluation.task.metrics_reported
    rows = [["domain", evaluation.noun]]
    rows[0] += [f"{metric.label}{' (95 %)' * (number == 0)}" for number, metric in enumerate(metrics)]
    for domain in evaluation:
        primary = "-" if domain.interval is None else _format_interval(metrics[0], domain.interval)
        others = [_format_score(metric, domain.scores[metric.name]) for metric in metrics[1:]]
        rows.append([mark_unseen(domain.domain, not domain.is_trained_on), f"{len(domain):,}", primary, *others])
    if len(evaluation.domains) > 1:
        means = [_format_score(metric, evaluation.mean[metric.name]) for metric in metrics]
        rows.append(["mean over domains", "", *means])
    return rows


def _format_score(metric: Metric, value: float) -> str:
    return "-" if math.isnan(value) else metric.format(value)


def _format_interval(metric: Metric, interval: Interval) -> str:
    value, low, high = map(metric.format, (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})"


def build_name_rows(evaluation: TaskEvaluation) -> Rows:
    """Build a table of the primary metric by label, class or target column (rows) and domain (columns)."""
    metric = evaluation.task.primary
    rows = [["", *(mark_unseen(domain.domain, not domain.is_trained_on) for domain in evaluation)]]
    for name in evaluation.domains[0].by_name:
        rows.append([name, *(_format_score(metric, domain.by_name[name][metric.name]) for domain in evaluation)])
    return rows if len(rows) > 1 else []


def describe_scores(evaluation: TaskEvaluation) -> list[str]:
    """Summarise the scores in sentences."""
    metric, worst = evaluation.task.primary, evaluation.worst
    if len(evaluation.domains) < 2 or worst is None:
        return []
    value = worst.scores[metric.name]
    return [
        f"The mean {metric.title} over domains is {metric.show(evaluation.mean[metric.name])}.",
        f"The weakest domain is {worst.domain}, with {metric.show(value)}.",
    ]


def _build_curves(evaluation: TaskEvaluation) -> tuple[Figure, ...]:
    """Draw the survival of examples with a low and with a high predicted risk, for each domain."""
    task = evaluation.task
    if not isinstance(task, Survival) or not task.horizon:
        return ()
    charts: dict[str, Chart] = {}
    for domain in evaluation:
        curves = {group: zip(*task.curve(domain.sums, group), strict=True) for group in GROUPS}
        series = tuple(Series(f"{group} risk", *map(tuple, points)) for group, points in curves.items())
        charts[mark_unseen(domain.domain, not domain.is_trained_on)] = Lines("", task.names[1], "survival", series)
    note = "Low risk is at most the median of the domain. Life-table estimates on a common grid of times."
    return (Figure("Survival by predicted risk", charts, note),)


def render_scores(evaluation: TaskEvaluation, notes: Sequence[str]) -> str:
    """Write the page."""
    metric, known = evaluation.task.primary, [d for d in evaluation if d.interval is not None]
    intervals = [domain.interval.scaled(metric.scale) for domain in known if domain.interval is not None]
    names = tuple(mark_unseen(domain.domain, not domain.is_trained_on) for domain in known)
    bars = Bars("", metric.label, names, (Series.from_intervals(evaluation.name, intervals),))
    caption = "Intervals: the bootstrap over the examples of a domain"
    blocks: list[Block] = [
        Sentences((*describe_scores(evaluation), *map(to_sentence, notes))),
        Table(caption, build_score_rows(evaluation)),
        *([Figure(f"{metric.title} by domain", {"": bars}, "Whiskers show 95 % intervals.")] if known else []),
        *([Table(f"{metric.label} by name", rows)] if (rows := build_name_rows(evaluation)) else []),
        *_build_curves(evaluation),
    ]
    count = sum(map(len, evaluation))
    examples = f"{count:,} {evaluation.noun} of {evaluation.dataset} ({evaluation.split})"
    lead = f"{evaluation.name} ({evaluation.task.name}) on {examples}."
    return render_page(f"{evaluation.dataset}: evaluation", lead, [Section("Results", tuple(blocks))])
