"""What a report tells of the clients: accuracy by domain and class, distances, representations, who holds what."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.bootstrap import Interval
from fedcir.analysis.diagnosis import Diagnosis, verdict
from fedcir.charts import Bars, Chart, Cloud, Heat, Lines, Series
from fedcir.compare import Method, half_width
from fedcir.report.diagnosis import in_the_plane
from fedcir.report.page import Figure, Section, Table, Words
from fedcir.report.study import Study
from fedcir.report.tables import percent

Diagnoses = Mapping[str, Mapping[int, Diagnosis]]
"""By method and seed."""

MOST_CLASSES, MOST_CELLS = 60, 6000
"""Beyond them a picture is no longer read."""


def by_domain(study: Study, methods: Sequence[Method], found: Diagnoses) -> Section:
    """Accuracy in each domain, and class by class."""
    domains = tuple(methods[0].domains)
    series = []
    for method in methods:
        values = [100 * method.domains[name].mean for name in domains]
        if all(method.domains[name].std is not None for name in domains):
            spread = [100 * (method.domains[name].std or 0.0) for name in domains]
            low = tuple(v - s for v, s in zip(values, spread, strict=True))
            high = tuple(v + s for v, s in zip(values, spread, strict=True))
            series.append(Series(method.algorithm, _places(domains), tuple(values), low, high))
        else:
            series.append(Series(method.algorithm, _places(domains), tuple(values)))
    bars = Bars("", "test accuracy (%)", domains, tuple(series))
    note = "Whiskers are one standard deviation over seeds." if len(study.seeds) > 1 else "One seed."
    blocks: list[Figure | Table] = [
        Table(
            "Test accuracy by domain (%), mean ± standard deviation over seeds",
            [["method", *domains], *([m.algorithm, *(percent(m.domains[d]) for d in domains)] for m in methods)],
        ),
        Figure("Accuracy by domain", {"": bars}, note),
    ]
    heats: dict[str, Chart] = {}
    for name, each in _shown(study, found).items():
        cells = tuple(tuple(None if np.isnan(v) else 100 * float(v) for v in row) for row in each.recall)
        what = "share of test images that are right, %"
        heats[f"{name}: right by class and domain"] = Heat(what, each.classes, tuple(each.domains), cells, 0.0, 100.0)
        for domain in each.domains:
            counts = each.confusion(domain)
            heats[f"{name}: confusion at {domain}"] = _counts(counts, each.classes, each.classes)
    if heats and len(_any(found).classes) <= MOST_CLASSES:
        note = "Of one seed. Confusion: rows are there, columns are what they were taken for."
        blocks.append(Figure("Class by class", heats, note))
    return Section("Domains", tuple(blocks))


def _counts(counts: NDArray[np.int64], rows: Sequence[str], columns: Sequence[str]) -> Heat:
    cells = tuple(tuple(int(value) if value else None for value in row) for row in counts)
    return Heat("images", tuple(rows), tuple(columns), cells, 0.0, float(counts.max()), "images")


def _any(found: Diagnoses) -> Diagnosis:
    return next(iter(next(iter(found.values())).values()))


def _shown(study: Study, found: Diagnoses) -> dict[str, Diagnosis]:
    """What pictures are of: one seed of each method, the same where there is one that all have."""
    seed = study.common_seed
    return {name: each[min(each) if seed is None else seed] for name, each in found.items()}


def _places(names: Sequence[str]) -> tuple[float, ...]:
    return tuple(float(number) for number in range(len(names)))


def distances(study: Study, found: Diagnoses, why_not: str) -> Section:
    """How far clients are apart under each method's model."""
    title = "Distances between clients"
    if not found:
        return Section(title, (Words((f"Not measured: {why_not}.",)),))
    shown = _shown(study, found)
    first = shown[study.baseline]
    several = len(study.seeds) > 1
    over = "± standard deviation over seeds" if several else "95 % interval over test images"
    caption = f"Proxy A-distance, 0 to 2: the bound's second term is that to the mixture, its first the risk; {over}"
    rows = [["method", "mean over pairs", "mean to the mixture", "average risk", "furthest"]]
    for name, by_seed in found.items():
        terms = _mean_pair(by_seed), _mean_to_mixture(by_seed), _average_risk(by_seed)
        rows.append([name, *terms, shown[name].furthest])
    heats: dict[str, Chart] = {}
    clouds: dict[str, Chart] = {}
    against: dict[str, Chart] = {}
    for name, each in shown.items():
        heats[name] = _matrix(each)
        clouds |= {f"{name}, by {what}": cloud for what, cloud in _clouds(each).items()}
        if name != study.baseline:
            against[name] = _against(study.baseline, first, name, each)
    of = f"Of seed {study.common_seed}." if several and study.common_seed is not None else ""
    blocks: list[Words | Table | Figure] = [
        Words((*verdict(first), *_changes(study, found))),
        Table(caption, rows),
        Figure("Proxy A-distance of clients", heats, f"0 cannot be told apart, 2 always can. {of}"),
        Figure("Representations of test images, first two principal components", clouds, of),
    ]
    if against:
        note = f"Below the diagonal clients are nearer than under {study.baseline}. {of}"
        blocks.append(Figure("Distances side by side", against, note))
    return Section(title, tuple(blocks))


