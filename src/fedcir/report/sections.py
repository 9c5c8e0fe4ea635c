"""What a report tells of runs, section by section."""

import statistics
from collections.abc import Sequence

from fedcir.charts import Chart, Lines, Measure, Series, accuracy, curve, risk, training_loss
from fedcir.compare import Method, half_width
from fedcir.config import dump_toml
from fedcir.cost import ledger
from fedcir.records import RunFolder
from fedcir.report.page import Figure, Listing, Section, Table, Words
from fedcir.report.study import Study, shareable
from fedcir.report.tables import difference, goal_cells, goal_header, percent
from fedcir.types import RoundRecord

ALONG: dict[str, tuple[str, Measure | None]] = {
    "rounds": ("round", None),
    "GB moved": ("GB moved, all clients", lambda record: (record.bytes_down + record.bytes_up) / 1e9),
    "TFLOPs": ("TFLOPs, all clients", lambda record: record.flops / 1e12),
    "minutes": ("minutes", lambda record: record.seconds.get("total", 0.0) / 60),
}
"""What accuracy is drawn against."""


def results(study: Study, methods: Sequence[Method]) -> Section:
    """Who is how accurate, how sure that is, and the differences."""
    several = len(study.seeds) > 1
    header = ["method", "seeds", "mean (%)", "95 % interval", "worst domain (%)"]
    rows = [[*header, f"difference to {study.baseline} (points, 95 %)"] if several else header]
    for method in methods:
        runs = list(study.runs[method.algorithm].values())
        ends = mean_interval(runs)
        told = "" if ends is None else f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}"
        row = [method.algorithm, str(len(runs)), percent(method.mean), told]
        rows.append([*row, percent(method.worst), *([difference(method)] if several else [])])
    over = "seeds (Student's t) where there are several, else over test images" if several else "test images, one seed"
    caption = f"Test accuracy after the last round, plain mean over domains; ± standard deviation, interval over {over}"
    return Section("Results", (Words((*findings(study, methods), *study.notes)), Table(caption, rows)))


def mean_interval(runs: Sequence[RunFolder]) -> tuple[float, float] | None:
    """Of the mean accuracy: over seeds by Student's t, or of one run over its test images by the binomial variance.

    None where nothing tells how many test images there were.
    """
    final = [run.summary()["final"] for run in runs]
    mean = statistics.fmean(each["accuracy_mean"] for each in final)
    if len(runs) > 1:
        half = half_width([each["accuracy_mean"] for each in final])
    else:
        tested = {name: len(ids) for name, ids in runs[0].manifest().get("test", {}).items()}
        by_domain = final[0]["accuracy"]
        if not all(tested.get(name) for name in by_domain):
            return None
        variance = sum(p * (1 - p) / tested[name] for name, p in by_domain.items())
        half = 1.96 * variance**0.5 / len(by_domain)
    return max(0.0, mean - half), min(1.0, mean + half)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5 / (1 + z * z / count)
    return middle - half, middle + half


def findings(study: Study, methods: Sequence[Method]) -> list[str]:
    """The table in words: the best, what is told from chance, the weakest domain."""
    ranked = sorted(methods, key=lambda method: -method.mean.mean)
    best = ranked[0]
    said = []
    if len(methods) > 1:
        said.append(f"Most accurate: {best.algorithm}, {percent(best.mean)} %; then {_named(ranked[1:3])}.")
    for method in methods:
        if method.difference is not None and method.half_width is not None:
            change, half = 100 * method.difference.mean, 100 * method.half_width
            if abs(change) > half:
                way = "above" if change > 0 else "below"
                sure = f"{abs(change):.2f} ± {half:.2f} points {way}"
                said.append(f"{method.algorithm} is {sure} {study.baseline}: more than chance between seeds (95 %).")
    if len(methods) > 1 and len(study.seeds) == 1:
        said.append("One seed: no difference here is told from chance. Give --seeds 0,1,2 to tell.")
    elif len(methods) > 1 and len(said) == 1:
        said.append(f"No difference to {study.baseline} is told from chance by {len(study.seeds)} seeds.")
    worst = min(best.domains, key=lambda name: best.domains[name].mean)
    said.append(f"Under {best.algorithm} the weakest domain is {worst}: {percent(best.domains[worst])} %.")
    return said


def _named(methods: Sequence[Method]) -> str:
    return ", ".join(f"{method.algorithm} ({percent(method.mean)})" for method in methods)


