"""Runs of a report, and its sections on results, training, cost and settings."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.algorithms import PAPER_METHODS
from fedcir.client.cost import sum_costs
from fedcir.config import PATH_SETTINGS, config_to_tables, dump_toml
from fedcir.errors import InputError
from fedcir.inference.model_card import guarantee_of
from fedcir.reporting.charts import Chart, Lines, Measure, plot_runs, risk, score, score_unseen
from fedcir.reporting.methods import (
    UNSEEN,
    describe_gap,
    domain_header,
    domains_of,
    format_difference,
    format_estimate,
    goal_cells,
    goal_header,
    show_estimate,
)
from fedcir.reporting.page import Figure, Listing, Section, Sentences, Table, to_sentence
from fedcir.runs.reader import Run, RunSource, check_same_data, describe_saved_model, to_run
from fedcir.runs.statistics import MIN_SEEDS, MethodResult, choose_baseline, describe_cover
from fedcir.runtime.resume import MAY_DIFFER
from fedcir.text import choose_time_unit, choose_unit, format_bytes, format_duration, format_flops
from fedcir.types import ACCURACY, Metric

TERMS = {"ce": "cross-entropy", "reg": "reg (head on generated z)", "align": "align (KL to the class Gaussians)"}
"""Labels of the most common loss terms."""
MAIN_SETTINGS = (
    *("model.name", "data.image_size", "partition.scheme", "partition.clients", "server.active", "server.rounds"),
    *("local.steps", "local.epochs", "local.batch_size", "local.lr", "local.momentum", "local.weight_decay"),
)


@dataclass(frozen=True)
class Study:
    """Finished runs of one report."""

    dataset: str
    runs: Mapping[str, Mapping[int, Run]]
    """Runs by the method's name and the seed."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, such as on runs that are left out."""

    @property
    def metric(self) -> Metric:
        """Primary metric, which all runs share."""
        return next(iter(self.one_of_each.values())).metric

    @property
    def baseline(self) -> str:
        return choose_baseline(self.runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for by_seed in self.runs.values() for seed in by_seed})

    @property
    def common_seed(self) -> int | None:
        """Smallest seed that every method was run with."""
        return min(set.intersection(*(set(by_seed) for by_seed in self.runs.values())), default=None)

    @property
    def one_of_each(self) -> dict[str, Run]:
        """A run of each method, with the same seed if all have one in common."""
        seed = self.common_seed
        return {name: by_seed[min(by_seed) if seed is None else seed] for name, by_seed in self.runs.items()}


def open_study(sources: Sequence[RunSource], trust_code: bool = False) -> Study:
    """Open the runs that are finished and can be read. They must be on the same data."""
    runs: list[Run] = []
    faults = []
    for source in sources:
        try:
            run = to_run(source, trust_code)
            _ = run.final  # raises if the run is not finished
            rounds = run.summary["rounds"] if run.summary is not None else 0
            if len(run.records) < rounds:
                records = run.path / "rounds.jsonl"
                raise InputError(f"{records} holds {len(run.records)} of {rounds} rounds; the rest is lost")
            runs.append(run)
        except InputError as error:
            faults.append(str(error))
    if not runs:
        raise InputError(faults[0])
    check_same_data(runs)
    runs.sort(key=_rank_method)
    settings = {run.path: _flatten_settings(run) for run in runs}
    by_method: dict[str, dict[int, Run]] = {}
    for run in runs:
        own_settings = settings[run.path]
        same_method = [s for s in settings.values() if s["algorithm.name"] == own_settings["algorithm.name"]]
        values = [f"{key.partition('.')[2]}={own_settings.get(key)}" for key in _find_differing(same_method)]
        name, seed = " ".join([own_settings["algorithm.name"], *values]), run.config.run.seed
        if seed in (by_seed := by_method.setdefault(name, {})):
            raise InputError(f"{by_seed[seed].path} and {run.path} are both {name} with seed {seed}: leave one out")
        by_seed[seed] = run
    notes = [f"left out: {fault}" for fault in faults]
    if differing := [key for key in _find_differing(settings.values()) if not key.startswith("algorithm.")]:
        notes.append(f"these runs differ not only in the method, but also in {', '.join(differing)}")
    return Study(runs[0].config.data.name, by_method, tuple(notes))


