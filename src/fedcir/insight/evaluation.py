"""A model tested on any data: numbers, and a page about them."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.analysis.bootstrap import Interval
from fedcir.analysis.overlap import Which
from fedcir.engine.files import write
from fedcir.insight.charts import Bars, Chart, Heat, Lines, Series
from fedcir.insight.report.page import Figure, Section, Table, Words, page, sentence
from fedcir.insight.report.tables import Rows
from fedcir.runs.batch import OnWork, unheard
from fedcir.runs.run import Source, as_run
from fedcir.types import InputError
from fedcir.use.evaluate import evaluate_run
from fedcir.use.evaluation import Evaluation, Figures
from fedcir.use.trained import Given

UNTRAINED = "not trained on"
MOST_CLASSES = 60
"""Beyond them a matrix is no longer read."""


@dataclass(frozen=True)
class Evaluated:
    """What was found, and where it was written."""

    evaluation: Evaluation
    page: Path | None
    numbers: Path | None


def evaluate(
    run: Source,
    *,
    dataset: str | None = None,
    data_root: str | Path | None = None,
    split: Which = "test",
    adapt: bool = False,
    site: str | None = None,
    algorithm: Given | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    set: Sequence[str] = (),
    trust_code: bool = False,
    on_work: OnWork = unheard,
) -> Evaluated:
    """Test the model of a finished run on labelled images, as `fedcir evaluate` does: on any data, or on its own.

    Images that the run trained on or chose on (equal content) are left out; only `split` "train" or "val" keeps them.
    With `out`, that folder gets evaluation.html and evaluation.json. `adapt` first takes BatchNorm statistics from each
    domain's images, without their labels. `set` are further settings of the data, such as "data.classes=dog,cat".
    `trust_code` lets code of the run's own run.
    """
    folder = None if out is None else Path(out)
    if folder is not None:
        check_place(folder)
    found = evaluate_run(
        run,
        dataset=dataset,
        data_root=data_root,
        split=split,
        adapt=adapt,
        site=site,
        algorithm=algorithm,
        device=device,
        set=set,
        on_domain=partial(on_work, what="testing domains"),
        on_file=partial(on_work, what="decoding images"),
        trust_code=trust_code,
    )
    if folder is None:
        return Evaluated(found, None, None)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "evaluation.html", folder / "evaluation.json"
    roots = [data_root, as_run(run).config.data.root]
    write(files[0], evaluation_page(found, [str(root) for root in roots if root]))
    write(files[1], json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n")
    return Evaluated(found, *files)


def evaluation_page(found: Evaluation, hidden: Sequence[str] = ()) -> str:
    """The page's HTML. Paths of this machine are `hidden`."""
    sections = [_results(found, hidden), _calibration(found), _classes(found)]
    lead = f"{found.name} on {found.all.images:,} images of {found.dataset} ({found.split})."
    return page(f"{found.dataset}: evaluation", lead, sections, [])  # there is nothing to switch on and off


