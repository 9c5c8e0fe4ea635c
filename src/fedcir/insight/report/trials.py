"""The picture of a search: accuracy against each setting, and which settings mattered."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedcir.config import Range, Span
from fedcir.insight.attempts import Attempt
from fedcir.insight.report.plots import plain, save

KINDS = (("done", "o", "C0", "C0"), ("stopped", "o", "none", "C0"))
"""State of a trial, its marker, what the marker is filled with, and its edge."""


def draw_trials(
    trials: Sequence[Attempt], space: Mapping[str, Range], importances: Mapping[str, float], path: Path
) -> Path:
    """A panel for each setting, and one of bars where it is known what mattered."""
    panels = len(space) + bool(importances)
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(max(5.0, 3.8 * columns), 3.4 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (place, values) in zip(places, space.items(), strict=False):
        _scatter(axes, trials, place, values)
    if importances:
        _bars(places[len(space)], importances)
    for axes in places[panels:]:
        axes.set_axis_off()
    save(figure, path)
    return path


def _scatter(axes: Any, trials: Sequence[Attempt], place: str, values: Range) -> None:
    named = None if isinstance(values, Span) else [str(value) for value in values.values]
    tested = [trial for trial in trials if trial.accuracy]
    for state, marker, face, edge in KINDS:
        some = [trial for trial in tested if trial.state == state]
        x = [trial.settings[place] if named is None else named.index(str(trial.settings[place])) for trial in some]
        y = [100 * trial.score for trial in some]
        label = "all rounds" if state == "done" else "stopped early"
        axes.scatter(x, y, marker=marker, facecolors=face, edgecolors=edge, s=28, label=label if some else None)
    if isinstance(values, Span) and values.log:
        axes.set_xscale("log")
    if named is not None:
        axes.set_xticks(range(len(named)), [plain(name) for name in named])
        axes.set_xlim(-0.5, len(named) - 0.5)
    axes.set(xlabel=place, ylabel="validation accuracy (%)")
    axes.grid(alpha=0.3)
    if tested:
        axes.legend(frameon=False, fontsize="small")


def _bars(axes: Any, importances: Mapping[str, float]) -> None:
    names = list(importances)[::-1]  # the first on top
    axes.barh(range(len(names)), [100 * importances[name] for name in names], color="C0")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="share in how accuracies differ (%)", xlim=(0, 100), title="what mattered")
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
