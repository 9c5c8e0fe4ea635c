"""Figures of the paper: accuracy by setting and by round, average risk, and distances between domains."""

from functools import partial

import numpy as np

from fedcir.algorithms import PAPER_METHODS
from fedcir.analysis.diagnosis import diagnose_run
from fedcir.analysis.divergence import Divergences
from fedcir.experiments.experiment import (
    Experiment,
    Outcome,
    Point,
    Results,
    format_estimate,
    format_numbers,
    mean_and_std,
)
from fedcir.reporting.charts import Chart, Lines, Series, accuracy, build_curve, risk, series_with_errors, training_loss
from fedcir.reporting.page import Rows
from fedcir.runs.statistics import choose_baseline

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
    rows: Rows = [[*(["dataset"] if has_datasets else []), "method", *results.points]]
    numbers: Rows = [["dataset", "method", axis, "accuracy", "std", "seeds"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        series = []
        for algorithm in results.algorithms:
            estimates = {point: results.accuracy(dataset, algorithm, point) for point in results.points}
            cells = [format_estimate(estimate) for estimate in estimates.values()]
            rows.append([*([dataset] if has_datasets else []), algorithm, *cells])
            values = []
            for x, (point, estimate) in enumerate(estimates.items()):
                seeds = len(results.runs(dataset, algorithm, point))
                numbers.append([dataset, algorithm, point, *format_numbers(*mean_and_std(estimate), seeds)])
                if estimate is not None:
                    values.append((float(x), estimate.mean, estimate.std))
            if values:
                series.append(series_with_errors(algorithm, values))
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
            line = build_curve(algorithm, results.runs(dataset, algorithm).values(), accuracy)
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
        values = {
            pair: {name: [by_seed[seed].pairs[pair].value for seed in seeds] for name, by_seed in divergences.items()}
            for pair in pairs
        }
        mixture = {
            name: [by_seed[seed].mean_to_mixture.value for seed in seeds] for name, by_seed in divergences.items()
        }
        titles = {pair: ", ".join(pair) for pair in pairs} | {("mean", "mixture"): "mean to the mixture"}
        for pair, by_method in {**values, ("mean", "mixture"): mixture}.items():
            rows.append([dataset, titles[pair], *(_format_distances(v) for v in by_method.values())])
            for index, seed in enumerate(seeds):
                cells = format_numbers(*(distances[index] for distances in by_method.values()))
                numbers.append([dataset, str(seed), *pair, *cells])
        for other in (name for name in results.algorithms if name != baseline):
            x, y = (tuple(float(np.mean(values[pair][name])) for pair in pairs) for name in (baseline, other))
            mean = Series(
                "mean to the mixture", (float(np.mean(mixture[baseline])),), (float(np.mean(mixture[other])),)
            )
            labels = (f"proxy A-distance under {baseline}", f"proxy A-distance under {other}")
            series = (Series("pair of domains", x, y), mean)
            panels.append(Lines(dataset, *labels, series, joined=False, diagonal=True))
            closer = sum(below < above for above, below in zip(x, y, strict=True))
            notes.append(
                f"{dataset}: {closer} of {len(x)} pairs of domains are closer under {other} than under {baseline}."
            )
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


FIGURES = {
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
}
"""The paper's figures, by the id that `fedcir reproduce` takes."""
