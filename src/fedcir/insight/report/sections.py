"""What a report tells of runs, section by section."""

import statistics
from collections.abc import Sequence

from fedcir.config import dump_toml
from fedcir.engine.cost import ledger
from fedcir.insight.charts import Chart, Lines, Measure, Series, accuracy, accuracy_unseen, curve, risk
from fedcir.insight.report.advice import advice
from fedcir.insight.report.page import Figure, Listing, Section, Table, Words, sentence
from fedcir.insight.report.quantities import duration, flops, size, time_unit_of, unit_of
from fedcir.insight.report.study import Study, shareable
from fedcir.insight.report.tables import UNSEEN, difference, domain_header, domains_of, goal_cells, goal_header, percent
from fedcir.runs.compare import Method
from fedcir.runs.intervals import COVERS, MIN_SEEDS
from fedcir.runs.run import describe_saved
from fedcir.types import RoundRecord
from fedcir.use.guarantee import guarantee_of


def next_steps(study: Study, methods: Sequence[Method]) -> Section | None:
    """What to do next."""
    said = advice(study.runs, methods, study.baseline)
    return Section("What to do next", (Words(tuple(said)),)) if said else None


def results(study: Study, methods: Sequence[Method], notes: Sequence[str]) -> Section:
    """Who is how accurate, how sure that is, and the differences."""
    several = len(study.seeds) > 1
    unseen = any(method.unseen for method in methods)
    header = ["method", "seeds", "seen mean (%)" if unseen else "mean (%)", "95 % interval", "worst domain (%)"]
    header += ["unseen mean (%)"] if unseen else []
    rows = [[*header, f"difference to {study.baseline} (points; {COVERS})"] if several else header]
    for method in methods:
        row = [method.algorithm, str(len(study.runs[method.algorithm])), percent(method.mean), _mean_interval(method)]
        row += [percent(method.worst), *([percent(method.unseen_mean)] if unseen else [])]
        rows.append([*row, *([difference(method)] if several else [])])
    over = "seeds and test images, or over test images for a method with one seed" if several else "test images"
    mean = "mean over the domains trained on, and over those not trained on" if unseen else "mean over domains"
    spread = " ± is the standard deviation over seeds." if several else ""
    caption = f"Test accuracy after the last round, {mean}.{spread} Intervals are over {over}"
    return Section(
        "Results",
        (Words((*findings(study, methods), *saved_models(study), *privacy(study), *notes)), Table(caption, rows)),
    )


def _mean_interval(method: Method) -> str:
    """Ends of the mean's interval in per cent; empty where nothing tells how many test images there are."""
    if method.mean_half_width is None:
        return ""
    mean, half = method.mean.mean, method.mean_half_width
    return f"{100 * max(0.0, mean - half):.1f} to {100 * min(1.0, mean + half):.1f}"


def findings(study: Study, methods: Sequence[Method]) -> list[str]:
    """The table in words: the best federated method, the ceiling, which differences could be chance, the weakest."""
    federated = [method for method in methods if not method.pools]
    ranked = sorted(federated or methods, key=lambda method: -method.mean.mean)
    best = ranked[0]
    said = []
    if len(ranked) > 1:
        then = " and ".join(f"{method.algorithm} ({percent(method.mean)} %)" for method in ranked[1:3])
        said.append(f"The most accurate federated method is {best.algorithm} ({percent(best.mean)} %), then {then}.")
    for method in methods if federated else ():
        if method.pools:
            gap = 100 * (method.mean.mean - best.mean.mean)
            ceiling = (
                f"a ceiling, {gap:.1f} points above {best.algorithm}" if gap >= 0 else f"less than {best.algorithm}"
            )
            whole = f"{method.algorithm} training, which moves all data to one place, reaches {percent(method.mean)} %"
            said.append(sentence(f"{whole}, {ceiling}"))
    said += _differences(study, federated)
    seen = [name for name in best.domains if name not in best.unseen]
    worst = min(seen, key=lambda name: best.domains[name].mean)
    said.append(f"Under {best.algorithm}, the weakest domain is {worst}: {percent(best.domains[worst])} %.")
    if best.unseen:
        apart = (
            f"{', '.join(best.unseen)}, which nobody trained on, {best.algorithm} reaches {percent(best.unseen_mean)} %"
        )
        said.append(f"On {apart}; the mean over the domains trained on is {percent(best.mean)} %.")
    return said


def _differences(study: Study, methods: Sequence[Method]) -> list[str]:
    """Which differences to the baseline could be chance, and which are more."""
    known = [method for method in methods if method.difference is not None]
    if known and len(study.seeds) < MIN_SEEDS:
        seeds = "one seed" if len(study.seeds) == 1 else "two seeds"
        return [f"With {seeds}, every difference between methods could be chance."]
    said, chance = [], []
    for method in known:
        if method.difference is not None and method.half_width is not None:
            change = 100 * method.difference.mean
            if method.is_beyond_chance:
                way = f"{abs(change):.1f} points {'above' if change > 0 else 'below'} {study.baseline}"
                said.append(f"{method.algorithm} is {way} ({method.interval}): more than chance.")
            else:
                chance.append(f"{method.algorithm} ({method.interval})")
    if chance:
        said.append(f"The difference to {study.baseline} could be chance for {', '.join(chance)}.")
    return said


def saved_models(study: Study) -> list[str]:
    """Which round's model each run saved."""
    by_run = {
        f"{algorithm}, seed {seed}": describe_saved(run.summary)
        for algorithm, runs in study.runs.items()
        for seed, run in runs.items()
        if run.summary is not None
    }
    same = set(by_run.values())
    if len(same) == 1:
        return [sentence(same.pop())]
    return [sentence(f"{name}: {text}") for name, text in by_run.items()]


