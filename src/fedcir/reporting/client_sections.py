"""Sections of a report about the clients: accuracy by domain and class, distances, representations, training labels."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from fedcir.analysis.diagnosis import Diagnosis
from fedcir.analysis.findings import describe_alignment, describe_shift
from fedcir.inference.evaluation import wilson_interval
from fedcir.reporting.charts import Bars, Chart, Heatmap, Lines, Series
from fedcir.reporting.diagnosis_report import build_distance_matrix, build_recall, build_scatters
from fedcir.reporting.methods import domain_cell, domain_header, domains_of, format_estimate, mark_unseen
from fedcir.reporting.page import Figure, Section, Sentences, Table, to_sentence
from fedcir.reporting.sections import Study
from fedcir.runs.statistics import Estimate, Interval, MeanInterval, MethodResult, half_width
from fedcir.tasks.survival import GROUPS, Survival
from fedcir.tasks.task import add_sums
from fedcir.types import ACCURACY, Metric

Diagnoses = Mapping[str, Mapping[int, Diagnosis]]
"""Diagnoses by method and seed."""

MAX_CLASSES, MAX_CELLS, MAX_CONFUSION_CELLS = 60, 6000, 50_000
"""Limits beyond which a picture is unreadable or the page too large."""


def build_domains(study: Study, methods: Sequence[MethodResult], diagnoses: Diagnoses) -> Section:
    """Build the section on the score by domain, further metrics, and class by class."""
    metric = study.metric
    domains, header = domains_of(methods), domain_header(methods)
    bars = Bars("", f"test {metric.label}", tuple(header), tuple(_build_bars(study, m, domains) for m in methods))
    wilson = ", or with one seed its 95 % interval over test images (Wilson)" if metric == ACCURACY else ""
    note = f"Whiskers show one standard deviation over seeds{wilson}."
    unit = " (%)" if metric.is_share else ""
    rows = [["method", *header], *([m.algorithm, *(domain_cell(methods, m, d) for d in domains)] for m in methods)]
    blocks: list[Figure | Table] = [
        Table(f"Test {metric.title} by domain{unit}, mean ± standard deviation over seeds", rows),
        Figure(f"{metric.title[0].upper()}{metric.title[1:]} by domain", {"": bars}, note),
    ]
    if not diagnoses:
        return Section("Domains", (*blocks, *_build_metric_tables(study), *_build_name_tables(study)))
    blocks.append(_build_class_table(diagnoses))
    charts: dict[str, Chart] = {}
    for name, diagnosis in _choose_seed(study, diagnoses).items():
        classes = diagnosis.classes
        charts[f"{name}: accuracy by class and domain"] = build_recall(diagnosis)
        if len(diagnoses) * len(diagnosis.domains) * len(classes) ** 2 <= MAX_CONFUSION_CELLS:
            for domain in diagnosis.domains:
                counts = diagnosis.confusion(domain)
                charts[f"{name}: confusion in {domain}"] = Heatmap.from_counts(counts, classes, classes)
    if len(_find_first(diagnoses).classes) <= MAX_CLASSES:
        note = (
            "One seed, all test images. The accuracy of a class is its recall. "
            "In a confusion matrix, rows are true classes and columns are predictions."
        )
        blocks.append(Figure("Class by class", charts, note))
    return Section("Domains", tuple(blocks))


def build_survival(study: Study) -> Section | None:
    """Build the section on survival curves by predicted risk and by domain; None for other tasks."""
    if study.metric not in Survival.metrics_reported:
        return None
    runs = {name: run for name, run in study.one_of_each.items() if run.sums}
    task = next(iter(study.one_of_each.values())).task
    if not (isinstance(task, Survival) and task.horizon and runs):
        return None

    def draw(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Lines:
        series = [
            Series(name, tuple(time for time, _ in points), tuple(100 * share for _, share in points))
            for name, points in curves.items()
        ]
        return Lines("", task.names[1], "without the event (%)", tuple(series))

    choices: dict[str, Chart] = {}
    for name, run in runs.items():
        chosen = {"all domains": add_sums([*run.sums.values()]), **run.sums}
        for domain, sums in chosen.items():
            label = domain if len(runs) == 1 else f"{name}: {domain}"
            choices[label] = draw({f"{group} risk": task.curve(sums, group) for group in GROUPS})
    by_domain = draw({domain: task.curve(sums, *GROUPS) for domain, sums in next(iter(runs.values())).sums.items()})
    groups = (
        "Low risk is that of the half of each domain's test examples with the lower predictions; high risk is that of "
        "the others. The further the curves are apart, the better a model tells who is at risk."
    )
    method = "Life-table estimates on test examples, in which censored examples are at risk for half of their interval."
    seed = "" if study.common_seed is None or len(study.seeds) == 1 else f" Seed {study.common_seed}."
    return Section(
        "Survival",
        (
            Figure("Survival by predicted risk", choices, f"{groups} {method}{seed}"),
            Figure("Survival by domain", {"": by_domain}, "Whatever a model predicts."),
        ),
    )


def _build_metric_tables(study: Study) -> list[Table]:
    """Build a table of domains for each further metric of the task."""
    run = next(iter(study.one_of_each.values()))
    tables = []
    for metric in run.task.metrics_reported[1:]:
        values = {
            name: [(by_seed_run.final.get("metrics") or {}).get(metric.name, {}) for by_seed_run in by_seed.values()]
            for name, by_seed in study.runs.items()
        }
        tables.append(_build_metric_table(f"Test {metric.title}", metric, values))
    return [table for table in tables if len(table.rows[0]) > 1]


def _build_metric_table(title: str, metric: Metric, values: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Build a table of a metric by row and column, given the values by column of each seed."""
    columns = list(dict.fromkeys(name for seeds in values.values() for by_name in seeds for name in by_name))
    rows = [["method", *columns]]
    for row, seeds in values.items():
        cells = ([by_name[column] for by_name in seeds if column in by_name] for column in columns)
        rows.append([row, *(format_estimate(Estimate.of(cell), metric) if cell else "" for cell in cells)])
    return Table(f"{title}{' (%)' if metric.is_share else ''}, mean ± standard deviation over seeds", rows)


