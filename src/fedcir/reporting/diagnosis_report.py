"""Diagnose a dataset, a run or two runs, and draw the result."""

import importlib.util
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
from fedcir.reporting.charts import Bars, Chart, Heatmap, Scatter, Series
from fedcir.reporting.drawing import OMITTED_METADATA, draw_charts
from fedcir.reporting.methods import mark_unseen
from fedcir.runs.reader import check_same_data, find_runs, load_run
from fedcir.types import OnProgress, ignore_progress

PROJECTIONS = ("pca", "tsne", "umap")
"""Methods to project representations to two dimensions."""


@dataclass(frozen=True)
class Diagnosed:
    """Diagnosis of a dataset or a run, or of two runs, and the picture that was written."""

    diagnoses: Sequence[Diagnosis]
    verdict: Sequence[str]
    """Summary in sentences."""
    picture: Path | None

    def to_rows(self) -> list[dict[str, Any]]:
        """Convert to JSON-like dictionaries, one for each dataset or run."""
        rows = [{**diagnosis.to_json(), "verdict": verdict(diagnosis)} for diagnosis in self.diagnoses]
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
        diagnoses = _diagnose_folders(paths, root, samples, on_distance, trust_code)
    else:
        diagnoses = [diagnose_data(request.resolve(), samples, on_distance)]
    if picture is not None:
        draw_diagnosis(diagnoses, picture, projection)
    return Diagnosed(diagnoses, verdict(*diagnoses), picture)


def _diagnose_folders(
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
    charts = [_build_charts(diagnosis, method) for diagnosis in diagnoses]
    if len(charts) == 1:
        draw_charts(charts[0], [path], columns=3 if diagnoses[0].is_run else 2)
        return
    for diagnosis, panels in zip(diagnoses, charts, strict=True):
        panels[:] = [panel and replace(panel, title=f"{diagnosis.name}: {panel.title}") for panel in panels]
    draw_charts([panel for pair in zip(*charts, strict=True) for panel in pair], [path], columns=2)


def _build_charts(diagnosis: Diagnosis, method: str) -> list[Chart | None]:
    """Build the charts of a diagnosis; None in place of those whose distances were not measured."""
    charts: list[Chart | None] = [None, None, None]
    if diagnosis.measured:
        distances = build_distance_matrix(diagnosis)
        title = f"{distances.title}, {diagnosis.divergences.mean_pair.value:.2f} on average"
        charts = [replace(distances, title=title), *build_scatters(diagnosis, method).values()]
    if diagnosis.is_run:
        series = Series.from_intervals("", [interval.scaled(100) for interval in diagnosis.accuracy.values()])
        title = f"test accuracy (%), {100 * diagnosis.mean_accuracy.value:.1f} on average"
        charts += [Bars(title, "", tuple(diagnosis.domains), (series,)), build_recall(diagnosis)]
    if not diagnosis.labels:
        return charts[:2]  # the third chart is by class
    shares = np.stack([100 * counts / counts.sum() for counts in diagnosis.labels.values()], axis=1)
    top = max(float(shares.max()), 200 / len(diagnosis.classes))
    cells = tuple(map(tuple, shares.tolist()))  # (classes, clients)
    title = "training labels of each client (%)"
    return [*charts, Heatmap(title, diagnosis.classes, tuple(diagnosis.labels), cells, 0.0, top)]


def mark_domains(diagnosis: Diagnosis) -> tuple[str, ...]:
    return tuple(mark_unseen(name, name in diagnosis.unseen) for name in diagnosis.domains)


def build_distance_matrix(diagnosis: Diagnosis) -> Heatmap:
    """Make the heatmap of distances between pairs of domains, and from each to the mixture."""
    divergences, names = diagnosis.divergences, mark_domains(diagnosis)
    rows = []
    for domain in diagnosis.domains:
        pairs = [divergences.between(domain, other) for other in diagnosis.domains]
        rows.append((*(None if pair is None else pair.value for pair in pairs), divergences.to_mixture[domain].value))
    return Heatmap("proxy A-distance", names, (*names, "mixture"), tuple(rows), 0.0, 2.0)


def build_recall(diagnosis: Diagnosis) -> Heatmap:
    """Make the heatmap of recall by class and domain."""
    cells = tuple(tuple(None if np.isnan(v) else 100 * float(v) for v in row) for row in diagnosis.recall)
    title = "test images classified correctly (%)"
    return Heatmap(title, diagnosis.classes, mark_domains(diagnosis), cells, 0.0, 100.0)


def build_scatters(diagnosis: Diagnosis, method: str = "pca") -> dict[str, Scatter]:
    """Make the scatter plots of representations, coloured by domain and by class."""
    points, owners, labels = project_representations(diagnosis.sample, method)
    scatters = {}
    for kind, groups, numbers in (("domain", mark_domains(diagnosis), owners), ("class", diagnosis.classes, labels)):
        dots = tuple((float(x), float(y), int(n)) for (x, y), n in zip(points, numbers, strict=True))
        scatters[kind] = Scatter(f"representations by {kind} ({method.upper()})", groups, dots)
    return scatters


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