def privacy(study: Study) -> list[str]:
    """What a run with noise tells of one client at most."""
    said = []
    for algorithm, runs in study.runs.items():
        run = next(iter(runs.values()))
        if about := guarantee_of(run):
            what = "Each upload of" if about["place"] == "client" else "The model of"
            of = "one image" if about["unit"] == "example" else "a whole client"
            bound = f"epsilon {about['epsilon']:.3g} at delta {about['delta']:g}"
            said.append(f"{what} {algorithm} is differentially private: {bound}, for {of} ({about['adjacency']}).")
            if "key" not in run.manifest:
                said.append("Its noise comes from the run's seed: this is an experiment and protects nobody.")
            else:
                said.append("Its accuracies were counted without noise, and epsilon does not cover them.")
    return said


def training(study: Study, methods: Sequence[Method]) -> Section:
    """Accuracy, risk and losses as training goes."""
    unseen = any(method.unseen for method in methods)
    along = _along(study)
    charts: dict[str, Chart] = {
        name: Lines("", label, "test accuracy (%)", _curves(study, accuracy, spent))
        for name, (label, spent) in along.items()
    }
    read = "Hover, touch or use the arrow keys to read values."
    if len(study.seeds) > 1:
        read += " Bands reach from the lowest seed to the highest; they appear while at most four methods are shown."
    over = "domains trained on" if unseen else "domains"
    figures = [Figure(f"Test accuracy, mean over {over}", charts, read, pick="against", wide=True)]
    if unseen:
        chart = Lines("", "round", "test accuracy (%)", _curves(study, accuracy_unseen))
        figures.append(Figure(f"Test accuracy, mean over domains {UNSEEN}", {"": chart}))
    names = zip(domain_header(methods), domains_of(methods), strict=True)
    risks: dict[str, Measure] = {f"mean over {over}": risk, **{shown: _risk_at(name) for shown, name in names}}
    drawn = {name: series for name, measure in risks.items() if (series := _curves(study, measure))}
    if drawn:
        charts = {name: Lines("", "round", "test loss", series) for name, series in drawn.items()}
        figures.append(Figure("Risk: the global model's loss on test images", charts, pick="domain"))
    terms: dict[str, Chart] = {}
    for name in dict.fromkeys(t for run in study.one_of_each.values() for r in run.records for t in r.losses):
        if series := _curves(study, _term(name)):
            terms[TERMS.get(name, name)] = Lines("", "round", "mean over clients and steps", series)
    if terms:
        note = "Terms are shown without their weights. Training minimises the total."
        figures.append(Figure("Training losses by term", terms, note, pick="term"))
    return Section("Training", tuple(figures))


def _along(study: Study) -> dict[str, tuple[str, Measure | None]]:
    """What accuracy is drawn against, each in the unit that suits it."""
    spent = [ledger(run.records) for by_seed in study.runs.values() for run in by_seed.values()]
    moved, data = unit_of(max(each.bytes_down + each.bytes_up for each in spent), "B")
    computed, flops = unit_of(max(each.flops for each in spent), "FLOPs")
    waited, time = time_unit_of(max(each.seconds.get("total", 0.0) for each in spent))
    return {
        "rounds": ("round", None),
        "data moved": (f"{data} moved, all clients", lambda record: (record.bytes_down + record.bytes_up) / moved),
        "computation": (f"{flops}, all clients", lambda record: record.flops / computed),
        "time": (time, lambda record: record.seconds.get("total", 0.0) / waited),
    }


TERMS = {
    "ce": "cross-entropy",
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
    rows = [["method", "rounds", "data moved", "computation", "time", "peak memory"]]
    for name, by_seed in study.runs.items():
        spent = [ledger(run.records) for run in by_seed.values()]
        moved = statistics.fmean(each.bytes_down + each.bytes_up for each in spent)
        computed = statistics.fmean(each.flops for each in spent)
        seconds = statistics.fmean(each.seconds.get("total", 0.0) for each in spent)
        memory = statistics.fmean(run.peak_memory for run in by_seed.values())
        rows.append([name, f"{spent[0].rounds}", size(moved), flops(computed), duration(seconds), size(memory)])
    goal = [["method", *goal_header(study.baseline, target)]]
    goal += [[method.algorithm, *goal_cells(method, len(study.runs[method.algorithm]))] for method in methods]
    caption = "To reach the target accuracy: all clients together, median over seeds"
    return Section(
        "Cost", (Table(caption, goal), Table("For the whole run: all clients together, mean over seeds", rows))
    )


def settings(study: Study) -> Section:
    """What was run, and how to run it again."""
    shown = [
        *("model.name", "data.image_size", "partition.scheme", "partition.clients", "server.active", "server.rounds"),
        *("local.steps", "local.batch_size", "local.lr", "local.momentum", "local.weight_decay"),
    ]
    tables = {name: shareable(run) for name, run in study.one_of_each.items()}
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
        several = "s" * (len(study.runs[name]) > 1)
        listings.append(Listing(f"{name}: all settings (seed{several} {seeds})", dump_toml(each)))
    again = (
        "To repeat a run, save its settings below as FILE.toml and run `fedcir run FILE.toml --data-root DIR "
        "--seed SEED`. The same versions on the same kind of machine give the same result to the bit.",
        f"Data: {study.dataset}. The manifest.json of each run names every sample and holds a hash of all of them.",
    )
    return Section("Settings", (Words(again), Table("The main settings", rows), *listings))