def check_place(folder: Path) -> None:
    """Refuse a folder that cannot be written to before the work is done."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise InputError(f"{there} is a file: name a folder")
    if not os.access(there, os.W_OK):
        raise InputError(f"the folder {there} cannot be written to: name another one")


def rows_by_domain(found: Evaluation) -> Rows:
    """A header, a row a domain, and one for all; accuracies in per cent with their 95 % intervals."""
    adapted = found.mean_before is not None
    further = list(found.all.further)
    rows = [["domain", "images", *(["before"] if adapted else []), "accuracy (95 %)", "log-loss", "ECE", *further]]
    several = len(found.tested) > 1
    for each in [*found, *([found.all] if several else [])]:
        before = [] if not adapted else [f"{100 * (each.accuracy_before or 0.0):.1f}"]
        figures = [f"{each.log_loss:.3f}", f"{each.calibration_error:.3f}", *map(_number, each.further.values())]
        rows.append([name_of(each), f"{each.images:,}", *before, percent(each.accuracy), *figures])
    if several:
        before = [] if found.mean_before is None else [f"{100 * found.mean_before:.1f}"]
        rows.append(["mean over domains", "", *before, percent(found.mean), "", "", *("" for _ in further)])
    return rows


def findings(found: Evaluation) -> list[str]:
    """The table in words."""
    said = []
    if len(found.tested) > 1:
        worst = found.worst
        said.append(f"The mean accuracy over domains is {percent(found.mean)} %.")
        said.append(f"The weakest domain is {worst.tested.domain}, with {percent(worst.accuracy)} %.")
    if found.mean_before is not None:
        change = 100 * (found.mean.value - found.mean_before)
        said.append(
            f"With BatchNorm statistics of each domain, the mean accuracy went from {100 * found.mean_before:.1f} % "
            f"to {100 * found.mean.value:.1f} % ({change:+.1f} points)."
        )
    if found.temperature is not None:
        said.append(f"Probabilities are calibrated by a temperature of {found.temperature:.2f}.")
    if missing := [name for name, each in found.all.recall.items() if each is None]:
        said.append(f"No image shows {', '.join(missing)}, so these classes are not tested.")
    return said


def name_of(figures: Figures) -> str:
    mark = "" if figures.tested.trained_on else f" ({UNTRAINED})"
    return f"{figures.tested.domain}{mark}"


def percent(each: Interval) -> str:
    return f"{each.scaled(100):.1f}"


def _results(found: Evaluation, hidden: Sequence[str]) -> Section:
    notes = list(found.notes)
    for path in sorted(hidden, key=len, reverse=True):
        notes = [note.replace(path, "DIR") for note in notes]
    domains = tuple(name_of(each) for each in found)
    places = tuple(float(place) for place in range(len(domains)))
    accuracies = [each.accuracy.scaled(100) for each in found]
    values, low, high = (tuple(getattr(each, end) for each in accuracies) for end in ("value", "low", "high"))
    bars = Bars("", "accuracy (%)", domains, (Series(found.name, places, values, low, high),))
    table = Table("Intervals: Wilson by domain and for all images, the bootstrap for the mean", rows_by_domain(found))
    told = Words((*findings(found), *(sentence(note) for note in notes)))
    return Section("Results", (told, table, Figure("Accuracy by domain", {"": bars}, "Whiskers show 95 % intervals.")))


def _calibration(found: Evaluation) -> Section:
    charts: dict[str, Chart] = {}
    for name, each in {"all images": found.all, **{name_of(each): each for each in found}}.items():
        bins = each.reliability()
        ours = Series(found.name, tuple(b.sure for b in bins), tuple(b.right for b in bins))
        ideal = Series("perfectly calibrated", (0.0, 1.0), (0.0, 1.0))
        charts[name] = Lines("", "probability of the predicted class", "share that is right", (ours, ideal))
    note = "Below the straight line the model is too sure of itself, above it not sure enough. Empty bins are left out."
    words = (
        f"The expected calibration error (ECE) over all images is {found.all.calibration_error:.3f}: on average, the "
        "probability of the predicted class differs by this much from the share of correct answers."
    )
    return Section("Calibration", (Words((words,)), Figure("Reliability", charts, note)))


def _classes(found: Evaluation) -> Section:
    rows = [["class", "images", "recognised (%, 95 %)"]]
    for each, (name, recall) in zip(found.all.confusion, found.all.recall.items(), strict=True):
        rows.append([name, f"{each.sum():,}", "" if recall is None else percent(recall)])
    table = Table("Share of each class's images that were recognised, with Wilson intervals", rows)
    if len(found.classes) > MOST_CLASSES:
        return Section("Classes", (table,))
    charts: dict[str, Chart] = {}
    by_class = tuple(
        tuple(None if (recall := each.recall[name]) is None else 100 * recall.value for each in found)
        for name in found.classes
    )
    domains = tuple(name_of(each) for each in found)
    charts["by class and domain"] = Heat("recognised (%)", found.classes, domains, by_class, 0.0, 100.0)
    for name, each in {"all images": found.all, **{name_of(each): each for each in found}}.items():
        cells = tuple(tuple(int(count) or None for count in row) for row in each.confusion)
        most = float(each.confusion.max())
        charts[f"confusion, {name}"] = Heat("images", found.classes, found.classes, cells, 0.0, most, "images")
    note = "In a confusion matrix, rows are true classes and columns are predictions."
    return Section("Classes", (table, Figure("Class by class", charts, note)))


def _number(value: Any) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
