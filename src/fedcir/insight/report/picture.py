"""The picture of a diagnosis: distances, representations, accuracies, classes by domains, and labels by clients."""

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedcir.analysis.diagnose import Diagnosis
from fedcir.analysis.views import View
from fedcir.insight.report.plots import STAMPS, plain, save
from fedcir.rng import numpy_rng
from fedcir.types import InputError

PROJECTIONS = ("pca", "tsne", "umap")
"""Ways to draw representations in two dimensions."""
FEW = 20
"""What is still named and numbered one by one."""


def check_picture(path: Path, method: str) -> None:
    """Refuse what cannot be drawn before anything is measured."""
    if method not in PROJECTIONS:
        raise InputError(f"projection must be one of {', '.join(PROJECTIONS)}, got {method!r}")
    if method == "umap" and importlib.util.find_spec("umap") is None:
        raise InputError("projection umap needs a package: pip install umap-learn, or use pca or tsne")
    if path.suffix.lower() not in STAMPS:
        raise InputError(f"the name of a picture must end in {', '.join(STAMPS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")


def draw_diagnosis(found: Sequence[Diagnosis], path: Path, method: str = "pca") -> None:
    """Draw one, or two runs side by side."""
    check_picture(path, method)
    rows, columns = (2, 2) if not found[0].of_run else (2, 3) if len(found) == 1 else (3, 2)
    figure = Figure(figsize=(len(found) * columns * 4.6, rows * 4.2), layout="constrained")
    for part, each in zip(figure.subfigures(1, len(found), squeeze=False)[0], found, strict=True):
        if len(found) > 1:
            part.suptitle(plain(each.name), fontweight="bold")
        axes = iter(part.subplots(rows, columns).ravel())
        _distances(next(axes), each)
        if each.of_run and len(found) > 1:
            _accuracies(next(axes), each)
        _representations(next(axes), next(axes), each, method)
        if each.of_run and len(found) == 1:
            _accuracies(next(axes), each)
        if each.of_run:
            _table(next(axes), each.recall, each.classes, each.domains, "accuracy by class", ".0%", 1.0)
        held = np.stack([counts / counts.sum() for counts in each.labels.values()], axis=1)  # (classes, clients)
        top = max(float(held.max()), 2 / len(each.classes))
        _table(next(axes), held, each.classes, list(each.labels), "training labels of each client", ".0%", top)
    save(figure, path)


def _distances(axes: Any, found: Diagnosis) -> None:
    if not found.measured:
        _empty(axes, "no distances: its network gives no representations")
        return
    names = found.domains
    pairs = [[found.apart.between(a, b) for b in names] for a in names]
    matrix = np.array([[np.nan if pair is None else pair.value for pair in row] for row in pairs])
    _table(axes, matrix, names, names, f"proxy A-distance, {found.apart.mean_pair.value:.2f} on average", ".2f", 2.0)


def _empty(axes: Any, why: str = "") -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, textwrap.fill(why, 30), ha="center", va="center", transform=axes.transAxes)


def _accuracies(axes: Any, found: Diagnosis) -> None:
    each = [interval.scaled(100) for interval in found.accuracy.values()]
    values = np.array([interval.value for interval in each])
    spread = np.array([[i.value - i.low for i in each], [i.high - i.value for i in each]])
    axes.bar(range(len(each)), values, yerr=spread, color="C0", alpha=0.75, capsize=3, error_kw={"linewidth": 1})
    if len(each) <= FEW:
        for place, interval in enumerate(each):
            axes.text(place, 2, f"{interval.value:.0f}", ha="center", color="white", fontweight="bold")
    mean = 100 * found.mean_accuracy.value
    axes.axhline(mean, color="0.4", linewidth=1, linestyle="--")
    axes.set(ylim=(0, 105), title=f"test accuracy (%), {mean:.1f} on average")
    _names(axes.set_xticks, found.domains, rotation=45, ha="right", rotation_mode="anchor")


def _representations(by_client: Any, by_class: Any, found: Diagnosis, method: str) -> None:
    if not found.measured:
        _empty(by_client)
        _empty(by_class)
        return
    points, owners, labels = in_the_plane(found.sample, method)
    order = numpy_rng(0, "picture").permutation(len(points))  # or the last domain would hide the first
    for axes, kinds, titles, what in (
        (by_client, owners, found.domains, "domain"),
        (by_class, labels, found.classes, "class"),
    ):
        colours = np.array([f"C{k}" for k in range(10)]) if len(titles) <= 10 else _many(len(titles))
        axes.scatter(*points[order].T, s=8, alpha=0.65, linewidths=0, color=colours[kinds[order]])
        axes.set(title=f"representations by {what} ({method.upper()})", xticks=[], yticks=[])
        if len(titles) <= FEW:
            dots = [axes.scatter([], [], s=30, color=colours[kind]) for kind in range(len(titles))]
            place = {
                "loc": "upper center",
                "bbox_to_anchor": (0.5, -0.01),
                "ncols": min(4, len(titles)),
                "columnspacing": 0.8,
            }
            axes.legend(dots, [plain(t) for t in titles], frameon=False, fontsize=8, handletextpad=0.1, **place)


def _table(
    axes: Any,
    values: NDArray[Any],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    spec: str,
    most: float,
) -> None:
    """Numbers by colour, and written where there is room."""
    axes.imshow(values, vmin=0, vmax=most, cmap="viridis", aspect="auto")
    if values.shape[0] <= FEW and values.shape[1] <= 12:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                colour = "white" if value < 0.65 * most else "black"
                axes.text(j, i, f"{value:{spec}}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_title(title)
    _names(axes.set_xticks, columns, rotation=45, ha="right", rotation_mode="anchor")
    _names(axes.set_yticks, rows)


def _names(set_ticks: Any, names: Sequence[str], **how: Any) -> None:
    shown = range(len(names)) if len(names) <= 2 * FEW else [0, len(names) - 1]
    set_ticks(list(shown), [plain(names[place]) for place in shown], fontsize=9 if len(names) <= FEW else 6, **how)


def _many(count: int) -> NDArray[Any]:
    from matplotlib import colormaps

    return np.asarray(colormaps["turbo"](np.linspace(0.02, 0.98, count)))


def in_the_plane(
    views: Sequence[View], method: str = "pca"
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Representations as points (N, 2), and the numbers of each one's domain and class (N,)."""
    points = _flattened(np.concatenate([view.z for view in views]), method)
    owners = np.repeat(np.arange(len(views)), [len(view.z) for view in views])
    return points, owners, np.concatenate([view.labels for view in views])


def _flattened(z: NDArray[np.float32], method: str) -> NDArray[np.float64]:
    """Rows (N, Z) as points (N, 2), by PCA, or by t-SNE or UMAP where that is installed."""
    from sklearn.decomposition import PCA

    if method == "pca":
        made = PCA(2, random_state=0) if z.shape[1] > 1 else None
    elif method == "tsne":
        from sklearn.manifold import TSNE

        made = TSNE(2, random_state=0, perplexity=min(30.0, max(2.0, len(z) / 4)))
    else:
        from umap import UMAP

        made = UMAP(n_components=2, random_state=0)
    flat = np.asarray(z, dtype=np.float64)
    return flat.repeat(2, axis=1) if made is None else np.asarray(made.fit_transform(flat), dtype=np.float64)
