"""Table 2: FedCiR's two weights, one at a time, with 100 local steps."""

from fedcir.insight.charts import Chart, Lines, Series, spread
from fedcir.insight.experiments import paper
from fedcir.insight.experiments.experiment import Experiment, Outcome, Point, Results, cell, number, plain
from fedcir.insight.report.tables import Rows

REG_AT_ALIGN, ALIGN_AT_REG = 5e-6, 0.5


def points(scale: str) -> list[Point]:
    steps = {} if scale == "smoke" else {"local": {"steps": 100}}
    pairs = [(reg, REG_AT_ALIGN) for reg in paper.TABLE2_REG] + [(ALIGN_AT_REG, align) for align in paper.TABLE2_ALIGN]
    if scale == "smoke":
        pairs = [(0.0, REG_AT_ALIGN), (ALIGN_AT_REG, REG_AT_ALIGN), (ALIGN_AT_REG, 5e-5)]
    return [
        Point(_name(reg, align), {**steps, "algorithm": {"lambda_reg": reg, "lambda_align": align}})
        for reg, align in dict.fromkeys(pairs)
    ]


def _name(reg: float, align: float) -> str:
    return f"reg {reg:g} align {align:g}"


def outcome(results: Results) -> Outcome:
    rows: Rows = [["dataset", "lambda_reg", "lambda_align", "accuracy", "paper (PACS)"]]
    numbers: Rows = [["dataset", "lambda_reg", "lambda_align", "accuracy", "std", "seeds", "paper"]]
    panels: list[Chart] = []
    sweeps = [
        ("lambda_reg", [(reg, REG_AT_ALIGN, printed) for reg, printed in paper.TABLE2_REG.items()]),
        ("lambda_align", [(ALIGN_AT_REG, align, printed) for align, printed in paper.TABLE2_ALIGN.items()]),
    ]
    for dataset in results.datasets:
        for axis, places in sweeps:
            taken = [place for place in places if _name(*place[:2]) in results.points]
            ours = []
            for at, (reg, align, printed) in enumerate(taken):
                found = results.accuracy(dataset, "fedcir", _name(reg, align))
                rows.append([dataset, f"{reg:g}", f"{align:g}", cell(found), f"{printed:.2f}"])
                seeds = len(results.runs(dataset, "fedcir", _name(reg, align)))
                values = [reg, align, *plain(found), float(seeds), printed]
                numbers.append([dataset, *(number(value) for value in values)])
                if found is not None:
                    ours.append((float(at), found.mean, found.std))
            series = [Series("paper, PACS", tuple(map(float, range(len(taken)))), tuple(p for _, _, p in taken))]
            if ours:
                series.insert(0, spread("ours", ours))
            ticks = tuple(f"{(reg if axis == 'lambda_reg' else align):g}" for reg, align, _ in taken)
            panels.append(Lines(dataset, axis, "test accuracy (%)", tuple(series), ticks))
    return Outcome(rows, numbers, panels)


EXPERIMENT = Experiment(
    "test accuracy of FedCiR (%) by its two weights, one at a time",
    ("pacs",),
    ("fedcir",),
    outcome,
    points,
    smoke=("fedcir",),
    fixed=True,
)