def _build_name_tables(study: Study) -> list[Table]:
    """Build a table of each metric of every label, class or target column, on the test examples of all domains."""
    run = next(iter(study.one_of_each.values()))
    if run.task.has_classes:
        return []
    by_method: dict[str, list[dict[str, dict[str, float]]]] = {}
    for name, by_seed in study.runs.items():
        by_method[name] = [
            run.task.scores_by_name(add_sums([run.sums[domain] for domain in run.sums]))
            for run in by_seed.values()
            if run.sums
        ]
    tables = []
    for metric in run.task.metrics_reported:
        values = {
            method: [
                {name: scores[metric.name] for name, scores in by_name.items() if math.isfinite(scores[metric.name])}
                for by_name in seeds
            ]
            for method, seeds in by_method.items()
        }
        table = _build_metric_table(f"Test {metric.title} of all examples together", metric, values)
        if 1 < len(table.rows[0]) <= MAX_CLASSES:
            tables.append(table)
    return tables


def _build_class_table(diagnoses: Diagnoses) -> Table:
    """Build the table of further metrics; a cell is empty if the domain lacks a class that the metric needs."""
    diagnosis = _find_first(diagnoses)
    metrics = list(diagnosis.class_metrics(diagnosis.domains[0]))
    positive = f"; {diagnosis.classes[1]} counts as positive" if len(metrics) > 1 else ""
    rows = [["method", "domain", *metrics]]
    for method, by_seed in diagnoses.items():
        first = next(iter(by_seed.values()))
        for domain in first.domains:
            by_metric = [diagnosis.class_metrics(domain) for diagnosis in by_seed.values()]
            row = [method, mark_unseen(domain, domain in first.unseen)]
            for metric in metrics:
                values = [metrics_of_seed[metric] for metrics_of_seed in by_metric]
                row.append("" if any(map(math.isnan, values)) else format_estimate(Estimate.of(values)))
            rows.append(row)
    return Table(f"Other metrics (%), mean ± standard deviation over seeds{positive}", rows)


