"""Diagnose a dataset, a run or two runs, and draw the result."""

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.diagnosis import Diagnosis, diagnose_data, diagnose_run
from fedcir.analysis.findings import verdict
from fedcir.config import ConfigRequest
from fedcir.errors import InputError
from fedcir.files import check_output_file
from fedcir.inference.evaluation import DomainPredictions
from fedcir.reporting.charts import OMITTED_METADATA, escape_math, save_figure
from fedcir.rng import numpy_rng
from fedcir.runs.reader import check_same_data, find_runs, load_run
from fedcir.types import OnProgress, ignore_progress

PROJECTIONS = ("pca", "tsne", "umap")
"""Methods to project representations to two dimensions."""
MAX_LABELS = 20
"""Most names and numbers that are written one by one."""


@dataclass(frozen=True)
class Diagnosed:
    """Diagnosis of a dataset or a run, or of two runs, and the picture that was written."""

    found: Sequence[Diagnosis]
    verdict: Sequence[str]
    """Summary in sentences."""
    picture: Path | None

    def to_rows(self) -> list[dict[str, Any]]:
        """Convert to JSON-like dictionaries, one for each dataset or run."""
        rows = [{**diagnosis.to_json(), "verdict": verdict(diagnosis)} for diagnosis in self.found]
        rows[0]["verdict"] = self.verdict
        return rows


def diagnose(
    runs: str | Path | Sequence[str | Path] = (),
    *,
    data_root: str | Path | None = None,
    samples: int = 1000,
    projection: str = "pca",
    out: str | Path | None = "diagnosis.png",
    set: Sequence[str] | Mapping[str, Any] = (),
    trust_code: bool = False,
    on_work: OnProgress = ignore_progress,
    **options: Any,
) -> Diagnosed:
    """Measure how far apart clients are: in a dataset before training, in a finished run, or in two runs.

    Without `runs`, `options` choose the data, such as dataset="pacs", clients=20 or seed=1. Distances use at most
    `samples` images of each domain: test images of a run, training images of a dataset. The picture is written to
    `out`, unless that is None. `trust_code` allows code that is stored with a run to be executed.
    """
    paths = [Path(path) for path in ([runs] if isinstance(runs, str | Path) else runs)]
    options_set = [name for name, value in {**options, "set": set or None}.items() if value is not None]
    if paths and options_set:
        raise InputError(f"runs bring their own data and settings: leave {' and '.join(options_set)} out")
    request = ConfigRequest.from_options({**options, "data_root": data_root}, set=set)
    if samples < 8:
        raise InputError(f"samples must be at least 8, got {samples}")
    picture = None if out is None else Path(out)
    if picture is not None:
        check_picture(picture, projection)
    on_distance = partial(on_work, what="measuring distances")
    if paths:
        root = None if data_root is None else str(data_root)
        diagnoses = _diagnose_runs(paths, root, samples, on_distance, trust_code)
    else:
        diagnoses = [diagnose_data(request.resolve(), samples, on_distance)]
    if picture is not None:
        draw_diagnosis(diagnoses, picture, projection)
    return Diagnosed(diagnoses, verdict(*diagnoses), picture)


def _diagnose_runs(
    paths: Sequence[Path], data_root: str | None, samples: int, on_distance: Any, trust_code: bool
) -> list[Diagnosis]:
    folders = find_runs(paths)
    if len(folders) > 2:
        raise InputError(f"diagnose takes one run or two, got {len(folders)}: name the ones to look at")
    loaded = [load_run(folder, trust_code=trust_code) for folder in folders]
    check_same_data(loaded, clients=True)
    diagnoses = [diagnose_run(run, data_root, samples, on_distance) for run in loaded]
    if len({diagnosis.name for diagnosis in diagnoses}) == len(diagnoses):
        return diagnoses
    return [replace(diagnosis, name=str(folder)) for diagnosis, folder in zip(diagnoses, folders, strict=True)]


def check_picture(path: Path, method: str) -> None:
    """Raise InputError, before any work, if the picture cannot be drawn or written."""
    if method not in PROJECTIONS:
        raise InputError(f"projection must be one of {', '.join(PROJECTIONS)}, got {method!r}")
    if method == "umap" and importlib.util.find_spec("umap") is None:
        raise InputError("projection umap needs a package: pip install umap-learn, or use pca or tsne")
    check_output_file(path, OMITTED_METADATA)


def draw_diagnosis(diagnoses: Sequence[Diagnosis], path: Path, method: str = "pca") -> None:
    """Draw a diagnosis, or those of two runs side by side."""
    from matplotlib.figure import Figure

    count, is_run = len(diagnoses), diagnoses[0].is_run
    rows, columns = (2, 2) if not is_run else (2, 3) if count == 1 else (3, 2)
    figure = Figure(figsize=(count * columns * 4.6, rows * 4.2), layout="constrained")
    for part, diagnosis in zip(figure.subfigures(1, count, squeeze=False)[0], diagnoses, strict=True):
        if count > 1:
            part.suptitle(escape_math(diagnosis.name), fontweight="bold")
        axes = iter(part.subplots(rows, columns).ravel())
        _draw_distances(next(axes), diagnosis)
        if is_run and count > 1:
            _draw_accuracies(next(axes), diagnosis)
        _draw_representations(next(axes), next(axes), diagnosis, method)
        if is_run and count == 1:
            _draw_accuracies(next(axes), diagnosis)
        classes = diagnosis.classes
        if is_run:
            _draw_matrix(next(axes), diagnosis.recall, classes, diagnosis.domains, "accuracy by class", ".0%", 1.0)
        shares = np.stack([counts / counts.sum() for counts in diagnosis.labels.values()], axis=1)  # (classes, clients)
        top = max(float(shares.max()), 2 / len(classes))
        title = "training labels of each client"
        _draw_matrix(next(axes), shares, classes, list(diagnosis.labels), title, ".0%", top)
    save_figure(figure, path)


