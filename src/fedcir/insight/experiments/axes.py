"""Figures of accuracy against a setting: one table and one panel a dataset, whatever the setting is."""

from fedcir.insight.charts import Chart, Lines, spread
from fedcir.insight.experiments.experiment import Outcome, Results, cell, number, plain
from fedcir.insight.report.tables import Rows


def accuracy_against(results: Results, axis: str, joined: bool = True) -> Outcome:
    """A column and a place on the axis for each point."""
    several = len(results.datasets) > 1
    rows: Rows = [[*(["dataset"] if several else []), "method", *results.points]]
    numbers: Rows = [["dataset", "method", axis, "accuracy", "std", "seeds"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        series = []
        for algorithm in results.algorithms:
            found = {point: results.accuracy(dataset, algorithm, point) for point in results.points}
            rows.append([*([dataset] if several else []), algorithm, *(cell(each) for each in found.values())])
            places = []
            for place, (point, each) in enumerate(found.items()):
                seeds = len(results.runs(dataset, algorithm, point))
                values = [*plain(each), float(seeds)]
                numbers.append([dataset, algorithm, point, *(number(value) for value in values)])
                if each is not None:
                    places.append((float(place), each.mean, each.std))
            if places:
                series.append(spread(algorithm, places))
        panels.append(Lines(dataset, axis, "test accuracy (%)", tuple(series), tuple(results.points), joined))
    return Outcome(rows, numbers, panels)
