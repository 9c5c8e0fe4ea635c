"""Pictures of runs."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from fedcir.records import RunFolder


def convergence(runs: Mapping[str, Mapping[int, RunFolder]], path: Path) -> None:
    """Mean accuracy over domains against the round: a line a method, a band from the lowest seed to the highest."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, by_seed) in enumerate(runs.items()):
        colour = f"C{number}"
        curves = [
            {record.round: 100 * record.accuracy_mean for record in run.records() if record.accuracy_mean is not None}
            for run in by_seed.values()
        ]
        rounds = sorted(curves[0])
        values = [[curve[round] for curve in curves if round in curve] for round in rounds]
        axes.plot(rounds, [sum(v) / len(v) for v in values], color=colour, label=name, linewidth=1.6)
        if len(curves) > 1:
            axes.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15)
    axes.set(xlabel="round", ylabel="test accuracy, mean over domains (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
