"""Table 3: what a client spends until a target accuracy is reached: compute, communication, memory."""

import math
import statistics

from fedcir.engine.cost import Ledger, to_target
from fedcir.insight.charts import Chart, Lines, Series
from fedcir.insight.experiments import paper
from fedcir.insight.experiments.experiment import Experiment, Outcome, Results, number
from fedcir.insight.report.tables import Rows
from fedcir.runs.compare import baseline_of
from fedcir.runs.run import Run

MEASURES = ("TFLOPs", "GB moved", "GB of memory")
NOTES = [
    "Costs are per client: the total over all clients, divided by their number.",
    "Values are medians over seeds. A seed that never reaches the target counts as slower than all others.",
    "Memory is the most that all processes held together, with the data; the paper reports that of a GPU.",
]


def outcome(results: Results) -> Outcome:
    beside = "domainnet" in results.datasets and _target(results, "domainnet") == paper.TABLE3_TARGET
    header = ["dataset", "target", "method", "rounds", *MEASURES]
    rows: Rows = [[*header, *(f"{each}, paper" for each in MEASURES)] if beside else header]
    numbers: Rows = [["dataset", "target", "method", "seeds", "reached", "rounds", "tflops", "gb", "memory_gb"]]
    panels: list[Chart] = []
    for dataset in results.datasets:
        target = _target(results, dataset)
        goal = f"{100 * target:.1f} %"
        ours: list[tuple[float, float]] = []
        for place, algorithm in enumerate(results.algorithms):
            runs = list(results.runs(dataset, algorithm).values())
            spent = [to_target(run.records, target) for run in runs]
            reached = sum(each is not None for each in spent)
            theirs = paper.TABLE3.get(algorithm) if dataset == "domainnet" and beside else None
            tail = [f"{value:.2f}" for value in theirs] if theirs else [""] * (len(MEASURES) if beside else 0)
            counts = [str(len(runs)), str(reached)]
            if 2 * reached <= len(runs):  # the middle seed did not get there
                said = f"{reached} of {len(runs)} seeds" if reached else "not reached" if runs else "–"
                rows.append([dataset, goal, algorithm, said, *["" if reached else said] * len(MEASURES), *tail])
                numbers.append([dataset, number(target), algorithm, *counts, "", "", "", ""])
                continue
            rounds, *values = (
                statistics.median(column)
                for column in zip(*(_spent(run, each) for run, each in zip(runs, spent, strict=True)), strict=True)
            )
            all_there = "" if reached == len(runs) else f" ({reached} of {len(runs)} seeds)"
            rows.append([dataset, goal, algorithm, f"{rounds:g}{all_there}", *(f"{v:.3g}" for v in values), *tail])
            numbers.append([dataset, number(target), algorithm, *counts, *map(number, (rounds, *values))])
            ours.append((float(place), values[1]))
        if ours:
            x, y = (tuple(column) for column in zip(*ours, strict=True))
            series, ticks = (Series("ours", x, y),), tuple(results.algorithms)
            panels.append(Lines(dataset, "", f"GB moved per client to reach {goal}", series, ticks, joined=False))
    return Outcome(rows, numbers, panels, NOTES)


def _target(results: Results, dataset: str) -> float:
    """As asked; the paper's on DomainNet; elsewhere where the baseline ended."""
    if results.target is not None:
        return results.target
    if dataset == "domainnet":
        return paper.TABLE3_TARGET
    runs = {name: each for name in results.algorithms if (each := results.runs(dataset, name))}
    found = results.accuracy(dataset, baseline_of(runs)) if runs else None
    return 0.0 if found is None else found.mean / 100


def _spent(run: Run, spent: Ledger | None) -> tuple[float, float, float, float]:
    """Rounds, TFLOPs, GB and GB of memory; a run that never gets there is later than all."""
    memory = run.peak_memory / 1e9
    if spent is None:
        return math.inf, math.inf, math.inf, memory
    clients = sum(bool(client["train"]) for client in run.manifest["clients"])
    moved = spent.bytes_down + spent.bytes_up
    return spent.rounds, spent.flops / 1e12 / clients, moved / 1e9 / clients, memory


EXPERIMENT = Experiment(
    "cost per client to reach the target accuracy",
    ("domainnet",),
    ("fedavg", "fedprox", "fedproc", "fedgen", "fedsr", "fedcir"),
    outcome,
)