def training(study: Study) -> Section:
    """Accuracy, risk and losses as training goes."""
    figures = [
        Figure(
            "Test accuracy, mean over domains",
            {
                name: Lines("", label, "test accuracy (%)", _curves(study, accuracy, along))
                for name, (label, along) in ALONG.items()
            },
            "Hover, touch or use the arrow keys to read it off. Bands reach from the lowest seed to the highest; they "
            "are drawn while at most four methods are shown.",
            pick="against",
            wide=True,
        )
    ]
    domains = list(next(iter(study.one_of_each.values())).summary()["final"]["accuracy"])
    risks: dict[str, Measure] = {"mean over clients": risk, **{name: _risk_at(name) for name in domains}}
    drawn = {name: series for name, measure in risks.items() if (series := _curves(study, measure))}
    if drawn:
        charts: dict[str, Chart] = {name: Lines("", "round", "test loss", series) for name, series in drawn.items()}
        figures.append(Figure("Risk: the global model's loss on test images", charts, pick="of"))
    terms: dict[str, Chart] = {}
    for name in dict.fromkeys(t for run in study.one_of_each.values() for r in run.records() for t in r.losses):
        label = TERMS.get(name, name)
        if label not in terms and (series := _curves(study, training_loss if name in ("ce", "fl") else _term(name))):
            terms[label] = Lines("", "round", "mean over clients and steps", series)
    if terms:
        note = "Terms are unweighted; total is what is minimised."
        figures.append(Figure("Training losses by term", terms, note, pick="term"))
    return Section("Training", tuple(figures))


TERMS = {
    "ce": "cross-entropy",
    "fl": "cross-entropy",
    "reg": "reg (head on generated z)",
    "align": "align (KL to the class Gaussians)",
}
"""Words for the commonest."""


def _curves(study: Study, measure: Measure, along: Measure | None = None) -> tuple[Series, ...]:
    curves = [curve(name, by_seed.values(), measure, along) for name, by_seed in study.runs.items()]
    return tuple(each for each in curves if each is not None)


def _risk_at(domain: str) -> Measure:
    return lambda record: None if not record.risk else record.risk.get(domain)


def _term(name: str) -> Measure:
    def measure(record: RoundRecord) -> float | None:
        return record.losses.get(name)

    return measure


def costs(study: Study, methods: Sequence[Method], target: float | None) -> Section:
    """What each method took in all, and to a target accuracy."""
    rows = [["method", "rounds", "GB moved", "TFLOPs", "minutes", "peak memory (GB)"]]
    for name, by_seed in study.runs.items():
        spent = [ledger(run.records()) for run in by_seed.values()]
        memory = [run.summary()["cost"]["peak_memory"] / 1e9 for run in by_seed.values()]
        values = [
            statistics.fmean((each.bytes_down + each.bytes_up) / 1e9 for each in spent),
            statistics.fmean(each.flops / 1e12 for each in spent),
            statistics.fmean(each.seconds.get("total", 0.0) / 60 for each in spent),
            statistics.fmean(memory),
        ]
        rows.append([name, f"{spent[0].rounds}", *(f"{value:.3g}" for value in values)])
    goal = [["method", *goal_header(study.baseline, target)]]
    goal += [[method.algorithm, *goal_cells(method, len(study.runs[method.algorithm]))] for method in methods]
    caption = "To a target accuracy, over all clients: medians over seeds"
    return Section("Cost", (Table(caption, goal), Table("In all, mean over seeds, over all clients", rows)))


def settings(study: Study) -> Section:
    """What was run, and how to run it again."""
    shown = [
        *("model.name", "data.image_size", "partition.scheme", "partition.clients", "server.active", "server.rounds"),
        *("local.steps", "local.batch_size", "local.lr", "local.momentum", "local.weight_decay"),
    ]
    tables = {name: shareable(folder) for name, folder in study.one_of_each.items()}
    rows = [["setting", "value"]]
    for section, field in (key.split(".") for key in shown):
        values = {name: str(each[section].get(field, "")) for name, each in tables.items()}
        same = len(set(values.values())) == 1
        told = next(iter(values.values())) if same else "; ".join(f"{name}: {value}" for name, value in values.items())
        if told:
            rows.append([f"{section}.{field}", told])
    listings = []
    for name, each in tables.items():
        seeds = ", ".join(str(seed) for seed in sorted(study.runs[name]))
        listings.append(Listing(f"{name}: all settings (seeds {seeds})", dump_toml(each)))
    again = (
        "To make a run again, save its settings below as FILE.toml and run: fedcir run FILE.toml --data-root DIR "
        "--seed SEED. The same versions on the same kind of machine give the same bits.",
        f"Data: {study.dataset}. Each run's manifest.json names every sample and holds their hash.",
    )
    return Section("Settings", (Words(again), Table("The main settings", rows), *listings))
