"""Measure whether federating is worth it for the sites of a finished run, and write a page about the result."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.fedcirone import FedCiROne
from fedcir.analysis.contribution import (
    COLUMNS,
    CoalitionHits,
    Worth,
    compare_sites,
    measure_coalitions,
    read_coalitions,
)
from fedcir.analysis.courier_heads import collect_head_replies
from fedcir.data.federation import build_federation
from fedcir.errors import InputError
from fedcir.files import check_output_folder, write_file
from fedcir.machine import use_threads
from fedcir.reporting.charts import Bars, Lines, Series
from fedcir.reporting.page import Figure, Rows, Section, Sentences, Table, render_page, to_sentence
from fedcir.runs.evaluation_data import exclude_seen_images, open_run_data
from fedcir.runs.reader import Run, RunSource, restore_model, to_run
from fedcir.runtime.resume import use_saved_code
from fedcir.runtime.stored_sums import HEADS, HITS
from fedcir.server.coalitions import MAX_PLAYERS
from fedcir.types import OnProgress, ignore_progress

HEADINGS = ("alone", "others averaged", "others together", "all together")
"""Headings of COLUMNS."""
WHISKERS = "Whiskers show 95 % intervals."
READING = (
    "Alone: the head from the site's own sums. Others averaged: the mean of the heads that the other sites have alone. "
    "Others together: the head from the sums of the others, as if this site had never joined. All together: the model "
    "of the run.",
    "All are tested on the site's own test images. Penalties are chosen on validation images, or by generalised "
    "cross-validation of training images; test images choose nothing.",
    "In every column, features are standardised by the statistics of the run's model. These hold no labels.",
    "Intervals (95 %) cover the test images. The closed form has no seed; the split into training and test images has "
    "that of the run, and another split would differ too.",
    "A gain is paired by image. Each interval stands for itself: of twenty sites, one may seem to gain or to lose by "
    "chance.",
)


def worth(
    run: RunSource,
    *,
    replies: Collection[str | Path] = (),
    data_root: str | Path | None = None,
    out: str | Path | None = None,
    trust_code: bool = False,
    on_work: OnProgress = ignore_progress,
) -> Worth:
    """Measure for each site of a finished run of fedcirone what it gains from federating, and what it contributes.

    A site is a client that trains. `replies` are the files in which the sites of a run that was merged from files say
    how the heads of all coalitions classify their test images. With `out`, that folder gets worth.html and worth.json.
    `trust_code` allows code that is stored with the run to be executed.
    """
    folder = None if out is None else Path(out)
    if folder is not None:
        check_output_folder(folder)
    run = to_run(run, trust_code)
    method = Path(run.config.algorithm.name).stem
    run = replace(run, config=use_saved_code(run.config, run.path, run.trust_code))
    algorithm = make_algorithm(run.config.algorithm)
    if not isinstance(algorithm, FedCiROne):
        raise InputError(
            f"worth adds the sums of fedcirone, and {run.path} is a run of {method}: make one with "
            "`fedcir run --algorithm fedcirone --model efficientnet-lite0 --set model.freeze=true`"
        )
    if run.config.privacy.noise:
        raise InputError(f"the sums of {run.path} have noise: make a run without privacy.noise to measure its worth")
    if replies:
        collect_head_replies(run, [Path(path) for path in replies])
    results, notes = _find_hits(run, algorithm, data_root, on_work)
    sites, means = compare_sites(results)
    if results.directions < results.features:
        notes.append(
            f"heads of 2 to {len(sites) - 2} sites, which only contributions need, use the {results.directions:,} "
            f"directions of largest variance of the {results.features:,} features"
        )
    if not results.has_all:
        notes.append(f"with more than {MAX_PLAYERS} sites, a contribution is what the mean loses without the site")
    name = run.path.resolve().name
    result = Worth(name, run.config.data.name, tuple(sites), means, results.has_all, tuple(notes))
    if folder is None:
        return result
    folder.mkdir(parents=True, exist_ok=True)
    result = replace(result, page=folder / "worth.html", numbers=folder / "worth.json")
    write_file(folder / "worth.html", _render(result))
    write_file(folder / "worth.json", json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n")
    return result


def _find_hits(
    run: Run, algorithm: FedCiROne, data_root: str | Path | None, on_work: OnProgress
) -> tuple[CoalitionHits, list[str]]:
    """Read what clients replied about the heads of coalitions, or test them on the run's data; with notes."""
    if data_root is None and (run.path / HITS).exists():
        return read_coalitions(run), []
    if data_root is None and (run.path / HEADS).exists():
        fix = (
            "give the files that `fedcir worth RUN --site-images DIR --out SITE.hits` writes at each site, or data_root"
        )
        raise InputError(f"the sites of {run.path} have not tested its heads yet: {fix}")
    if data_root is None and "key" in run.manifest:
        fix = "run it with --set server.store_sums=true, or give data_root, a folder with the images of all of them"
        raise InputError(f"{run.path} ran across sites, which keep their images: {fix}")
    config, domains, partitions = open_run_data(run, None if data_root is None else str(data_root))
    domains, overlap = exclude_seen_images(run, domains)
    federation = build_federation(config, domains, partitions)
    with use_threads(config.run.threads):
        restored = restore_model(run, config, algorithm, federation.builder)
        return measure_coalitions(restored, algorithm, federation, on_work), list(overlap.notes)


