"""Pictures of runs."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name that the font cannot write is drawn as boxes
        figure.savefig(path, dpi=150, metadata={"Software": None})


def plain(name: str) -> str:
    """A name that matplotlib does not read as a formula."""
    return name.replace("$", r"\$")