def _find_first(diagnoses: Diagnoses) -> Diagnosis:
    return next(iter(next(iter(diagnoses.values())).values()))


def _choose_seed(study: Study, diagnoses: Diagnoses) -> dict[str, Diagnosis]:
    """Choose one seed of each method for pictures, the same if all have one in common; the baseline comes first."""
    seeds = set.intersection(*(set(by_seed) for by_seed in diagnoses.values()))
    names = sorted(diagnoses, key=lambda name: name != study.baseline)
    return {name: diagnoses[name][min(seeds or diagnoses[name])] for name in names}


def _build_bars(study: Study, method: MethodResult, domains: Sequence[str]) -> Series:
    run, metric = next(iter(study.runs[method.algorithm].values())), study.metric
    bars = []
    for position, name in enumerate(domains):
        if (estimate := method.domains.get(name)) is not None:
            value, std, images = estimate.mean, estimate.std, run.test_images.get(name)
            interval = Interval(value, value - (std or 0.0), value + (std or 0.0))
            if std is None and images and metric == ACCURACY:
                interval = wilson_interval(round(value * images), images)
            bars.append((float(position), *(metric.scale * end for end in (value, interval.low, interval.high))))
    return Series(method.algorithm, *zip(*bars, strict=True))


def build_distances(study: Study, diagnoses: Diagnoses, samples: int, missing: Sequence[str]) -> Section:
    """Build the section on distances between domains; `missing` says for which runs they could not be measured."""
    title = "Distances between domains"
    measured = {
        name: {seed: diagnosis for seed, diagnosis in by_seed.items() if diagnosis.measured}
        for name, by_seed in diagnoses.items()
    }
    diagnoses = {name: by_seed for name, by_seed in measured.items() if by_seed}
    if not diagnoses:
        return Section(title, (Sentences(tuple(missing)),))
    shown = _choose_seed(study, diagnoses)
    baseline, first = next(iter(shown.items()))
    has_seeds = len(study.seeds) > 1
    spread = "± is the standard deviation over seeds" if has_seeds else "Brackets are 95 % intervals over test images"
    caption = (
        f"Proxy A-distance (0 to 2) on up to {samples} test images of each domain, and the global model's average "
        "risk on all of them. The mean distance to the mixture is the second term of the paper's bound. The risk "
        f"stands in for its first term, the average risk of the local models, which a run does not keep. {spread}"
    )
    changes = _compare_distances(baseline, diagnoses)
    column = [f"change from {baseline}"] if len(diagnoses) > 1 else []
    rows = [["method", "mean over pairs", *column, "mean to the mixture", "global model's risk", "furthest domain"]]
    for name, by_seed in diagnoses.items():
        divergences = [diagnosis.divergences for diagnosis in by_seed.values()]
        bounds = [diagnosis.bound for diagnosis in by_seed.values() if diagnosis.bound is not None]
        risks = [bound.global_risk for bound in bounds]
        pairs, mixtures = [d.mean_pair for d in divergences], [d.mean_to_mixture for d in divergences]
        rows.append(
            [
                name,
                _format_seeds([pair.value for pair in pairs], 2, pairs[0]),
                *(_format_change(changes[name]) if name in changes else "" for _ in column),
                _format_seeds([mixture.value for mixture in mixtures], 2, mixtures[0]),
                _format_seeds(risks, 3, bounds[0].global_risk_interval) if bounds else "",
                shown[name].furthest,
            ]
        )
    heatmaps: dict[str, Chart] = {}
    scatters: dict[str, Chart] = {}
    comparisons: dict[str, Chart] = {}
    for name, diagnosis in shown.items():
        heatmaps[name] = build_distance_matrix(diagnosis)
        scatters |= {f"{name}, by {kind}": scatter for kind, scatter in build_scatters(diagnosis).items()}
        if name != baseline:
            comparisons[name] = _compare_pairs(baseline, first, name, diagnosis)
    seed = f"This is seed {study.common_seed}." if has_seeds and study.common_seed is not None else ""
    sentences = (*missing, *map(to_sentence, first.notes), *describe_shift(first), *describe_alignment(first))
    note = f"At 0 a classifier cannot tell two domains apart; at 2 it always can. {seed}"
    blocks: list[Sentences | Table | Figure] = [
        Sentences((*sentences, *_describe_changes(baseline, changes))),
        Table(caption, rows),
        Figure("Proxy A-distance between domains", heatmaps, note),
        Figure("Representations of test images, first two principal components", scatters, seed),
    ]
    if comparisons:
        note = f"Pairs below the diagonal are closer than under {baseline}. {seed}"
        blocks.append(Figure("Distances side by side", comparisons, note))
    return Section(title, tuple(blocks))