def _told(values: Sequence[float], digits: int, alone: Interval | None) -> str:
    """Mean and deviation over seeds, or the interval that one seed has."""
    if len(values) == 1:
        return "" if alone is None else f"{alone:.{digits}f}"
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _mean_pair(by_seed: Mapping[int, Diagnosis]) -> str:
    found = list(by_seed.values())
    return _told([each.apart.mean_pair for each in found], 2, found[0].apart.mean_pair_interval)


def _mean_to_mixture(by_seed: Mapping[int, Diagnosis]) -> str:
    found = list(by_seed.values())
    return _told([each.apart.mean_to_mixture for each in found], 2, found[0].apart.mean_to_mixture_interval)


def _average_risk(by_seed: Mapping[int, Diagnosis]) -> str:
    terms = [each.bound for each in by_seed.values() if each.bound is not None]
    return _told([term.risk for term in terms], 3, terms[0].risk_interval) if terms else ""


def _changes(study: Study, found: Diagnoses) -> list[str]:
    """Each method's mean distance over pairs against the baseline's, paired by seed."""
    said = []
    before = found[study.baseline]
    for name, after in found.items():
        seeds = [seed for seed in after if seed in before]
        if name == study.baseline or not seeds:
            continue
        changes = [after[seed].apart.mean_pair - before[seed].apart.mean_pair for seed in seeds]
        mean = statistics.fmean(changes)
        way = "nearer" if mean < 0 else "further apart"
        sentence = f"Under {name} clients are {way} than under {study.baseline}: {mean:+.2f}"
        if len(seeds) > 1:
            half = half_width(changes)
            sure = "more than chance between seeds" if abs(mean) > half else "not told from chance"
            said.append(f"{sentence} ± {half:.2f} in the mean over pairs (95 %, {len(seeds)} seeds): {sure}.")
        else:
            said.append(f"{sentence} in the mean over pairs, of one seed.")
    return said


def _matrix(found: Diagnosis) -> Heat:
    """Pairs of clients, and each to the mixture."""
    names = tuple(found.domains)
    rows = []
    for a in names:
        pairs = [found.apart.pairs.get((a, b)) or found.apart.pairs.get((b, a)) for b in names]
        rows.append((*(None if pair is None else pair.value for pair in pairs), found.apart.to_mixture[a].value))
    return Heat("proxy A-distance", names, (*names, "mixture"), tuple(rows), 0.0, 2.0)


def _clouds(found: Diagnosis) -> dict[str, Cloud]:
    points = in_the_plane(np.concatenate([view.z for view in found.views]))
    owners = np.repeat(np.arange(len(found.views)), [len(view.z) for view in found.views])
    labels = np.concatenate([view.labels for view in found.views])
    return {
        what: Cloud("representations", tuple(groups), _dots(points, kinds))
        for what, groups, kinds in (("client", found.domains, owners), ("class", found.classes, labels))
    }


def _dots(points: NDArray[np.float64], kinds: NDArray[np.int64]) -> tuple[tuple[float, float, int], ...]:
    return tuple((float(x), float(y), int(kind)) for (x, y), kind in zip(points, kinds, strict=True))


def _against(baseline: str, first: Diagnosis, name: str, other: Diagnosis) -> Lines:
    x, y = (tuple(distance.value for distance in each.apart.pairs.values()) for each in (first, other))
    star = Series("mean to the mixture", (first.apart.mean_to_mixture,), (other.apart.mean_to_mixture,))
    axes = f"distance under {baseline}", f"distance under {name}"
    return Lines("", *axes, (Series("pair of clients", x, y), star), joined=False, diagonal=True)


def clients(found: Diagnoses) -> Section | None:
    """Who holds what."""
    if not found:
        return None
    each = _any(found)
    counts = np.stack(list(each.labels.values()), axis=1)  # (classes, clients)
    said = f"{len(each.labels)} clients hold {int(counts.sum()):,} training images"
    if counts.size > MOST_CELLS:
        return Section("Clients", (Words((f"{said}.",)),))
    note = f"{said}; up to {max(each.skew.values()):.0%} of a client's labels are not as the mean has them."
    chart = _counts(counts, each.classes, tuple(each.labels))
    return Section("Clients", (Figure("Training images by client and class", {"": chart}, note, wide=True),))