def build_worth_rows(worth: Worth) -> Rows:
    """Build a table with a row for each site, in per cent and points, and a row of the means over domains."""
    contribution = "contribution" if worth.is_shapley else "lost without"
    rows = [["site", "trained", "tested", *HEADINGS, "gain (95 %)", f"{contribution} (95 %)"]]
    for site in worth.sites:
        accuracies = [f"{100 * getattr(site, name).value:.1f}" for name in COLUMNS]
        changes = [f"{interval.scaled(100):+.1f}" for interval in (site.gain, site.contribution)]
        rows.append([site.site, f"{site.images:,}", f"{site.tested:,}", *accuracies, *changes])
    means = [f"{100 * worth.means[name].value:.1f}" for name in COLUMNS]
    return [*rows, ["mean over domains", "", "", *means, f"{worth.means['gain'].scaled(100):+.1f}", ""]]


def describe_worth(worth: Worth) -> list[str]:
    """Give the verdict for the federation and for each site in sentences."""
    alone, together, gain = (worth.means[name].scaled(100) for name in ("alone", "together", "gain"))
    whole = f"Mean over domains: {alone.value:.1f} per cent alone, {together.value:.1f} together, {gain:+.1f} points."
    return [whole, *(f"{site.site}: {site.verdict}." for site in worth.sites)]


def _render(worth: Worth) -> str:
    names = tuple(site.site for site in worth.sites)
    accuracies = tuple(
        Series.from_intervals(heading, [getattr(site, name).scaled(100) for site in worth.sites])
        for name, heading in zip(COLUMNS, HEADINGS, strict=True)
    )
    gains, contributions = (
        Lines("", "site", "points", (Series.from_intervals(name, intervals),), names, joined=False)
        for name, intervals in (
            ("gain", [site.gain.scaled(100) for site in worth.sites]),
            ("contribution", [site.contribution.scaled(100) for site in worth.sites]),
        )
    )
    note = "The mean accuracy of all together minus that of the others together."
    if worth.is_shapley:
        note = (
            "Shapley values: what a site adds to the mean accuracy, averaged over all orders in which sites can join. "
            "With the chance of a guess, they add up to the mean accuracy of all together."
        )
    table = Table("Accuracy on the site's test images in per cent, and points", build_worth_rows(worth))
    figures = (
        Figure("Accuracy by site", {"": Bars("", "accuracy (%)", names, accuracies)}, WHISKERS, wide=True),
        Figure("Gain: all together minus alone", {"": gains}, f"Paired by image. {WHISKERS}"),
        Figure("Contribution to the mean accuracy", {"": contributions}, note),
    )
    sections = [
        Section("Verdict", (Sentences((*describe_worth(worth), *map(to_sentence, worth.notes))),)),
        Section("Gains and contributions", (table, *figures)),
        Section("How to read this", (Sentences(READING),)),
    ]
    lead = f"Is federating worth it, and for whom? FedCiROne on {worth.dataset}."
    return render_page(f"{worth.name}: worth", lead, sections)