def _rank_method(run: Run) -> tuple[int, str]:
    """Sort by the paper's order of methods; others come after, by name."""
    name = run.config.algorithm.name
    return (PAPER_METHODS.index(name), "") if name in PAPER_METHODS else (len(PAPER_METHODS), Path(name).stem)


def shareable_settings(run: Run) -> dict[str, dict[str, Any]]:
    """Return the settings of a run for others to read: file names without folders, and no paths of data."""
    tables = config_to_tables(run.config)
    tables["algorithm"]["name"] = Path(tables["algorithm"]["name"]).name
    for section, name in (key.split(".") for key in PATH_SETTINGS):
        if section == "data":
            tables[section].pop(name, None)
        elif name in tables[section]:
            tables[section][name] = Path(tables[section][name]).name
    return tables


def _flatten_settings(run: Run) -> dict[str, Any]:
    """Settings that distinguish runs, by section.field; the seed is not one of them."""
    tables = shareable_settings(run)
    tables["algorithm"]["name"] = Path(tables["algorithm"]["name"]).stem
    ignored = MAY_DIFFER - {"server.rounds"} | {"run.seed"}
    keys = {f"{section}.{name}": value for section, values in tables.items() for name, value in values.items()}
    return {key: value for key, value in keys.items() if key not in ignored}


