"""`fedcir data`: which datasets there are, what they hold, and what each client would get."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcir.cli import options as cli
from fedcir.cli.application import App, print_json, print_note, print_table
from fedcir.cli.options import argument, flag, option, output, take_options
from fedcir.config import OPTIONS, Config, ConfigRequest
from fedcir.errors import InputError
from fedcir.files import check_output_file
from fedcir.text import format_bytes, join_names

if TYPE_CHECKING:
    from fedcir.data.cache import CacheEntry
    from fedcir.data.columns import ColumnComparison
    from fedcir.data.domains import Domains
    from fedcir.data.inspection import Inspection

data = App("List, check, show and prepare datasets.")

NAME = argument(OPTIONS["dataset"].help)

PLOTS = (".png", ".jpg", ".jpeg", ".webp", ".pdf", ".svg")
"""Endings of a plot's name."""
FEW, MANY = 12, 40
"""The most lines of a list, and the most class columns of a table, that are printed; and the most columns of data."""


@data.command("list")
def list_(json: bool = cli.JSON) -> None:
    """List the datasets. Shows what each one is, its size and licence, and where to get it."""
    from fedcir.data.opening import get_source, list_datasets

    texts = {}
    for name in list_datasets():
        source = get_source(name)
        fetch = "`fedcir data prepare` fetches it; or get it from " if source.downloads else ""
        about = {"about": source.about, "size": source.size, "licence": source.licence}
        texts[name] = {**about, "where": f"{fetch}{source.where}"}
    if json:
        print_json(texts)
    else:
        titles = ["dataset", "what it is", "size", "licence", "where to get it"]
        print_table([titles, *([name, *columns.values()] for name, columns in texts.items())])


@data.command()
@take_options("data_root", "image_size")
def check(
    name: str = NAME,
    settings: Any = None,
    quiet: bool = cli.NO_PROGRESS,
    json: bool = cli.JSON,
    set: list[str] | None = cli.SET,
) -> None:
    """Check all data and say whether training can start. Lists counts, sizes, columns, copies and damaged files."""
    from dataclasses import asdict, fields

    from fedcir.cli.progress import Meter
    from fedcir.data.inspection import inspect_dataset

    config = _resolve_config(name, settings, set)
    with Meter("checking images", quiet) as meter:
        inspection = inspect_dataset(config.data, meter.show, config.task.name)
    if json:
        sizes = [[width, height, count] for (width, height), count in inspection.sizes.most_common()]
        values = {field.name: getattr(inspection, field.name) for field in fields(inspection)}
        values |= {"sizes": sizes, "missing": inspection.missing, "parts": sorted(inspection.parts)}
        values |= {"columns": [asdict(column) for column in inspection.columns]}
        print_json({**values, "unused": [file._asdict() for file in inspection.unused]})
    else:
        _print_findings(inspection)
    if inspection.obstacle:
        raise InputError(f"{name} cannot be trained on: {inspection.obstacle}")
    if not json:
        copies = inspection.copies_left_out
        left_out = f"; {copies} cop{'ies' if copies > 1 else 'y'} will be left out" if copies else ""
        print(f"verdict: ready for training{left_out}")


@data.command()
@take_options("data_root", "image_size")
def show(
    name: str = NAME,
    settings: Any = None,
    out: Path | None = output("Where to write the picture. [default: NAME.png]"),
    quiet: bool = cli.NO_PROGRESS,
    set: list[str] | None = cli.SET,
) -> None:
    """Draw a contact sheet: domains as rows, classes as columns. Of tables, draws how far columns differ."""
    from fedcir.data.columns import compare_columns
    from fedcir.data.inspection import summarise_targets
    from fedcir.reporting.drawing import MAX_CLASSES, draw_contact_sheet, draw_samples

    config = _resolve_config(name, settings, set)
    path = out or Path(f"{name}.png")
    check_output_file(path, PLOTS)
    domains = _open_domains(config, quiet)
    by_class = domains.has_images and domains.task.has_classes
    draw = draw_contact_sheet if by_class else draw_samples
    draw(domains, path)
    aside = any(domain.validation is not None for domain in domains)
    rows = [["domain", "train", *(["validation"] if aside else []), "test"]]
    for domain in domains:
        validation = [str(len(domain.validation or ()))] if aside else []
        rows.append([domain.name, str(len(domain.train)), *validation, str(len(domain.test))])
    classes = len(domains.classes)
    what = f"{classes} classes" if domains.task.has_classes else domains.task.name
    if domains.has_images:
        height, width, channels = domains.image_shape
        print_table(rows, f"{what}, {height}x{width} pixels{', grey' if channels == 1 else ''}")
    else:
        shape = f"{len(domains.columns)} columns" if domains.columns else f"floats of shape {list(domains.input_shape)}"
        print_table(rows, f"{what}, {shape}")
    _print_targets({} if domains.task.has_classes else summarise_targets(domains), domains.task.name)
    _print_columns(compare_columns(domains))
    shown = f", which shows {MAX_CLASSES} of {classes} classes" if by_class and classes > MAX_CLASSES else ""
    print(f"\nwrote the {'contact sheet' if domains.has_images else 'picture'} {path}{shown}")


