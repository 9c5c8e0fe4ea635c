"""Tables 1 to 3 of the paper (arXiv 2308.15786), beside the numbers that it prints."""

import math
import statistics
from collections.abc import Sequence

from fedcir.algorithms import PAPER_METHODS
from fedcir.client.cost import Cost, cost_to_target
from fedcir.experiments.experiment import (
    Experiment,
    Outcome,
    Point,
    Results,
    format_estimate,
    format_numbers,
    mean_and_std,
)
from fedcir.reporting.charts import Chart, Lines, Series, series_with_errors
from fedcir.reporting.page import Rows
from fedcir.runs.reader import Run
from fedcir.runs.statistics import choose_baseline

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


def published_accuracy(algorithm: str, dataset: str) -> tuple[float, float] | None:
    """Mean and standard deviation of the paper's Table 1 in per cent; None where it has no entry."""
    if algorithm not in _TABLE1 or dataset not in PAPER_DATASETS:
        return None
    column = 2 * PAPER_DATASETS.index(dataset)
    mean, std = _TABLE1[algorithm].split()[column : column + 2]
    return float(mean), float(std)


def make_table1(results: Results) -> Outcome:
    """Test accuracy of every method on every dataset."""
    header = ["method"]
    rows: Rows = [[algorithm] for algorithm in results.algorithms]
    numbers: Rows = [["method", "dataset", "accuracy", "std", "seeds", "paper", "paper_std"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        published = {algorithm: published_accuracy(algorithm, dataset) for algorithm in results.algorithms}
        header += [dataset, f"{dataset}, paper"] if any(published.values()) else [dataset]
        ours: list[tuple[float, float, float | None]] = []
        for x, (row, algorithm) in enumerate(zip(rows, results.algorithms, strict=True)):
            estimate, theirs = results.accuracy(dataset, algorithm), published[algorithm]
            row.append(format_estimate(estimate))
            if any(published.values()):
                row.append("" if theirs is None else f"{theirs[0]:.2f} ± {theirs[1]:.2f}")
            seeds = len(results.runs(dataset, algorithm))
            cells = format_numbers(*mean_and_std(estimate), seeds, *(theirs or (None, None)))
            numbers.append([algorithm, dataset, *cells])
            if estimate is not None:
                ours.append((x, estimate.mean, estimate.std))
        paper: list[tuple[float, float, float | None]] = [
            (x, *theirs) for x, theirs in enumerate(published.values()) if theirs is not None
        ]
        series = tuple(
            series_with_errors(name, points) for name, points in (("ours", ours), ("paper", paper)) if points
        )
        panels.append(Lines(dataset, "", "test accuracy (%)", series, tuple(results.algorithms), joined=False))
    return Outcome([header, *rows], numbers, panels)


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
    for dataset in results.datasets:
        for axis, every_entry in axes.items():
            entries = [entry for entry in every_entry if _weights_name(*entry[:2]) in results.points]
            ours = []
            for x, (reg, align, published) in enumerate(entries):
                point = _weights_name(reg, align)
                estimate, seeds = results.accuracy(dataset, "fedcir", point), results.runs(dataset, "fedcir", point)
                rows.append([dataset, f"{reg:g}", f"{align:g}", format_estimate(estimate), f"{published:.2f}"])
                cells = format_numbers(reg, align, *mean_and_std(estimate), len(seeds), published)
                numbers.append([dataset, *cells])
                if estimate is not None:
                    ours.append((float(x), estimate.mean, estimate.std))
            paper = Series("paper, PACS", tuple(map(float, range(len(entries)))), tuple(entry[2] for entry in entries))
            series = (series_with_errors("ours", ours), paper) if ours else (paper,)
            ticks = tuple(f"{(reg if axis == 'lambda_reg' else align):g}" for reg, align, _ in entries)
            panels.append(Lines(dataset, axis, "test accuracy (%)", series, ticks))
    return Outcome(rows, numbers, panels)


def make_table3(results: Results) -> Outcome:
    """Compute, communication and memory per client until the target accuracy is reached."""
    with_paper = "domainnet" in results.datasets and _target(results, "domainnet") == TABLE3_TARGET
    paper_columns = [f"{measure}, paper" for measure in TABLE3_MEASURES] if with_paper else []
    rows: Rows = [["dataset", "target", "method", "rounds", *TABLE3_MEASURES, *paper_columns]]
    numbers: Rows = [["dataset", "target", "method", "seeds", "reached", "rounds", "tflops", "gb", "memory_gb"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        target = _target(results, dataset)
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


def _target(results: Results, dataset: str) -> float:
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


TABLES = {
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
"""The paper's tables, by the id that `fedcir reproduce` takes."""
