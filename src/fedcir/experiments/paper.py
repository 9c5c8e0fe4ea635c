"""Tables and figures of the paper (arXiv 2308.15786), beside the numbers that it prints."""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np

from fedcir.algorithms import PAPER_METHODS
from fedcir.analysis.diagnosis import diagnose_run
from fedcir.analysis.divergence import Divergences
from fedcir.client.cost import Cost, cost_to_target
from fedcir.experiments.experiment import Experiment, Outcome, Point, Results, format_estimate, format_numbers
from fedcir.reporting.charts import Chart, Lines, Series, build_curve, risk, score, series_with_errors, training_loss
from fedcir.reporting.page import Rows
from fedcir.runs.reader import Run
from fedcir.runs.statistics import Estimate, choose_baseline

PAPER_DATASETS = ("domainnet", "pacs", "office-caltech-10", "camelyon17", "iwildcam")

_TABLE1 = {
    "centralized": "78.07 0.65  81.34 0.87  81.49 1.10  94.94 0.12  87.59 0.51",
    "fedavg": "60.03 1.43  52.61 1.82  62.73 0.32  79.88 0.67  85.26 0.62",
    "fedprox": "59.96 0.82  55.14 1.42  64.37 1.46  79.95 0.82  84.75 0.83",
    "fedproc": "61.61 0.87  55.16 1.57  63.58 1.78  80.02 0.80  85.19 0.58",
    "fedgen": "63.74 1.12  56.01 1.41  62.80 1.84  79.52 0.81  84.81 0.89",
    "fedsr": "63.02 1.52  55.18 2.61  62.95 2.13  80.21 0.62  85.27 0.92",
    "fedreg": "64.78 1.34  57.59 1.80  63.45 1.32  80.33 0.67  86.14 0.52",
    "fedalign": "63.95 0.81  57.83 1.52  65.81 1.42  80.38 0.74  85.60 0.70",
    "fedcir": "65.18 1.12  58.81 1.48  66.14 1.45  80.45 0.71  86.23 0.47",
}
"""Mean and standard deviation for each of PAPER_DATASETS."""

TABLE2_REG = {0.0: 63.53, 0.1: 67.73, 0.3: 65.98, 0.5: 67.58, 1.0: 67.53}
"""Accuracy on PACS in per cent by lambda_reg, with lambda_align at 5e-6."""
TABLE2_ALIGN = {0.0: 63.83, 1e-6: 64.43, 5e-6: 67.58, 1e-5: 67.47, 5e-5: 67.39}
"""Accuracy on PACS in per cent by lambda_align, with lambda_reg at 0.5."""
REG_AT_ALIGN, ALIGN_AT_REG = 5e-6, 0.5
"""The weight that stays fixed while the other one varies."""

TABLE3 = {
    "fedavg": (84.08, 5.30, 7.71),
    "fedprox": (84.77, 5.34, 7.82),
    "fedproc": (79.21, 4.99, 7.72),
    "fedgen": (49.37, 4.29, 7.85),
    "fedsr": (55.04, 3.28, 7.80),
    "fedcir": (42.31, 3.68, 7.85),
}
"""TFLOPs, GB moved and GB of memory per client to reach the target on DomainNet."""
TABLE3_TARGET = 0.6
TABLE3_MEASURES = ("TFLOPs", "GB moved", "GB of memory")
TABLE3_NOTES = [
    "Costs are per client: the total over all clients, divided by their number.",
    "Values are medians over seeds. A seed that never reaches the target counts as slower than all others.",
    "Memory is the most that all processes held together, with the data; the paper reports that of a GPU.",
]


def _mean_and_std(estimate: Estimate | None) -> tuple[float | None, float | None]:
    return (None, None) if estimate is None else (estimate.mean, estimate.std)


def published_accuracy(algorithm: str, dataset: str) -> tuple[float, float] | None:
    """Mean and standard deviation of the paper's Table 1 in per cent; None where it has no entry."""
    if algorithm not in _TABLE1 or dataset not in PAPER_DATASETS:
        return None
    column = 2 * PAPER_DATASETS.index(dataset)
    mean, std = _TABLE1[algorithm].split()[column : column + 2]
    return float(mean), float(std)


