"""Accuracy against the round."""

from fedcir.insight.charts import Chart, Lines, accuracy, curve
from fedcir.insight.experiments.experiment import Experiment, Outcome, Results, cell, number
from fedcir.insight.experiments.paper import METHODS
from fedcir.insight.report.tables import Rows

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Where the table looks at the curves, as shares of all rounds."""


def outcome(results: Results) -> Outcome:
    rows: Rows = [["dataset", "method", *(f"after {share:.0%} of the rounds" for share in SHARES)]]
    numbers: Rows = [["dataset", "method", "round", "accuracy", "lowest_seed", "highest_seed"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        series = []
        for algorithm in results.algorithms:
            found = curve(algorithm, results.runs(dataset, algorithm).values(), accuracy)
            if found is None:
                rows.append([dataset, algorithm, *(cell(None) for _ in SHARES)])
                continue
            series.append(found)
            low, high = found.low or found.y, found.high or found.y
            last = found.x[-1]
            near = [max(0, sum(x <= share * last for x in found.x) - 1) for share in SHARES]
            rows.append([dataset, algorithm, *(f"{found.y[place]:.2f}" for place in near)])
            for values in zip(found.x, found.y, low, high, strict=True):
                numbers.append([dataset, algorithm, *(number(value) for value in values)])
        panels.append(Lines(dataset, "round", "test accuracy (%)", tuple(series)))
    return Outcome(rows, numbers, panels)


EXPERIMENT = Experiment("test accuracy (%) during training, mean over seeds", ("domainnet", "pacs"), METHODS, outcome)