@data.command()
@take_options("data_root", "image_size")
def prepare(
    name: str = NAME,
    settings: Any = None,
    sha512: list[str] | None = option(
        "A SHA-512 that you trust, for a file that comes without one; may be repeated.",
        None,
        "--sha512",
        metavar="HASH",
    ),
    quiet: bool = cli.NO_PROGRESS,
    set: list[str] | None = cli.SET,
) -> None:
    """Fetch and decode a dataset before the first run. `fedcir data list` shows which ones can be fetched."""
    from fedcir.data.cache import cache_entries
    from fedcir.data.opening import get_source, has_dataset

    config = _resolve_config(name, settings, set)
    if has_dataset(name) and get_source(name).downloads and settings["data_root"] is not None:
        _fetch_files(name, settings["data_root"], sha512 or [], quiet)
    domains = _open_domains(config, quiet)
    entry = next((entry for entry in cache_entries() if entry.path.name == f"prepared-{domains.content}"), None)
    if entry is None:
        print(f"{name} needs no preparation")
    else:
        images = f"{entry.images:,} {_describe_colour(entry)}images of {entry.size}x{entry.size} pixels"
        print(f"prepared {images}, {format_bytes(entry.bytes)}, in {entry.path}")


@data.command()
@take_options("data_root", "image_size", "clients", "beta", "hold_out", "seed")
def partition(
    name: str = NAME,
    settings: Any = None,
    plot: bool = flag("--plot", "Draw which client holds which classes."),
    out: Path | None = output("Where to write the picture. [default: NAME-clients.png]"),
    quiet: bool = cli.NO_PROGRESS,
    json: bool = cli.JSON,
    set: list[str] | None = cli.SET,
) -> None:
    """Show which images or rows each client would get. With --json, prints the manifest of such a run."""
    from fedcir.cli.progress import Meter
    from fedcir.data.federation import partition_dataset
    from fedcir.data.manifest import build_manifest, to_json
    from fedcir.reporting.drawing import draw_partition

    path = out or Path(f"{name}-clients.png")
    if plot:
        check_output_file(path, PLOTS)
    elif out is not None:
        raise InputError(f"--out {out} names the picture that --plot draws: add --plot")
    config = _resolve_config(name, settings, set)
    with Meter("decoding images", quiet) as meter:
        domains, shares = partition_dataset(config, meter.show)
    for note in domains.notes:
        print_note(note)
    manifest = build_manifest(domains, shares)
    labels = {domain.name: domain.train.labels for domain in domains}
    strata = domains.classes if domains.task.has_classes else _name_strata(labels.values())
    counted = [
        (share.name or str(number), share.domain, share.counts(labels, len(strata)))
        for number, share in enumerate(shares)
    ]
    if json:
        print(to_json(manifest))
    else:
        shown = list(domains.classes) if len(domains.classes) <= FEW else []
        rows = [["client", "domain", f"{domains.noun}s", *shown]]
        for client, domain, counts in counted:
            rows.append([client, domain, str(counts.sum()), *(str(count) for count in counts[: len(shown)])])
        print_table(rows, f"{len(counted)} client{'s' * (len(counted) > 1)}, manifest {manifest['hash']}")
    if plot:
        draw_partition(counted, strata, path)
        print(f"wrote the plot {path}", file=sys.stderr if json else sys.stdout)


@data.command()
def cache(clear: bool = flag("--clear", "Delete all prepared datasets.")) -> None:
    """Show the prepared datasets and how much disk space they take."""
    from fedcir.data.cache import cache_entries, cache_folder, clear_cache

    if clear:
        print(f"freed {format_bytes(clear_cache())} in {cache_folder()}")
        return
    entries = cache_entries()
    if entries:
        rows = [["dataset", "from", "images", "pixels", "on disk"]]
        for entry in entries:
            pixels = f"{entry.size}x{entry.size} {_describe_colour(entry)}".strip()
            rows.append([entry.dataset, entry.root, f"{entry.images:,}", pixels, format_bytes(entry.bytes)])
        print_table(rows)
    print(f"{format_bytes(sum(entry.bytes for entry in entries))} in {cache_folder()}")


def _name_strata(labels: Iterable[Any]) -> tuple[str, ...]:
    """Number the strata by which samples of a task without classes are divided."""
    return tuple(f"stratum {number}" for number in range(1 + max(int(part.max()) for part in labels)))


def _resolve_config(name: str, settings: dict[str, Any], set: list[str] | None) -> Config:
    return ConfigRequest(options={**settings, "dataset": name}, assignments=set or ()).resolve()


def _open_domains(config: Config, quiet: bool) -> "Domains":
    from fedcir.cli.progress import Meter
    from fedcir.data.opening import open_dataset

    with Meter("decoding images", quiet) as meter:
        domains = open_dataset(config.data, config.run.seed, meter.show, task=config.task.name)
    for note in domains.notes:
        print_note(note)
    return domains


