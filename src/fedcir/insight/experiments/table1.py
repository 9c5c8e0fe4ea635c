"""Table 1: test accuracy of every method on every dataset, mean and standard deviation over seeds."""

from fedcir.insight.charts import Chart, Lines, spread
from fedcir.insight.experiments import paper
from fedcir.insight.experiments.experiment import Experiment, Outcome, Results, cell, number, plain
from fedcir.insight.experiments.paper import METHODS
from fedcir.insight.report.tables import Rows


def outcome(results: Results) -> Outcome:
    header = ["method"]
    rows: Rows = [[algorithm] for algorithm in results.algorithms]
    numbers: Rows = [["method", "dataset", "accuracy", "std", "seeds", "paper", "paper_std"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        printed = {algorithm: paper.table1(algorithm, dataset) for algorithm in results.algorithms}
        header += [dataset, f"{dataset}, paper"] if any(printed.values()) else [dataset]
        ours: list[tuple[float, float, float | None]] = []
        for place, (row, algorithm) in enumerate(zip(rows, results.algorithms, strict=True)):
            found, theirs = results.accuracy(dataset, algorithm), printed[algorithm]
            row.append(cell(found))
            if any(printed.values()):
                row.append("" if theirs is None else f"{theirs[0]:.2f} ± {theirs[1]:.2f}")
            seeds = len(results.runs(dataset, algorithm))
            values = [*plain(found), float(seeds), *(theirs or (None, None))]
            numbers.append([algorithm, dataset, *(number(value) for value in values)])
            if found is not None:
                ours.append((place, found.mean, found.std))
        theirs_too: list[tuple[float, float, float | None]] = [
            (place, *theirs) for place, theirs in enumerate(printed.values()) if theirs is not None
        ]
        series = tuple(spread(name, points) for name, points in (("ours", ours), ("paper", theirs_too)) if points)
        panels.append(Lines(dataset, "", "test accuracy (%)", series, tuple(results.algorithms), joined=False))
    return Outcome([header, *rows], numbers, panels)


EXPERIMENT = Experiment(
    "test accuracy after the last round (%), mean ± standard deviation over seeds",
    paper.DATASETS,
    METHODS,
    outcome,
    smoke=METHODS,
)
