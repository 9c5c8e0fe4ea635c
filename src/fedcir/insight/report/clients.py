"""What a report tells of the clients: accuracy by domain and class, distances, representations, who holds what."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.bootstrap import Interval
from fedcir.analysis.diagnose import Diagnosis
from fedcir.analysis.metrics import wilson_interval
from fedcir.analysis.words import aligned_in_words, apart_in_words
from fedcir.insight.charts import Bars, Chart, Cloud, Heat, Lines, Series
from fedcir.insight.report.beside import beside_accuracy
from fedcir.insight.report.page import Figure, Section, Table, Words, sentence
from fedcir.insight.report.picture import in_the_plane
from fedcir.insight.report.study import Study
from fedcir.insight.report.tables import UNSEEN, domain_cell, domain_header, domains_of
from fedcir.runs.compare import Method
from fedcir.runs.intervals import MIN_SEEDS, half_width

Diagnoses = Mapping[str, Mapping[int, Diagnosis]]
"""By method and seed."""

MOST_CLASSES, MOST_CELLS, MOST_CONFUSION = 60, 6000, 50_000
"""Beyond them a picture is no longer read, or the page grows too large."""


def by_domain(study: Study, methods: Sequence[Method], found: Diagnoses) -> Section:
    """Accuracy in each domain, and class by class."""
    domains, header = domains_of(methods), domain_header(methods)
    series = tuple(_bars(study, method, domains) for method in methods)
    bars = Bars("", "test accuracy (%)", tuple(header), series)
    note = (
        "Whiskers show one standard deviation over seeds, or with one seed its 95 % interval over test images (Wilson)."
    )
    blocks: list[Figure | Table] = [
        Table(
            "Test accuracy by domain (%), mean ± standard deviation over seeds",
            [["method", *header], *([m.algorithm, *(domain_cell(methods, m, d) for d in domains)] for m in methods)],
        ),
        Figure("Accuracy by domain", {"": bars}, note),
    ]
    heats: dict[str, Chart] = {}
    for name, each in _shown(study, found).items():
        cells = tuple(tuple(None if np.isnan(v) else 100 * float(v) for v in row) for row in each.recall)
        what = "test images classified correctly (%)"
        heats[f"{name}: accuracy by class and domain"] = Heat(what, each.classes, _named(each), cells, 0.0, 100.0)
        if len(found) * len(each.domains) * len(each.classes) ** 2 <= MOST_CONFUSION:
            for domain in each.domains:
                counts = each.confusion(domain)
                heats[f"{name}: confusion in {domain}"] = _counts(counts, each.classes, each.classes)
    if found:
        blocks.append(beside_accuracy(found))
    if heats and len(_any(found).classes) <= MOST_CLASSES:
        note = (
            "One seed, all test images. The accuracy of a class is its recall. "
            "In a confusion matrix, rows are true classes and columns are predictions."
        )
        blocks.append(Figure("Class by class", heats, note))
    return Section("Domains", tuple(blocks))


def _counts(counts: NDArray[np.int64], rows: Sequence[str], columns: Sequence[str]) -> Heat:
    cells = tuple(tuple(int(value) if value else None for value in row) for row in counts)
    return Heat("images", tuple(rows), tuple(columns), cells, 0.0, float(counts.max()), "images")


def _any(found: Diagnoses) -> Diagnosis:
    return next(iter(next(iter(found.values())).values()))


def _shown(study: Study, found: Diagnoses) -> dict[str, Diagnosis]:
    """What pictures are of: one seed of each method, the same where there is one that all have; the baseline first."""
    seeds = set.intersection(*(set(by_seed) for by_seed in found.values())) if found else set()
    names = sorted(found, key=lambda name: name != study.baseline)
    return {name: found[name][min(seeds or found[name])] for name in names}


def _named(found: Diagnosis) -> tuple[str, ...]:
    """The domains, marked where nobody trains on them."""
    return tuple(f"{name} ({UNSEEN})" if name in found.unseen else name for name in found.domains)


def _bars(study: Study, method: Method, domains: Sequence[str]) -> Series:
    there = [name for name in domains if name in method.domains]
    values = [method.domains[name].mean for name in there]
    ends = []
    (run, *_) = study.runs[method.algorithm].values()
    for name, value in zip(there, values, strict=True):
        std, tested = method.domains[name].std, len(run.manifest.get("test", {}).get(name, ()))
        if std is not None:
            ends.append((value - std, value + std))
        else:
            of = wilson_interval(round(value * tested), tested) if tested else Interval(value, value, value)
            ends.append((of.low, of.high))
    low, high = (tuple(100 * end[side] for end in ends) for side in (0, 1))
    places = tuple(float(domains.index(name)) for name in there)
    return Series(method.algorithm, places, tuple(100 * value for value in values), low, high)


def distances(study: Study, found: Diagnoses, samples: int, why_not: Sequence[str]) -> Section:
    """How far domains are apart under each method's model, and for which runs that could not be measured."""
    title = "Distances between domains"
    found = {name: measured for name, by_seed in found.items() if (measured := _measured(by_seed))}
    if not found:
        return Section(title, (Words(tuple(why_not)),))
    shown = _shown(study, found)
    baseline, first = next(iter(shown.items()))
    several = len(study.seeds) > 1
    over = "± is the standard deviation over seeds" if several else "Brackets are 95 % intervals over test images"
    caption = (
        f"Proxy A-distance (0 to 2) on up to {samples} test images of each domain, and the global model's average "
        "risk on all of them. The mean distance to the mixture is the second term of the paper's bound. The risk "
        f"stands in for its first term, the average risk of the local models, which a run does not keep. {over}"
    )
    changes = _changes(baseline, found)
    to_baseline = [f"change from {baseline}"] if len(found) > 1 else []
    rows = [
        ["method", "mean over pairs", *to_baseline, "mean to the mixture", "global model's risk", "furthest domain"]
    ]
    for name, by_seed in found.items():
        change = [str(changes.get(name, "")) for _ in to_baseline]
        terms = _mean_pair(by_seed), *change, _mean_to_mixture(by_seed), _average_risk(by_seed)
        rows.append([name, *terms, shown[name].furthest])
    heats: dict[str, Chart] = {}
    clouds: dict[str, Chart] = {}
    against: dict[str, Chart] = {}
    for name, each in shown.items():
        heats[name] = _matrix(each)
        clouds |= {f"{name}, by {what}": cloud for what, cloud in _clouds(each).items()}
        if name != baseline:
            against[name] = _against(baseline, first, name, each)
    of = f"This is seed {study.common_seed}." if several and study.common_seed is not None else ""
    said = [*map(sentence, first.notes), *apart_in_words(first), *aligned_in_words(first), *_said(baseline, changes)]
    blocks: list[Words | Table | Figure] = [
        Words((*why_not, *said)),
        Table(caption, rows),
        Figure(
            "Proxy A-distance between domains",
            heats,
            f"At 0 a classifier cannot tell two domains apart; at 2 it always can. {of}",
        ),
        Figure("Representations of test images, first two principal components", clouds, of),
    ]
    if against:
        note = f"Pairs below the diagonal are closer than under {baseline}. {of}"
        blocks.append(Figure("Distances side by side", against, note))
    return Section(title, tuple(blocks))


