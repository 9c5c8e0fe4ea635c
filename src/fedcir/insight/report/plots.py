"""Pictures of runs."""

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedcir.engine.files import write
from fedcir.insight.charts import Chart, Lines, accuracy, curve
from fedcir.runs.run import Run


def convergence(runs: Mapping[str, Mapping[int, Run]]) -> Lines:
    """Mean accuracy over domains against the round: a line a method, a band from the lowest seed to the highest."""
    curves = [curve(name, by_seed.values(), accuracy) for name, by_seed in runs.items()]
    series = tuple(each for each in curves if each is not None)
    unseen = any(record.unseen for by_seed in runs.values() for run in by_seed.values() for record in run.records)
    over = "domains trained on" if unseen else "domains"
    return Lines("", "round", f"test accuracy, mean over {over} (%)", series)


def draw(panels: Sequence[Chart], paths: Sequence[Path]) -> None:
    """Panels side by side, three in a row, in every format that the paths' endings name."""
    lines = [panel for panel in panels if isinstance(panel, Lines)]
    columns = max(1, min(3, len(lines)))
    rows = max(1, math.ceil(len(lines) / columns))
    figure = Figure(figsize=(max(7.0, 4.6 * columns), 4.2 * rows), layout="constrained")
    for axes, panel in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).flat, lines):
        if panel is None:
            axes.set_axis_off()
        else:
            _lines(axes, panel)
    for path in paths:
        save(figure, path)


STAMPS = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""What each format would hold of the time or the version: equal results are to be equal files."""


def save(figure: Figure, path: Path) -> None:
    """Write a picture whole or not at all, in the format that its name ends in."""
    drawn = io.BytesIO()
    kind = path.suffix.lower()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name that the font cannot write is drawn as boxes
        figure.savefig(drawn, format=kind[1:], dpi=150, metadata={STAMPS[kind]: None} if kind in STAMPS else None)
    write(path, drawn.getvalue())


def _lines(axes: Any, panel: Lines) -> None:
    for number, series in enumerate(panel.series):
        style = "-" if panel.joined and len(series.x) > 1 else "none"
        few = len(series.x) <= 12
        marker = "*" if panel.diagonal and number else "o" if few or style == "none" else None
        size = 13 if marker == "*" else 5
        shift = 0.0 if panel.joined or panel.diagonal else 0.08 * (number - (len(panel.series) - 1) / 2)
        x = [each + shift for each in series.x]
        line = {"color": f"C{number % 10}", "linestyle": style, "linewidth": 1.6, "marker": marker, "markersize": size}
        axes.plot(x, series.y, label=plain(series.name), **line)
        if series.low is not None and series.high is not None:
            if style == "-":
                axes.fill_between(x, series.low, series.high, color=f"C{number % 10}", alpha=0.15, linewidth=0)
            else:
                axes.vlines(x, series.low, series.high, color=f"C{number % 10}", linewidth=1.2)
    if panel.ticks:
        long = max(map(len, panel.ticks)) * len(panel.ticks) > 40
        names = [plain(name) for name in panel.ticks]
        axes.set_xticks(range(len(names)), names, rotation=40 if long else 0, ha="right" if long else "center")
    if panel.diagonal:
        axes.plot([0, 2], [0, 2], color="0.5", linewidth=1, linestyle="--")
        axes.set(xlim=(0, 2.05), ylim=(0, 2.05), aspect="equal")
    axes.set(xlabel=panel.x, ylabel=panel.y, title=textwrap.fill(plain(panel.title), 40))
    axes.grid(alpha=0.3)
    if panel.series:
        axes.legend(frameon=False, fontsize="small")


def clients_by_classes(held: Sequence[tuple[str, str, NDArray[np.int64]]], classes: Sequence[str], path: Path) -> None:
    """Who holds what: a dot for each client and class, as large as the number of images, coloured by domain.

    `held` gives each client's name, its domain and its images by class.
    """
    counts = np.stack([count for _, _, count in held])  # (clients, classes)
    width, height = min(16.0, 2.5 + 0.28 * len(held)), min(12.0, 1.8 + 0.28 * len(classes))
    figure = Figure(figsize=(max(width, 5.0), height), layout="constrained")
    axes = figure.subplots()
    largest = max(1, int(counts.max()))
    domains = list(dict.fromkeys(domain for _, domain, _ in held))
    shown = []
    for number, domain in enumerate(domains):
        mine = np.array([client for client, (_, other, _) in enumerate(held) if other == domain])
        x, y = (grid.ravel() for grid in np.meshgrid(mine, np.arange(len(classes)), indexing="ij"))
        area = 180 * counts[mine].ravel() / largest
        axes.scatter(x, y, s=area, color=f"C{number}", linewidths=0)
        shown.append(axes.scatter([], [], s=50, color=f"C{number}"))  # the legend's dots are all of one size
    few = len(held) <= 60
    axes.set_xticks(range(len(held)) if few else [0, len(held) - 1])
    names = [plain(held[tick][0]) for tick in (range(len(held)) if few else (0, -1))]
    axes.set_xticklabels(names, rotation=90 if few else 0)
    axes.set_yticks(range(len(classes)) if len(classes) <= 60 else [])
    axes.set_yticklabels([plain(name) for name in classes] if len(classes) <= 60 else [])
    axes.set(xlabel="client", ylabel=f"class (largest dot: {largest} images)", xlim=(-0.7, len(held) - 0.3))
    axes.set_ylim(len(classes) - 0.4, -0.6)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    figure.legend(shown, [plain(name) for name in domains], loc="outside upper center", ncols=6, frameon=False)
    save(figure, path)


def plain(name: str) -> str:
    """A name that matplotlib does not read as a formula."""
    return name.replace("$", r"\$")