def _draw_distances(axes: Any, diagnosis: Diagnosis) -> None:
    if not diagnosis.measured:
        axes.set_axis_off()
        reason = textwrap.fill("no distances: its network gives no representations", 30)
        axes.text(0.5, 0.5, reason, ha="center", va="center", transform=axes.transAxes)
        return
    names = diagnosis.domains
    pairs = [[diagnosis.divergences.between(a, b) for b in names] for a in names]
    matrix = np.array([[np.nan if pair is None else pair.value for pair in row] for row in pairs])
    title = f"proxy A-distance, {diagnosis.divergences.mean_pair.value:.2f} on average"
    _draw_matrix(axes, matrix, names, names, title, ".2f", 2.0)


def _draw_accuracies(axes: Any, diagnosis: Diagnosis) -> None:
    intervals = [interval.scaled(100) for interval in diagnosis.accuracy.values()]
    values = np.array([interval.value for interval in intervals])
    spread = np.array([[i.value - i.low for i in intervals], [i.high - i.value for i in intervals]])
    axes.bar(range(len(intervals)), values, yerr=spread, color="C0", alpha=0.75, capsize=3, error_kw={"linewidth": 1})
    if len(intervals) <= MAX_LABELS:
        for position, interval in enumerate(intervals):
            axes.text(position, 2, f"{interval.value:.0f}", ha="center", color="white", fontweight="bold")
    mean = 100 * diagnosis.mean_accuracy.value
    axes.axhline(mean, color="0.4", linewidth=1, linestyle="--")
    axes.set(ylim=(0, 105), title=f"test accuracy (%), {mean:.1f} on average")
    _set_labels(axes.set_xticks, diagnosis.domains, rotation=45, ha="right", rotation_mode="anchor")


def _draw_representations(by_domain: Any, by_class: Any, diagnosis: Diagnosis, method: str) -> None:
    from matplotlib import colormaps

    if not diagnosis.measured:
        by_domain.set_axis_off()
        by_class.set_axis_off()
        return
    points, owners, labels = project_representations(diagnosis.sample, method)
    order = numpy_rng(0, "picture").permutation(len(points))  # so that the last domain does not hide the first
    for axes, kinds, titles, colouring in (
        (by_domain, owners, diagnosis.domains, "domain"),
        (by_class, labels, diagnosis.classes, "class"),
    ):
        colours = np.array([f"C{k}" for k in range(10)])
        if len(titles) > len(colours):
            colours = np.asarray(colormaps["turbo"](np.linspace(0.02, 0.98, len(titles))))
        axes.scatter(*points[order].T, s=8, alpha=0.65, linewidths=0, color=colours[kinds[order]])
        axes.set(title=f"representations by {colouring} ({method.upper()})", xticks=[], yticks=[])
        if len(titles) <= MAX_LABELS:
            handles = [axes.scatter([], [], s=30, color=colours[kind]) for kind in range(len(titles))]
            layout = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.01), "ncols": min(4, len(titles))}
            style = {"frameon": False, "fontsize": 8, "handletextpad": 0.1, "columnspacing": 0.8}
            axes.legend(handles, [escape_math(title) for title in titles], **layout, **style)


def _draw_matrix(
    axes: Any, values: NDArray[Any], rows: Sequence[str], columns: Sequence[str], title: str, spec: str, most: float
) -> None:
    """Draw numbers as colours, and as text if there is room."""
    axes.imshow(values, vmin=0, vmax=most, cmap="viridis", aspect="auto")
    if values.shape[0] <= MAX_LABELS and values.shape[1] <= 12:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                colour = "white" if value < 0.65 * most else "black"
                axes.text(j, i, f"{value:{spec}}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_title(title)
    _set_labels(axes.set_xticks, columns, rotation=45, ha="right", rotation_mode="anchor")
    _set_labels(axes.set_yticks, rows)


def _set_labels(set_ticks: Any, names: Sequence[str], **options: Any) -> None:
    shown = list(range(len(names))) if len(names) <= 2 * MAX_LABELS else [0, len(names) - 1]
    size = 9 if len(names) <= MAX_LABELS else 6
    set_ticks(shown, [escape_math(names[position]) for position in shown], fontsize=size, **options)


def project_representations(
    predictions: Sequence[DomainPredictions], method: str = "pca"
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Project representations to points (N, 2); also return the numbers of their domains and classes (N,)."""
    z = np.concatenate([domain.z for domain in predictions if domain.z is not None]).astype(np.float64)
    domains = np.repeat(np.arange(len(predictions)), [len(domain) for domain in predictions])
    labels = np.concatenate([domain.labels for domain in predictions])
    projection: Any
    if method == "tsne":
        from sklearn.manifold import TSNE

        projection = TSNE(2, random_state=0, perplexity=min(30.0, max(2.0, len(z) / 4)))
    elif method == "umap":
        from umap import UMAP

        projection = UMAP(n_components=2, random_state=0)
    elif z.shape[1] == 1:
        return z.repeat(2, axis=1), domains, labels
    else:
        from sklearn.decomposition import PCA

        projection = PCA(2, random_state=0)
    return np.asarray(projection.fit_transform(z), dtype=np.float64), domains, labels
