"""Pictures drawn with matplotlib: the charts of reports, partitions and contact sheets."""

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcir.data.columns import compare_columns
from fedcir.data.domains import Domains
from fedcir.files import write_file
from fedcir.reporting.charts import Bars, Chart, Heatmap, Lines, Scatter, Series
from fedcir.rng import numpy_rng

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_LABELS = 20
"""Most names and numbers that are written one by one."""
SHEET_COLUMNS, MAX_CLASSES = 20, 100
"""Columns of a contact sheet, and most classes on it."""


def draw_charts(panels: Sequence[Chart | None], paths: Sequence[Path], columns: int = 3) -> None:
    """Draw panels side by side, so many in a row, and save them in the format of each path; None leaves a gap."""
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(max(7.0, 4.6 * columns), 4.2 * rows), layout="constrained")
    for axes, panel in itertools.zip_longest(figure.subplots(rows, columns, squeeze=False).flat, panels):
        match panel:
            case Lines():
                _draw_lines(axes, panel)
            case Bars():
                _draw_bars(axes, panel)
            case Heatmap():
                _draw_heatmap(axes, panel)
            case Scatter():
                _draw_scatter(axes, panel)
            case _:
                axes.set_axis_off()
        if panel is not None:
            axes.set_title(textwrap.fill(escape_math(panel.title), 40))
    for path in paths:
        save_figure(figure, path)


OMITTED_METADATA = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""Metadata that is left out, so that equal results give equal files."""


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a figure atomically, in the format of the path's suffix."""
    buffer = io.BytesIO()
    kind = path.suffix.lower()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name that the font cannot write is drawn as boxes
        omitted = {OMITTED_METADATA[kind]: None} if kind in OMITTED_METADATA else None
        figure.savefig(buffer, format=kind[1:], dpi=150, metadata=omitted)
    write_file(path, buffer.getvalue())


def _draw_lines(axes: Any, panel: Lines) -> None:
    for number, series in enumerate(panel.series):
        style = "-" if panel.joined and len(series.x) > 1 else "none"
        few = len(series.x) <= 12
        marker = "*" if panel.diagonal and number else "o" if few or style == "none" else None
        size = 13 if marker == "*" else 5
        shift = 0.0 if panel.joined or panel.diagonal else 0.08 * (number - (len(panel.series) - 1) / 2)
        x = [value + shift for value in series.x]
        line = {"color": f"C{number % 10}", "linestyle": style, "linewidth": 1.6, "marker": marker, "markersize": size}
        axes.plot(x, series.y, label=escape_math(series.name), **line)
        if series.low is not None and series.high is not None:
            if style == "-":
                axes.fill_between(x, series.low, series.high, color=f"C{number % 10}", alpha=0.15, linewidth=0)
            else:
                axes.vlines(x, series.low, series.high, color=f"C{number % 10}", linewidth=1.2)
    if panel.ticks:
        long = max(map(len, panel.ticks)) * len(panel.ticks) > 40
        names = [escape_math(name) for name in panel.ticks]
        axes.set_xticks(range(len(names)), names, rotation=40 if long else 0, ha="right" if long else "center")
    if panel.diagonal:
        axes.plot([0, 2], [0, 2], color="0.5", linewidth=1, linestyle="--")
        axes.set(xlim=(0, 2.05), ylim=(0, 2.05), aspect="equal")
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.grid(alpha=0.3)
    if panel.series:
        axes.legend(frameon=False, fontsize="small")


def _draw_bars(axes: Any, panel: Bars) -> None:
    width = 0.8 / len(panel.series)
    for number, series in enumerate(panel.series):
        x = np.array(series.x) + width * (number - (len(panel.series) - 1) / 2)
        ends = None if series.low is None else np.abs(np.array([series.low, series.high]) - np.array(series.y))
        axes.bar(x, series.y, width, yerr=ends, alpha=0.75, capsize=3, error_kw={"linewidth": 1})
    axes.set_ylabel(panel.y)
    _set_labels(axes.set_xticks, panel.groups, rotation=45, ha="right", rotation_mode="anchor")