def _fetch_files(name: str, root: Path, trusted: Sequence[str], quiet: bool) -> None:
    """Fetch the files that are missing, and name those without a published hash."""
    from fedcir.cli.progress import Meter
    from fedcir.data.opening import get_source
    from fedcir.data.sources.download import DownloadError, download_file

    if wrong := next((text for text in trusted if not re.fullmatch("[0-9a-fA-F]{128}", text)), None):
        raise InputError(f"--sha512 takes the 128 digits that sha512sum prints, got {wrong!r}")
    source, hashes = get_source(name), [text.lower() for text in trusted]
    for download in source.downloads:
        with Meter("fetching", quiet, " bytes") as meter:

            def on_bytes(file: str, done: int, total: int | None, meter: Meter = meter) -> None:
                meter.show(done, total, f"fetching {file}")

            try:
                unknown = download_file(download, root, on_bytes, hashes)
            except DownloadError as error:
                raise DownloadError(f"{error}. Try again, or get the files yourself: {source.where}") from error
        if unknown is not None:
            print_note(f"{download.url} is not verified, as nobody published a hash of it. Its SHA-512 is {unknown}")


def _print_findings(inspection: "Inspection") -> None:
    shown = inspection.classes if len(inspection.classes) <= FEW else []
    rows = [["domain", f"{inspection.noun}s", *(["published"] if inspection.published else []), *shown]]
    for domain in [*inspection.counts, *(d for d in inspection.published if d not in inspection.counts)]:
        counts = inspection.counts.get(domain, Counter())
        expected = [str(inspection.published.get(domain, ""))] if inspection.published else []
        rows.append([domain, str(sum(counts.values())), *expected, *(str(counts.get(label, 0)) for label in shown)])
    print_table(rows, inspection.task if inspection.targets else f"{len(inspection.classes)} classes")
    if inspection.sizes:
        sizes = [f"{width}x{height} ({count:,})" for (width, height), count in inspection.sizes.most_common(3)]
        more = f" and {len(inspection.sizes) - 3} other sizes" if len(inspection.sizes) > 3 else ""
        print(f"sizes: {', '.join(sizes)}{more}")
    _print_targets(inspection.targets, inspection.task)
    if inspection.columns:
        _print_columns(inspection.columns)
    elif inspection.shape:
        print(f"floats of the shape {list(inspection.shape)}")
    for domain, (count, published) in inspection.off.items():
        print(f"warning: {domain} has {count} images, but the published dataset has {published}")
    for domain, classes in inspection.missing.items():
        print(f"warning: {domain} has no {inspection.noun} of {join_names(classes, FEW)}")
    for note in inspection.notes:
        print(f"note: {note}")
    _print_lines("warning", inspection.spelling)
    _print_lines(f"warning: copies of one {inspection.noun}", [" = ".join(group) for group in inspection.duplicates])
    disputed = [" = ".join(pair) for pair in inspection.disputed]
    _print_lines(f"warning: one {inspection.noun} in two classes, so one label is wrong", disputed)
    _print_lines("warning: not used", [str(file) for file in inspection.unused if file.advice])
    _print_lines("note: not used", [str(file) for file in inspection.unused if not file.advice])
    _print_lines("error: not a readable image", inspection.unreadable)


def _print_targets(targets: Mapping[str, Mapping[str, float]], task: str) -> None:
    """Print how the targets of each domain are distributed."""
    if not targets:
        return
    names = list(next(iter(targets.values())))
    rows = [["domain", *names[:FEW]]]
    rows += [[domain, *(f"{values[name]:.4g}" for name in names[:FEW])] for domain, values in targets.items()]
    more = f"; {FEW} of {len(names)}" if len(names) > FEW else ""
    print_table(rows, f"targets ({task}{more})")


def _print_columns(columns: "Sequence[ColumnComparison]") -> None:
    """Print what each site holds in each column, those that differ most first."""
    if not columns:
        return
    sites = list(columns[0].cells)[:FEW]
    rows = [["column", *sites, "largest distance"]]
    ranked = sorted(columns, key=lambda column: -column.largest)
    for column in ranked[:MANY]:
        missing = {site: share for site, share in column.missing.items() if share}
        cells = [
            f"{column.cells[site]}{f' ({max(0.01, missing[site]):.0%} missing)' if site in missing else ''}"
            for site in sites
        ]
        rows.append([column.name, *cells, f"{column.largest:.2f}" if len(column.cells) > 1 else ""])
    more = f"{MANY} of {len(columns)} columns" if len(columns) > MANY else "columns"
    print_table(rows, f"{more}: mean ± SD, or the most frequent category; distance of a site from the others, 0 to 1")


def _print_lines(title: str, lines: Sequence[str]) -> None:
    for line in lines[:FEW]:
        print(f"{title}: {line}")
    if len(lines) > FEW:
        print(f"{title}: {len(lines) - FEW} more (--json lists all)")


def _describe_colour(entry: "CacheEntry") -> str:
    return "grey " if entry.channels == 1 else ""