def make_table1(results: Results) -> Outcome:
    """Test accuracy of every method on every dataset."""
    algorithms = results.algorithms
    columns: Rows = [["method", *algorithms]]
    numbers: Rows = [["method", "dataset", "accuracy", "std", "seeds", "paper", "paper_std"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        published = (published_accuracy(algorithm, dataset) for algorithm in algorithms)
        paper = [None if accuracy is None else Estimate(*accuracy) for accuracy in published]
        ours = [results.accuracy(dataset, algorithm) for algorithm in algorithms]
        columns.append([dataset, *map(format_estimate, ours)])
        if any(paper):
            columns.append([f"{dataset}, paper", *("" if entry is None else format_estimate(entry) for entry in paper)])
        for algorithm, estimate, entry in zip(algorithms, ours, paper, strict=True):
            seeds = len(results.runs(dataset, algorithm))
            cells = format_numbers(*_mean_and_std(estimate), seeds, *_mean_and_std(entry))
            numbers.append([algorithm, dataset, *cells])
        series = tuple(series_with_errors(*pair) for pair in (("ours", ours), ("paper", paper)) if any(pair[1]))
        panels.append(Lines(dataset, "", "test accuracy (%)", series, tuple(algorithms), joined=False))
    return Outcome([list(row) for row in zip(*columns, strict=True)], numbers, panels)


def table2_points(scale: str) -> list[Point]:
    """FedCiR's two weights, one at a time, with 100 local steps."""
    steps = {} if scale == "smoke" else {"local": {"steps": 100}}
    pairs = [(reg, REG_AT_ALIGN) for reg in TABLE2_REG] + [(ALIGN_AT_REG, align) for align in TABLE2_ALIGN]
    if scale == "smoke":
        pairs = [(0.0, REG_AT_ALIGN), (ALIGN_AT_REG, REG_AT_ALIGN), (ALIGN_AT_REG, 5e-5)]
    return [
        Point(_weights_name(reg, align), {**steps, "algorithm": {"lambda_reg": reg, "lambda_align": align}})
        for reg, align in dict.fromkeys(pairs)
    ]


def _weights_name(reg: float, align: float) -> str:
    return f"reg {reg:g} align {align:g}"


def make_table2(results: Results) -> Outcome:
    """Test accuracy of FedCiR by its two weights."""
    rows: Rows = [["dataset", "lambda_reg", "lambda_align", "accuracy", "paper (PACS)"]]
    numbers: Rows = [["dataset", "lambda_reg", "lambda_align", "accuracy", "std", "seeds", "paper"]]
    panels: list[Chart] = []
    axes = {
        "lambda_reg": [(reg, REG_AT_ALIGN, published) for reg, published in TABLE2_REG.items()],
        "lambda_align": [(ALIGN_AT_REG, align, published) for align, published in TABLE2_ALIGN.items()],
    }
    for dataset, (axis, all_entries) in product(results.datasets, axes.items()):
        entries = [entry for entry in all_entries if _weights_name(*entry[:2]) in results.points]
        ours = []
        for reg, align, published in entries:
            point = _weights_name(reg, align)
            estimate, seeds = results.accuracy(dataset, "fedcir", point), results.runs(dataset, "fedcir", point)
            ours.append(estimate)
            rows.append([dataset, f"{reg:g}", f"{align:g}", format_estimate(estimate), f"{published:.2f}"])
            numbers.append([dataset, *format_numbers(reg, align, *_mean_and_std(estimate), len(seeds), published)])
        paper = series_with_errors("paper, PACS", [Estimate(published, None) for _, _, published in entries])
        series = (series_with_errors("ours", ours), paper) if any(ours) else (paper,)
        ticks = tuple(f"{(reg if axis == 'lambda_reg' else align):g}" for reg, align, _ in entries)
        panels.append(Lines(dataset, axis, "test accuracy (%)", series, ticks))
    return Outcome(rows, numbers, panels)


def make_table3(results: Results) -> Outcome:
    """Compute, communication and memory per client until the target accuracy is reached."""
    with_paper = "domainnet" in results.datasets and _choose_target(results, "domainnet") == TABLE3_TARGET
    paper_columns = [f"{measure}, paper" for measure in TABLE3_MEASURES] if with_paper else []
    rows: Rows = [["dataset", "target", "method", "rounds", *TABLE3_MEASURES, *paper_columns]]
    numbers: Rows = [["dataset", "target", "method", "seeds", "reached", "rounds", "tflops", "gb", "memory_gb"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        target = _choose_target(results, dataset)
        target_text = f"{100 * target:.1f} %"
        moved: list[tuple[float, float]] = []
        for x, algorithm in enumerate(results.algorithms):
            runs = list(results.runs(dataset, algorithm).values())
            costs = [cost_to_target(run.records, target) for run in runs]
            reached = sum(cost is not None for cost in costs)
            published = TABLE3.get(algorithm) if dataset == "domainnet" and with_paper else None
            paper = [f"{value:.2f}" for value in published] if published else [""] * len(paper_columns)
            reached_cells = format_numbers(target)[0], algorithm, str(len(runs)), str(reached)
            if 2 * reached <= len(runs):  # the median seed does not reach the target
                text = f"{reached} of {len(runs)} seeds" if reached else "not reached" if runs else "–"
                cells = ["" if reached else text] * len(TABLE3_MEASURES)
                rows.append([dataset, target_text, algorithm, text, *cells, *paper])
                numbers.append([dataset, *reached_cells, "", "", "", ""])
                continue
            rounds, *values = _median_costs(runs, costs)
            suffix = "" if reached == len(runs) else f" ({reached} of {len(runs)} seeds)"
            cells = [f"{rounds:g}{suffix}", *(f"{value:.3g}" for value in values)]
            rows.append([dataset, target_text, algorithm, *cells, *paper])
            numbers.append([dataset, *reached_cells, *format_numbers(rounds, *values)])
            moved.append((float(x), values[1]))
        if moved:
            xs, ys = (tuple(column) for column in zip(*moved, strict=True))
            label = f"GB moved per client to reach {target_text}"
            panels.append(Lines(dataset, "", label, (Series("ours", xs, ys),), tuple(results.algorithms), joined=False))
    return Outcome(rows, numbers, panels, TABLE3_NOTES)


def _choose_target(results: Results, dataset: str) -> float:
    """The requested target; else the paper's on DomainNet, and the baseline's last accuracy on other data."""
    if results.target is not None:
        return results.target
    if dataset == "domainnet":
        return TABLE3_TARGET
    runs = {name: by_seed for name in results.algorithms if (by_seed := results.runs(dataset, name))}
    estimate = results.accuracy(dataset, choose_baseline(runs)) if runs else None
    return 0.0 if estimate is None else estimate.mean / 100


def _median_costs(runs: Sequence[Run], costs: Sequence[Cost | None]) -> list[float]:
    """Rounds, TFLOPs, GB moved and GB of memory per client; infinite for a seed that never reaches the target."""
    rows = []
    for run, cost in zip(runs, costs, strict=True):
        clients = sum(bool(client["train"]) for client in run.manifest["clients"])
        spent = (math.inf, math.inf, math.inf)
        if cost is not None:
            moved = cost.bytes_down + cost.bytes_up
            spent = (cost.rounds, cost.flops / 1e12 / clients, moved / 1e9 / clients)
        rows.append((*spent, run.peak_memory / 1e9))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


STEPS = {"paper": (5, 20, 50, 100, 200), "small": (5, 20, 50, 100), "smoke": (1, 4)}
"""Local steps of fig-local-steps, by scale."""
SKEW_CLIENTS = {"paper": 50, "small": 20, "smoke": 8}
"""Clients of fig-heterogeneity, by scale."""
SKEW_BETAS = {"paper": (0.1, 0.5, 1, 10), "small": (0.1, 0.5, 1, 10), "smoke": (0.1, 10)}
CLIENT_PAIRS = {
    "paper": ((10, 5), (20, 10), (50, 10), (50, 25)),
    "small": ((10, 5), (20, 10), (50, 10)),
    "smoke": ((6, 3), (8, 4)),
}
"""Clients and active clients of fig-clients, by scale."""
CLIENT_BETAS = {"paper": (0.1, 0.5, 1, 10), "small": (0.1, 0.5), "smoke": (0.5,)}
ROUND_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of all rounds after which the table of fig-convergence gives accuracies."""
RISK_MEASURES = (
    ("of the global model, on each domain's test images", risk),
    ("of local models, during training", training_loss),
)
"""Two readings of the bound's first term (Theorem 2), the average local risk."""
DIVERGENCE_SAMPLES = 1000
"""Most test images of each domain in fig-divergence."""
MIXTURE = ("mean", "mixture")
"""Stands for the mean distance to the mixture among the pairs of domains."""


def local_steps_points(scale: str) -> list[Point]:
    return [Point(f"E {steps}", {"local": {"steps": steps}}) for steps in STEPS[scale]]


def heterogeneity_points(scale: str) -> list[Point]:
    split = {"scheme": "dirichlet", "clients": SKEW_CLIENTS[scale]}
    return [Point(f"beta {beta:g}", {"partition": {**split, "beta": float(beta)}}) for beta in SKEW_BETAS[scale]]


def clients_points(scale: str) -> list[Point]:
    return [
        Point(
            f"{active} of {clients}, beta {beta:g}",
            {
                "partition": {"scheme": "dirichlet", "clients": clients, "beta": float(beta)},
                "server": {"active": active},
            },
        )
        for beta in CLIENT_BETAS[scale]
        for clients, active in CLIENT_PAIRS[scale]
    ]


def plot_accuracy_by_point(results: Results, axis: str, joined: bool = True) -> Outcome:
    """Accuracy against a setting: one column and one tick for each point."""
    has_datasets = len(results.datasets) > 1
    rows: Rows = [[*["dataset"] * has_datasets, "method", *results.points]]
    numbers: Rows = [["dataset", "method", axis, "accuracy", "std", "seeds"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        series = []
        for algorithm in results.algorithms:
            estimates = {point: results.accuracy(dataset, algorithm, point) for point in results.points}
            rows.append([*[dataset] * has_datasets, algorithm, *map(format_estimate, estimates.values())])
            for point, estimate in estimates.items():
                seeds = len(results.runs(dataset, algorithm, point))
                numbers.append([dataset, algorithm, point, *format_numbers(*_mean_and_std(estimate), seeds)])
            if any(estimates.values()):
                series.append(series_with_errors(algorithm, list(estimates.values())))
        panels.append(Lines(dataset, axis, "test accuracy (%)", tuple(series), tuple(results.points), joined))
    return Outcome(rows, numbers, panels)


def _curve_rows(series: Series) -> list[list[str]]:
    """Round, value, lowest and highest seed of every point of a curve."""
    low, high = series.low or series.y, series.high or series.y
    return [format_numbers(*values) for values in zip(series.x, series.y, low, high, strict=True)]


def plot_convergence(results: Results) -> Outcome:
    """Accuracy against the round."""
    rows: Rows = [["dataset", "method", *(f"after {share:.0%} of the rounds" for share in ROUND_SHARES)]]
    numbers: Rows = [["dataset", "method", "round", "accuracy", "lowest_seed", "highest_seed"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        lines = []
        for algorithm in results.algorithms:
            line = build_curve(algorithm, results.runs(dataset, algorithm).values(), score)
            if line is None:
                rows.append([dataset, algorithm, *(format_estimate(None) for _ in ROUND_SHARES)])
                continue
            lines.append(line)
            indices = [max(0, sum(x <= share * line.x[-1] for x in line.x) - 1) for share in ROUND_SHARES]
            rows.append([dataset, algorithm, *(f"{line.y[index]:.2f}" for index in indices)])
            numbers += [[dataset, algorithm, *cells] for cells in _curve_rows(line)]
        panels.append(Lines(dataset, "round", "test accuracy (%)", tuple(lines)))
    return Outcome(rows, numbers, panels)


def plot_risk(results: Results) -> Outcome:
    """Average risk against the round."""
    rows: Rows = [["dataset", "method", *(f"final risk {name}" for name, _ in RISK_MEASURES)]]
    numbers: Rows = [["dataset", "method", "measure", "round", "risk", "lowest_seed", "highest_seed"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        final: dict[str, list[str]] = {algorithm: [] for algorithm in results.algorithms}
        for name, measure in RISK_MEASURES:
            lines = []
            for algorithm in results.algorithms:
                line = build_curve(algorithm, results.runs(dataset, algorithm).values(), measure)
                final[algorithm].append("–" if line is None else f"{line.y[-1]:.4f}")
                if line is not None:
                    lines.append(line)
                    numbers += [[dataset, algorithm, name, *cells] for cells in _curve_rows(line)]
            panels.append(Lines(f"{dataset}: {name}", "round", "average risk (cross-entropy)", tuple(lines)))
        rows += [[dataset, algorithm, *cells] for algorithm, cells in final.items()]
    return Outcome(rows, numbers, panels)


def plot_divergence(results: Results) -> Outcome:
    """Proxy A-distances under one method against those under the baseline: every pair of domains, and the mixture."""
    rows: Rows = [["dataset", "domains", *results.algorithms]]
    numbers: Rows = [["dataset", "seed", "one", "other", *results.algorithms]]
    panels: list[Chart] = []
    notes: list[str] = []
    for dataset in results.datasets:
        divergences = _measure_divergences(results, dataset, notes)
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in divergences.values())))
        if not seeds:
            rows.append([dataset, "no seed has finished for all methods", *("–" for _ in results.algorithms)])
            continue
        baseline = choose_baseline({name: results.runs(dataset, name) for name in results.algorithms})
        pairs = list(divergences[baseline][seeds[0]].pairs)
        titles = {pair: ", ".join(pair) for pair in pairs} | {MIXTURE: "mean to the mixture"}
        values: dict[tuple[str, str], dict[str, list[float]]] = {}  # by pair, method and seed
        for pair, (name, by_seed) in product(titles, divergences.items()):
            measured = (by_seed[seed] for seed in seeds)
            values.setdefault(pair, {})[name] = [
                (d.mean_to_mixture if pair == MIXTURE else d.pairs[pair]).value for d in measured
            ]
        for pair, by_method in values.items():
            rows.append([dataset, titles[pair], *map(_format_distances, by_method.values())])
            for seed, distances in zip(seeds, zip(*by_method.values(), strict=True), strict=True):
                numbers.append([dataset, str(seed), *pair, *format_numbers(*distances)])
        for other in (name for name in results.algorithms if name != baseline):
            x, y = (tuple(float(np.mean(values[pair][name])) for pair in titles) for name in (baseline, other))
            series = (Series("pair of domains", x[:-1], y[:-1]), Series(titles[MIXTURE], x[-1:], y[-1:]))
            labels = (f"proxy A-distance under {baseline}", f"proxy A-distance under {other}")
            panels.append(Lines(dataset, *labels, series, joined=False, diagonal=True))
            closer = sum(below < above for above, below in zip(x[:-1], y[:-1], strict=True))
            pairs_of = f"{closer} of {len(pairs)} pairs of domains"
            notes.append(f"{dataset}: {pairs_of} are closer under {other} than under {baseline}.")
    return Outcome(rows, numbers, panels, notes)


def _measure_divergences(results: Results, dataset: str, notes: list[str]) -> dict[str, dict[int, Divergences]]:
    """Distances between domains by method and seed; adds a note for what cannot be measured."""
    divergences = {}
    for name in results.algorithms:
        runs = results.runs(dataset, name)
        diagnoses = {seed: diagnose_run(run, limit=DIVERGENCE_SAMPLES) for seed, run in runs.items()}
        divergences[name] = {seed: diagnosis.divergences for seed, diagnosis in diagnoses.items() if diagnosis.measured}
        reasons = dict.fromkeys(diagnosis.missing_reason for diagnosis in diagnoses.values() if not diagnosis.measured)
        notes += [f"{dataset}: not measured for {name}: {reason}." for reason in reasons]
    return divergences


def _format_distances(values: list[float]) -> str:
    mean = f"{np.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.2f}"


EXPERIMENTS: dict[str, Experiment] = {
    "fig-clients": Experiment(
        "test accuracy (%) by the number of clients, active clients and label skew",
        ("domainnet", "pacs"),
        PAPER_METHODS,
        partial(plot_accuracy_by_point, axis="active of all clients, Dirichlet beta", joined=False),
        clients_points,
    ),
    "fig-convergence": Experiment(
        "test accuracy (%) during training, mean over seeds", ("domainnet", "pacs"), PAPER_METHODS, plot_convergence
    ),
    "fig-divergence": Experiment(
        "proxy A-distance between domains (0 to 2), mean ± standard deviation over seeds",
        ("domainnet",),
        ("fedavg", "fedcir"),
        plot_divergence,
    ),
    "fig-heterogeneity": Experiment(
        "test accuracy (%) against label skew; smaller beta gives more skew",
        ("domainnet", "pacs"),
        PAPER_METHODS,
        partial(plot_accuracy_by_point, axis="Dirichlet beta"),
        heterogeneity_points,
    ),
    "fig-local-steps": Experiment(
        "test accuracy (%) against the local steps in a round",
        ("domainnet", "pacs"),
        PAPER_METHODS,
        partial(plot_accuracy_by_point, axis="local steps E in a round"),
        local_steps_points,
    ),
    "fig-risk": Experiment(
        "average risk over clients, mean over seeds", ("domainnet",), ("fedavg", "fedcir"), plot_risk
    ),
    "table1": Experiment(
        "test accuracy after the last round (%), mean ± standard deviation over seeds",
        PAPER_DATASETS,
        PAPER_METHODS,
        make_table1,
        smoke=PAPER_METHODS,
    ),
    "table2": Experiment(
        "test accuracy of FedCiR (%) by its two weights, one at a time",
        ("pacs",),
        ("fedcir",),
        make_table2,
        table2_points,
        smoke=("fedcir",),
        fixed=True,
    ),
    "table3": Experiment(
        "cost per client to reach the target accuracy",
        ("domainnet",),
        ("fedavg", "fedprox", "fedproc", "fedgen", "fedsr", "fedcir"),
        make_table3,
    ),
}
"""All figures and tables by the id that `fedcir reproduce` takes, in alphabetical order."""