def _find_differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the settings whose values differ."""
    tables = list(settings)
    keys = sorted({key for table in tables for key in table})
    return [key for key in keys if len({repr(table.get(key)) for table in tables}) > 1]


def build_results(study: Study, methods: Sequence[MethodResult], notes: Sequence[str]) -> Section:
    """Build the section on scores, their intervals and the differences between methods."""
    metric, (low, high) = study.metric, (0.0, 1.0) if study.metric.is_share else (-math.inf, math.inf)
    unit, points = (" (%)", "points; ") if metric.is_share else ("", "")
    has_seeds = len(study.seeds) > 1
    has_unseen = any(method.unseen for method in methods)
    header = ["method", "seeds", f"{'seen ' * has_unseen}mean{unit}", "95 % interval", f"worst domain{unit}"]
    header += [f"unseen mean{unit}"] if has_unseen else []
    rows = [[*header, f"difference to {study.baseline} ({points}{describe_cover(metric)})"] if has_seeds else header]
    for method in methods:
        mean, half, interval = method.mean.mean, method.mean_half_width, ""
        if half is not None:  # several seeds, or the number of test images is known
            interval = f"{metric.format(max(low, mean - half))} to {metric.format(min(high, mean + half))}"
        row = [method.algorithm, str(len(study.runs[method.algorithm])), format_estimate(method.mean, metric), interval]
        estimates = (method.worst, *([method.unseen_mean] if has_unseen else []))
        row += [format_estimate(estimate, metric) for estimate in estimates]
        rows.append([*row, *([format_difference(method)] if has_seeds else [])])
    source = "seeds and test images, or over test images for a method with one seed" if has_seeds else "test images"
    source = source if metric == ACCURACY else "seeds"
    mean_text = "mean over the domains trained on, and over those not trained on" if has_unseen else "mean over domains"
    spread = " ± is the standard deviation over seeds." if has_seeds else ""
    direction = "" if metric.higher_is_better else " Lower is better."
    caption = f"Test {metric.title} after the last round, {mean_text}.{direction}{spread} Intervals are over {source}"
    described = [*_describe_ranking(study, methods), *_describe_saved_models(study), *describe_privacy(study)]
    return Section("Results", (Sentences((*described, *notes)), Table(caption, rows)))


def _describe_ranking(study: Study, methods: Sequence[MethodResult]) -> list[str]:
    """Describe the best federated method, the ceiling, differences that could be chance, and the weakest domain."""
    federated = [method for method in methods if not method.pools]
    metric, is_accuracy = study.metric, study.metric == ACCURACY
    best, *rest = sorted(federated or methods, key=lambda method: metric.gain(0.0, method.mean.mean))
    sentences = []
    if rest:
        then = " and ".join(f"{method.algorithm} ({show_estimate(method, method.mean)})" for method in rest[:2])
        first = f"{best.algorithm} ({show_estimate(best, best.mean)})"
        most = "most accurate federated method" if is_accuracy else f"federated method with the best {metric.title}"
        sentences.append(f"The {most} is {first}, then {then}.")
    for method in methods if federated else ():
        if method.pools:
            change = method.mean.mean - best.mean.mean
            is_ceiling = metric.gain(change, 0.0) >= 0
            gap = f"{describe_gap(method, change)} {best.algorithm}"
            above = f"a ceiling, {gap}" if is_ceiling else f"less than {best.algorithm}" if is_accuracy else gap
            pooled = f"{method.algorithm} training, which moves all data to one place"
            sentences.append(to_sentence(f"{pooled}, reaches {show_estimate(method, method.mean)}, {above}"))
    sentences += _describe_differences(study, federated)
    seen = [name for name in best.domains if name not in best.unseen]
    worst = min(seen, key=lambda name: metric.gain(best.domains[name].mean, 0.0))
    weakest = show_estimate(best, best.domains[worst])
    sentences.append(f"Under {best.algorithm}, the weakest domain is {worst}: {weakest}.")
    if best.unseen:
        reached = f"{best.algorithm} reaches {show_estimate(best, best.unseen_mean)}"
        mean = f"the mean over the domains trained on is {show_estimate(best, best.mean)}"
        sentences.append(f"On {', '.join(best.unseen)}, which no client trained on, {reached}; {mean}.")
    return sentences


def _describe_differences(study: Study, methods: Sequence[MethodResult]) -> list[str]:
    """Describe which differences to the baseline are more than chance."""
    compared = [method for method in methods if method.difference is not None]
    if compared and len(study.seeds) < MIN_SEEDS:
        seeds = "one seed" if len(study.seeds) == 1 else "two seeds"
        return [f"With {seeds}, every difference between methods could be chance."]
    sentences, unsure = [], []
    for method in compared:
        if method.difference is None or method.half_width is None:
            continue
        if method.is_beyond_chance:
            points = f"{describe_gap(method, method.difference.mean)} {study.baseline}"
            sentences.append(f"{method.algorithm} is {points} ({method.interval}): more than chance.")
        else:
            unsure.append(f"{method.algorithm} ({method.interval})")
    if unsure:
        sentences.append(f"The difference to {study.baseline} could be chance for {', '.join(unsure)}.")
    return sentences


def _describe_saved_models(study: Study) -> list[str]:
    by_run = {
        f"{algorithm}, seed {seed}": describe_saved_model(run.summary)
        for algorithm, by_seed in study.runs.items()
        for seed, run in by_seed.items()
        if run.summary is not None
    }
    if len(set(by_run.values())) == 1:
        return [to_sentence(next(iter(by_run.values())))]
    return [to_sentence(f"{name}: {text}") for name, text in by_run.items()]


def describe_privacy(study: Study) -> list[str]:
    """Describe the privacy guarantee of the methods that add noise."""
    sentences = []
    for algorithm, by_seed in study.runs.items():
        run = next(iter(by_seed.values()))
        if guarantee := guarantee_of(run):
            subject = "Each upload of" if guarantee["place"] == "client" else "The model of"
            unit = "one image" if guarantee["unit"] == "example" else "a whole client"
            bound = f"epsilon {guarantee['epsilon']:.3g} at delta {guarantee['delta']:g}, for {unit}"
            sentences.append(f"{subject} {algorithm} is differentially private: {bound} ({guarantee['adjacency']}).")
            if "key" not in run.manifest:
                sentences.append("Its noise comes from the run's seed: this is an experiment and protects nobody.")
            else:
                sentences.append("Its accuracies were counted without noise, and epsilon does not cover them.")
    return sentences


def build_training(study: Study, methods: Sequence[MethodResult]) -> Section:
    """Build the section on the score, risk and losses during training."""
    plot, metric = partial(plot_runs, study.runs), study.metric

    def risk_in(domain: str) -> Measure:
        return lambda record: None if not record.risk else record.risk.get(domain)

    def loss_term(term: str) -> Measure:
        return lambda record: record.losses.get(term)

    def add_figure(title: str, charts: Mapping[str, Lines], note: str = "", **options: Any) -> None:
        drawn: dict[str, Chart] = {name: chart for name, chart in charts.items() if chart.series}
        if drawn:
            figures.append(Figure(title, drawn, note, **options))

    figures: list[Figure] = []
    has_unseen = any(method.unseen for method in methods)
    averaged = "domains trained on" if has_unseen else "domains"
    hint = "Hover, touch or use the arrow keys to read values."
    if len(study.seeds) > 1:
        hint += " Bands reach from the lowest seed to the highest; they appear while at most four methods are shown."
    axis, axes = f"test {metric.label}", _choose_axes(study)
    scores = {name: plot(score, axis, label, spent) for name, (label, spent) in axes.items()}
    add_figure(f"Test {metric.title}, mean over {averaged}", scores, hint, pick="against", wide=True)
    if has_unseen:
        add_figure(f"Test {metric.title}, mean over domains {UNSEEN}", {"": plot(score_unseen, axis)})
    domains = zip(domain_header(methods), domains_of(methods), strict=True)
    risks = {f"mean over {averaged}": plot(risk, "test loss")}
    risks |= {shown: plot(risk_in(name), "test loss") for shown, name in domains}
    add_figure("Risk: the global model's loss on test data", risks, pick="domain")
    terms = dict.fromkeys(t for run in study.one_of_each.values() for record in run.records for t in record.losses)
    losses = {TERMS.get(term, term): plot(loss_term(term), "mean over clients and steps") for term in terms}
    note = "Terms are shown without their weights. Training minimises the total."
    add_figure("Training losses by term", losses, note, pick="term")
    return Section("Training", tuple(figures))


def _choose_axes(study: Study) -> dict[str, tuple[str, Measure | None]]:
    """Choose the x axes of the score, each with a unit that suits it."""
    costs = [sum_costs(run.records) for by_seed in study.runs.values() for run in by_seed.values()]
    bytes_unit, bytes_name = choose_unit(max(cost.bytes_down + cost.bytes_up for cost in costs), "B")
    flops_unit, flops_name = choose_unit(max(cost.flops for cost in costs), "FLOPs")
    time_unit, time_name = choose_time_unit(max(cost.seconds.get("total", 0.0) for cost in costs))
    return {
        "rounds": ("round", None),
        "data moved": (f"{bytes_name} moved, all clients", lambda r: (r.bytes_down + r.bytes_up) / bytes_unit),
        "computation": (f"{flops_name}, all clients", lambda record: record.flops / flops_unit),
        "time": (time_name, lambda record: record.seconds.get("total", 0.0) / time_unit),
    }


def build_costs(study: Study, methods: Sequence[MethodResult], target: float | None) -> Section:
    """Build the section on costs, of whole runs and to a target score."""
    rows = [["method", "rounds", "data moved", "computation", "time", "peak memory"]]
    for name, by_seed in study.runs.items():
        costs = [sum_costs(run.records) for run in by_seed.values()]
        means = (
            format_bytes(statistics.fmean(cost.bytes_down + cost.bytes_up for cost in costs)),
            format_flops(statistics.fmean(cost.flops for cost in costs)),
            format_duration(statistics.fmean(cost.seconds.get("total", 0.0) for cost in costs)),
            format_bytes(statistics.fmean(run.peak_memory for run in by_seed.values())),
        )
        rows.append([name, f"{costs[0].rounds}", *means])
    goal = [["method", *goal_header(study.baseline, target, study.metric)]]
    goal += [[method.algorithm, *goal_cells(method, len(study.runs[method.algorithm]))] for method in methods]
    caption = f"To reach the target {study.metric.title}: all clients together, median over seeds"
    total = Table("For the whole run: all clients together, mean over seeds", rows)
    return Section("Cost", (Table(caption, goal), total))


def build_settings(study: Study) -> Section:
    """Build the section on settings, and on how to repeat a run."""
    tables = {name: shareable_settings(run) for name, run in study.one_of_each.items()}
    rows = [["setting", "value"]]
    for key in MAIN_SETTINGS:
        section, field = key.split(".")
        values = {name: str(table[section].get(field, "")) for name, table in tables.items()}
        text = "; ".join(f"{name}: {value}" for name, value in values.items())
        if len(set(values.values())) == 1:
            text = next(iter(values.values()))
        if text:
            rows.append([key, text])
    listings = []
    for name, table in tables.items():
        seeds = sorted(study.runs[name])
        noun = "seeds" if len(seeds) > 1 else "seed"
        listings.append(Listing(f"{name}: all settings ({noun} {', '.join(map(str, seeds))})", dump_toml(table)))
    instructions = (
        "To repeat a run, save its settings below as FILE.toml and run `fedcir run FILE.toml --data-root DIR "
        "--seed SEED`. The same versions on the same kind of machine give the same result to the bit.",
        f"Data: {study.dataset}. The manifest.json of each run names every sample and holds a hash of all of them.",
    )
    return Section("Settings", (Sentences(instructions), Table("The main settings", rows), *listings))
