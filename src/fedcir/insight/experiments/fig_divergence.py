"""Proxy A-distances under FedAvg against those under FedCiR: every pair of domains, and the mean to the mixture."""

import numpy as np

from fedcir.analysis.diagnose import diagnose_run
from fedcir.analysis.divergence import Divergences
from fedcir.insight.charts import Chart, Lines, Series
from fedcir.insight.experiments.experiment import Experiment, Outcome, Results, number
from fedcir.insight.report.tables import Rows
from fedcir.runs.compare import baseline_of

SAMPLES = 1000
"""Test images of each domain at most."""


def outcome(results: Results) -> Outcome:
    rows: Rows = [["dataset", "domains", *results.algorithms]]
    numbers: Rows = [["dataset", "seed", "one", "other", *results.algorithms]]
    panels: list[Chart] = []
    notes = []
    for dataset in results.datasets:
        found: dict[str, dict[int, Divergences]] = {}
        for name in results.algorithms:
            made = {seed: diagnose_run(run, limit=SAMPLES) for seed, run in results.runs(dataset, name).items()}
            found[name] = {seed: each.apart for seed, each in made.items() if each.measured}
            whys = dict.fromkeys(each.unmeasured for each in made.values() if not each.measured)
            notes += [f"{dataset}: not measured for {name}: {why}." for why in whys]
        seeds = sorted(set.intersection(*(set(each) for each in found.values())))
        if not seeds:
            rows.append([dataset, "no seed has finished for all methods", *("–" for _ in results.algorithms)])
            continue
        first = baseline_of({name: results.runs(dataset, name) for name in results.algorithms})
        names = list(found[first][seeds[0]].pairs)
        for a, b in names:
            values = {name: [found[name][seed].pairs[a, b].value for seed in seeds] for name in found}
            rows.append([dataset, f"{a}, {b}", *(_cell(each) for each in values.values())])
            for place, seed in enumerate(seeds):
                numbers.append([dataset, str(seed), a, b, *(number(each[place]) for each in values.values())])
        mixture = {name: [found[name][seed].mean_to_mixture.value for seed in seeds] for name in found}
        rows.append([dataset, "mean to the mixture", *(_cell(each) for each in mixture.values())])
        for place, seed in enumerate(seeds):
            numbers.append([dataset, str(seed), "mean", "mixture", *(number(v[place]) for v in mixture.values())])
        for other in (name for name in results.algorithms if name != first):
            x, y = (
                tuple(float(np.mean([found[name][seed].pairs[pair].value for seed in seeds])) for pair in names)
                for name in (first, other)
            )
            star = Series("mean to the mixture", (float(np.mean(mixture[first])),), (float(np.mean(mixture[other])),))
            series = (Series("pair of domains", x, y), star)
            axes = (f"proxy A-distance under {first}", f"proxy A-distance under {other}")
            panels.append(Lines(dataset, *axes, series, joined=False, diagonal=True))
            nearer = sum(below < above for above, below in zip(x, y, strict=True))
            notes.append(
                f"{dataset}: {nearer} of {len(x)} pairs of domains are closer under {other} than under {first}."
            )
    return Outcome(rows, numbers, panels, notes)


def _cell(values: list[float]) -> str:
    mean = f"{np.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.2f}"


EXPERIMENT = Experiment(
    "proxy A-distance between domains (0 to 2), mean ± standard deviation over seeds",
    ("domainnet",),
    ("fedavg", "fedcir"),
    outcome,
)
