"""Average risk against the round, in two readings of the bound's first term (Theorem 2), the average local risk."""

from fedcir.insight.charts import Chart, Lines, curve, risk, training_loss
from fedcir.insight.experiments.experiment import Experiment, Outcome, Results, number
from fedcir.insight.report.tables import Rows

MEASURES = (
    ("of the global model, on each domain's test images", risk),
    ("of local models, during training", training_loss),
)


def outcome(results: Results) -> Outcome:
    rows: Rows = [["dataset", "method", *(f"final risk {name}" for name, _ in MEASURES)]]
    numbers: Rows = [["dataset", "method", "measure", "round", "risk", "lowest_seed", "highest_seed"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        last: dict[str, list[str]] = {algorithm: [] for algorithm in results.algorithms}
        for name, measure in MEASURES:
            series = []
            for algorithm in results.algorithms:
                found = curve(algorithm, results.runs(dataset, algorithm).values(), measure)
                last[algorithm].append("–" if found is None else f"{found.y[-1]:.4f}")
                if found is not None:
                    series.append(found)
                    low, high = found.low or found.y, found.high or found.y
                    for values in zip(found.x, found.y, low, high, strict=True):
                        numbers.append([dataset, algorithm, name, *(number(value) for value in values)])
            panels.append(Lines(f"{dataset}: {name}", "round", "average risk (cross-entropy)", tuple(series)))
        rows += [[dataset, algorithm, *cells] for algorithm, cells in last.items()]
    return Outcome(rows, numbers, panels)


EXPERIMENT = Experiment("average risk over clients, mean over seeds", ("domainnet",), ("fedavg", "fedcir"), outcome)