def _measured(by_seed: Mapping[int, Diagnosis]) -> dict[int, Diagnosis]:
    return {seed: each for seed, each in by_seed.items() if each.measured}


def _told(values: Sequence[float], digits: int, alone: Interval | None) -> str:
    """Mean and deviation over seeds, or the interval that one seed has."""
    if len(values) == 1:
        return "" if alone is None else f"{alone:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _mean_pair(by_seed: Mapping[int, Diagnosis]) -> str:
    found = list(by_seed.values())
    return _told([each.apart.mean_pair.value for each in found], 2, found[0].apart.mean_pair)


def _mean_to_mixture(by_seed: Mapping[int, Diagnosis]) -> str:
    found = list(by_seed.values())
    return _told([each.apart.mean_to_mixture.value for each in found], 2, found[0].apart.mean_to_mixture)


def _average_risk(by_seed: Mapping[int, Diagnosis]) -> str:
    terms = [each.bound for each in by_seed.values() if each.bound is not None]
    return _told([term.global_risk for term in terms], 3, terms[0].global_risk_interval) if terms else ""


@dataclass(frozen=True)
class Change:
    """Of the mean distance over pairs, to the baseline's, paired by seed."""

    mean: float
    half: float | None
    """Of its 95 % interval over seeds and test images; None with one seed."""
    seeds: int = 0

    @property
    def beyond_chance(self) -> bool:
        return self.seeds >= MIN_SEEDS and self.half is not None and abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" if self.half is None else f"{self.mean:+.2f} ± {self.half:.2f}"