def _draw_heatmap(axes: Any, panel: Heatmap) -> None:
    """Draw numbers as colours, and as text if there is room."""
    values = np.array(panel.values, np.float64)  # None becomes nan
    axes.imshow(values, vmin=panel.low, vmax=panel.high, cmap="viridis", aspect="auto")
    if values.shape[0] <= MAX_LABELS and values.shape[1] <= 12:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                colour, digits = "white" if value < 0.65 * panel.high else "black", 2 if panel.high <= 2 else 0
                axes.text(j, i, f"{value:.{digits}f}", ha="center", va="center", color=colour, fontsize=9)
    _set_labels(axes.set_xticks, panel.columns, rotation=45, ha="right", rotation_mode="anchor")
    _set_labels(axes.set_yticks, panel.rows)


def _draw_scatter(axes: Any, panel: Scatter) -> None:
    from matplotlib import colormaps

    points = np.array(panel.points)  # (N, 3)
    x, y, numbers = points[numpy_rng(0, "picture").permutation(len(points))].T  # so that no group hides the others
    colours = np.array([f"C{number}" for number in range(10)])
    if len(panel.groups) > len(colours):
        colours = np.asarray(colormaps["turbo"](np.linspace(0.02, 0.98, len(panel.groups))))
    axes.scatter(x, y, s=8, alpha=0.65, linewidths=0, color=colours[numbers.astype(int)])
    axes.set(xticks=[], yticks=[])
    if len(panel.groups) <= MAX_LABELS:
        handles = [axes.scatter([], [], s=30, color=colours[number]) for number in range(len(panel.groups))]
        layout = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.01), "ncols": min(4, len(panel.groups))}
        style = {"frameon": False, "fontsize": 8, "handletextpad": 0.1, "columnspacing": 0.8}
        axes.legend(handles, list(map(escape_math, panel.groups)), **layout, **style)


def _set_labels(set_ticks: Any, names: Sequence[str], **options: Any) -> None:
    shown = list(range(len(names))) if len(names) <= 2 * MAX_LABELS else [0, len(names) - 1]
    size = 9 if len(names) <= MAX_LABELS else 6
    set_ticks(shown, [escape_math(names[position]) for position in shown], fontsize=size, **options)