def _format_seeds(values: Sequence[float], digits: int, interval: Interval | None) -> str:
    """Format mean and deviation over seeds, or the interval of a single seed."""
    if len(values) == 1:
        return "" if interval is None else f"{interval:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _format_change(change: MeanInterval) -> str:
    return f"{change.mean:+.2f}" if change.half_width is None else f"{change.mean:+.2f} ± {change.half_width:.2f}"


def _compare_distances(baseline: str, diagnoses: Diagnoses) -> dict[str, MeanInterval]:
    """Compare every method with the baseline, paired by seed.

    The errors of the test images under both methods are added as if they were independent, which is conservative.
    """
    changes = {}
    for name, by_seed in diagnoses.items():
        seeds = [seed for seed in by_seed if seed in diagnoses[baseline]]
        if name == baseline or not seeds:
            continue
        ours, theirs = ([of[seed].divergences.mean_pair for seed in seeds] for of in (by_seed, diagnoses[baseline]))
        pairs = list(zip(ours, theirs, strict=True))
        differences = [distance.value - reference.value for distance, reference in pairs]
        images = statistics.fmean(math.hypot(a.high - a.low, b.high - b.low) / 2 for a, b in pairs)
        parts = (half_width(differences), images) if len(seeds) > 1 else (None, None)
        changes[name] = MeanInterval(statistics.fmean(differences), len(seeds), *parts)
    return changes


def _describe_changes(baseline: str, changes: Mapping[str, MeanInterval]) -> list[str]:
    """Name the methods that bring domains closer together or further apart by more than chance."""

    def join(names: Sequence[str]) -> str:
        return ", ".join(f"{name} ({_format_change(changes[name])})" for name in names)

    sure = [name for name, change in changes.items() if change.is_beyond_chance]
    sentences = []
    for direction, sign in (("closer together", -1), ("further apart", 1)):
        if names := [name for name in sure if sign * changes[name].mean > 0]:
            claim = f"Domains are {direction} under {join(names)} than under {baseline}"
            sentences.append(f"{claim}: more than chance (95 %, seeds and test images).")
    if unsure := [name for name in changes if name not in sure]:
        sentences.append(f"The change in distance from {baseline} could be chance for {join(unsure)}.")
    return sentences


def _compare_pairs(baseline: str, first: Diagnosis, name: str, second: Diagnosis) -> Lines:
    both = (first.divergences, second.divergences)
    pairs = Series("pair of domains", *(tuple(pair.value for pair in d.pairs.values()) for d in both))
    mixture = Series("mean to the mixture", *((d.mean_to_mixture.value,) for d in both))
    labels = (f"distance under {baseline}", f"distance under {name}")
    return Lines("", *labels, (pairs, mixture), joined=False, diagonal=True)


def build_clients(diagnoses: Diagnoses) -> Section | None:
    """Build the section on the training images of each client."""
    if not diagnoses:
        return None
    diagnosis = _find_first(diagnoses)
    counts = np.stack(list(diagnosis.labels.values()), axis=1)  # (classes, clients)
    total = f"The clients hold {int(counts.sum()):,} training images."
    if counts.size > MAX_CELLS:
        return Section("Clients", (Sentences((total,)),))
    skew = max(diagnosis.skew.values())
    shares = "All hold the classes in the same shares."
    if skew >= 0.005:
        shares = f"To match the average client, a client would have to change up to {skew:.0%} of its labels."
    chart = Heatmap.from_counts(counts, diagnosis.classes, tuple(diagnosis.labels))
    title, note = "Training images by client and class", f"{total} {shares}"
    return Section("Clients", (Figure(title, {"": chart}, note, wide=True),))