def _changes(baseline: str, found: Diagnoses) -> dict[str, Change]:
    """Compare every method with the baseline, paired by seed.

    The errors of the test images under both methods are added as if they were independent, which is conservative.
    """
    before = found[baseline]
    changes = {}
    for name, after in found.items():
        pairs = [(after[seed].apart.mean_pair, before[seed].apart.mean_pair) for seed in after if seed in before]
        each = [ours.value - theirs.value for ours, theirs in pairs]
        if name != baseline and each:
            images = statistics.fmean(math.hypot(o.high - o.low, t.high - t.low) / 2 for o, t in pairs)
            half = math.hypot(half_width(each), images) if len(each) > 1 else None
            changes[name] = Change(statistics.fmean(each), half, len(each))
    return changes


def _said(baseline: str, changes: Mapping[str, Change]) -> list[str]:
    """Which methods bring domains closer together, as far as seeds can tell."""
    sure = {name: change for name, change in changes.items() if change.beyond_chance}
    ways = {
        "closer together": [n for n in sure if sure[n].mean < 0],
        "further apart": [n for n in sure if sure[n].mean > 0],
    }
    said = [
        f"Domains are {way} under {', '.join(f'{name} ({sure[name]})' for name in names)} than under {baseline}: "
        "more than chance (95 %, seeds and test images)."
        for way, names in ways.items()
        if names
    ]
    if rest := [name for name in changes if name not in sure]:
        told = ", ".join(f"{name} ({changes[name]})" for name in rest)
        said.append(f"The change in distance from {baseline} could be chance for {told}.")
    return said


def _matrix(found: Diagnosis) -> Heat:
    """Pairs of domains, and each to the mixture."""
    names = found.domains
    rows = []
    for a in names:
        pairs = [found.apart.between(a, b) for b in names]
        rows.append((*(None if pair is None else pair.value for pair in pairs), found.apart.to_mixture[a].value))
    return Heat("proxy A-distance", _named(found), (*_named(found), "mixture"), tuple(rows), 0.0, 2.0)


def _clouds(found: Diagnosis) -> dict[str, Cloud]:
    points, owners, labels = in_the_plane(found.sample)
    return {
        what: Cloud("representations", tuple(groups), _dots(points, kinds))
        for what, groups, kinds in (("domain", _named(found), owners), ("class", found.classes, labels))
    }


def _dots(points: NDArray[np.float64], kinds: NDArray[np.int64]) -> tuple[tuple[float, float, int], ...]:
    return tuple((float(x), float(y), int(kind)) for (x, y), kind in zip(points, kinds, strict=True))


def _against(baseline: str, first: Diagnosis, name: str, other: Diagnosis) -> Lines:
    x, y = (tuple(distance.value for distance in each.apart.pairs.values()) for each in (first, other))
    star = Series("mean to the mixture", (first.apart.mean_to_mixture.value,), (other.apart.mean_to_mixture.value,))
    axes = f"distance under {baseline}", f"distance under {name}"
    return Lines("", *axes, (Series("pair of domains", x, y), star), joined=False, diagonal=True)


def clients(found: Diagnoses) -> Section | None:
    """Who holds what."""
    if not found:
        return None
    each = _any(found)
    counts = np.stack(list(each.labels.values()), axis=1)  # (classes, clients)
    said = f"The clients hold {int(counts.sum()):,} training images"
    if counts.size > MOST_CELLS:
        return Section("Clients", (Words((f"{said}.",)),))
    differ = max(each.skew.values())
    most = f"To match the average client, a client would have to change up to {differ:.0%} of its labels"
    note = f"{said}. {'All hold the classes in the same shares' if differ < 0.005 else most}."
    chart = _counts(counts, each.classes, tuple(each.labels))
    return Section("Clients", (Figure("Training images by client and class", {"": chart}, note, wide=True),))