def draw_contact_sheet(domains: Domains, path: Path, seed: int = 0) -> None:
    """Draw training images by domain (rows) and class (columns); classes beyond SHEET_COLUMNS continue below.

    At most MAX_CLASSES are shown, spread evenly over all.
    """
    from matplotlib.figure import Figure

    count = min(len(domains.classes), MAX_CLASSES)
    shown = np.arange(count) * len(domains.classes) // count
    bands = np.array_split(shown, math.ceil(count / SHEET_COLUMNS))
    repeats = max(1, SHEET_COLUMNS // count)  # images of each class
    height, width, _ = domains.image_shape
    across, down = 0.5 * len(bands[0]) * repeats, 0.5 * len(domains) * height / width + 0.6
    figure = Figure(figsize=(1.5 + across, min(100.0, down * len(bands))), layout="constrained")
    for axes, labels in zip(figure.subplots(len(bands), squeeze=False).flat, bands, strict=True):
        axes.imshow(arrange_images(domains, labels, repeats, seed), interpolation="nearest")
        ticks = (np.arange(len(labels)) + 0.5) * repeats * width
        axes.set_xticks(
            ticks,
            [escape_math(domains.classes[label]) for label in labels],
            rotation=45,
            ha="right",
            rotation_mode="anchor",
        )
        axes.set_yticks((np.arange(len(domains)) + 0.5) * height, list(map(escape_math, domains.names)))
    save_figure(figure, path)


def draw_samples(domains: Domains, path: Path, seed: int = 0) -> None:
    """Draw data that have no classes, or are no images.

    Images of each domain, with masks below if there are any; the distances of each column of tables; or the mean of
    arrays at each position.
    """
    if domains.has_images:
        _draw_image_rows(domains, path, seed)
    elif domains.columns:
        columns = sorted(compare_columns(domains), key=lambda column: -column.largest)[: 2 * MAX_LABELS]
        cells = tuple(tuple(column.distances.values()) for column in columns)
        title = "distance of a site from the others (0 to 1)"
        draw_charts([Heatmap(title, tuple(c.name for c in columns), domains.names, cells, 0.0, 1.0)], [path])
    else:
        series = []
        for domain in domains:
            means = np.mean([chunk.mean(0) for chunk in domain.train.chunks()], axis=0).ravel()
            series.append(Series(domain.name, tuple(map(float, range(len(means)))), tuple(means.tolist())))
        draw_charts([Lines("mean of the training examples", "position", "value", tuple(series))], [path])


def _draw_image_rows(domains: Domains, path: Path, seed: int) -> None:
    """Draw a row of training images for each domain, and one of their masks in colours below."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    height, width, _ = domains.image_shape
    rows, ticks = [], []
    for domain in domains:
        chosen = numpy_rng(seed, "contact_sheet", domain.name).permutation(len(domain.train))[:SHEET_COLUMNS]
        tiles = np.full((SHEET_COLUMNS, height, width, 3), 255, np.uint8)
        tiles[: len(chosen)] = domain.train.pixels(chosen)
        rows.append(tiles)
        ticks.append(escape_math(domain.name))
        if domains.task.uses_maps:
            masks = domain.train.select_targets(chosen)
            colours = colormaps["turbo"](np.linspace(0.05, 0.95, len(domains.task.names)))[:, :3]
            tiles = np.full_like(tiles, 255)
            tiles[: len(chosen)] = np.where(masks[..., None] > 0, 255 * colours[masks], 0)
            rows.append(tiles)
            ticks.append("masks")
    picture = np.concatenate([tiles.transpose(1, 0, 2, 3).reshape(height, -1, 3) for tiles in rows])
    figure = Figure(figsize=(12.0, min(100.0, 0.6 + 0.5 * len(rows) * height / width)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(picture, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks((np.arange(len(rows)) + 0.5) * height, ticks)
    save_figure(figure, path)


def arrange_images(domains: Domains, labels: NDArray[np.int64], repeats: int, seed: int) -> NDArray[np.uint8]:
    """Put some training images of each class and domain into one picture (rows, columns, 3); white where there is none.

    No image is used twice.
    """
    height, width, _ = domains.image_shape
    tiles = np.full((len(domains), height, len(labels) * repeats, width, 3), 255, np.uint8)
    for row, domain in enumerate(domains):
        shuffled = numpy_rng(seed, "contact_sheet", domain.name).permutation(len(domain.train))
        for number, label in enumerate(labels):
            images = domain.train.pixels(shuffled[domain.train.labels[shuffled] == label][:repeats])  # (N, H, W, C)
            tiles[row, :, number * repeats :][:, : len(images)] = images.transpose(1, 0, 2, 3)
    return tiles.reshape(len(domains) * height, -1, 3)


def draw_partition(clients: Sequence[tuple[str, str, NDArray[np.int64]]], classes: Sequence[str], path: Path) -> None:
    """Draw a dot for each client and class, as large as its number of images, coloured by domain.

    `clients` holds the name, the domain and the number of images by class of each client.
    """
    from matplotlib.figure import Figure

    counts = np.stack([count for _, _, count in clients])  # (clients, classes)
    width, height = min(16.0, 2.5 + 0.28 * len(clients)), min(12.0, 1.8 + 0.28 * len(classes))
    figure = Figure(figsize=(max(width, 5.0), height), layout="constrained")
    axes = figure.subplots()
    largest = max(1, int(counts.max()))
    domains = list(dict.fromkeys(domain for _, domain, _ in clients))
    handles = []
    for number, domain in enumerate(domains):
        members = np.array([client for client, (_, other, _) in enumerate(clients) if other == domain])
        x, y = (grid.ravel() for grid in np.meshgrid(members, np.arange(len(classes)), indexing="ij"))
        axes.scatter(x, y, s=180 * counts[members].ravel() / largest, color=f"C{number}", linewidths=0)
        handles.append(axes.scatter([], [], s=50, color=f"C{number}"))  # dots of one size for the legend
    shows_all = len(clients) <= 60
    ticks = list(range(len(clients))) if shows_all else [0, len(clients) - 1]
    axes.set_xticks(ticks, [escape_math(clients[tick][0]) for tick in ticks], rotation=90 if shows_all else 0)
    labels = [escape_math(name) for name in classes] if len(classes) <= 60 else []
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="client", ylabel=f"class (largest dot: {largest} images)", xlim=(-0.7, len(clients) - 0.3))
    axes.set_ylim(len(classes) - 0.4, -0.6)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    names = [escape_math(name) for name in domains]
    figure.legend(handles, names, loc="outside upper center", ncols=6, frameon=False)
    save_figure(figure, path)


def escape_math(name: str) -> str:
    """Escape a name so that matplotlib does not read it as a formula."""
    return name.replace("$", r"\$")
