"""The tables and figures of README.md and docs/ from the published runs: `make docs` writes them there.

Every row is compared with FedAvg on BatchNorm, seed by seed.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence

from published import (
    BASE,
    CEILING,
    HERE,
    Row,
    common_seeds,
    difference,
    ends,
    gap_closed,
    percent,
    published,
    signed,
)

from fedcir.experiments.paper import published_accuracy
from fedcir.reporting.page import join_markdown
from fedcir.runs.statistics import COVERS

MAIN = ("fedavg", "fedcir", "fedgen", "fedbn", "fedcirplus", "centralized", "centralizedbatch")
NORMS = {"batch": "BatchNorm", "invariant": "invariant"}
GAINS = {
    "pacs": ("PACS", "cnn, 32 pixels, 100 rounds of 20 steps"),
    "pacs-long": ("PACS", "cnn, 32 pixels, 25 rounds of 100 steps"),
    "pacs-resnet18": ("PACS", "resnet18, width 16, 64 pixels, 60 rounds"),
    "pacs-skew": ("PACS, label skew", "cnn, 60 rounds, 10 of 20 clients, beta 0.1"),
    "digits": ("four real digit domains", "cnn, 500 images each, 60 rounds"),
    "office-caltech-10": ("Office-Caltech-10", "cnn, 32 pixels, 100 rounds"),
}
"""Data and scale of the studies that README.md compares."""


def rows_of(study: str, main: bool) -> Iterator[Row]:
    """The main rows, or the others in the order of their names; BatchNorm's first."""
    for norm, suffix in (("batch", ""), ("invariant", "-invariant")):
        found = published(f"{study}{suffix}")
        names = MAIN if main else sorted(found.keys() - set(MAIN))
        yield from (Row(study, name, norm) for name in names if name in found)


def matched(row: Row) -> tuple[str, str]:
    """Rounds, and megabytes both ways, until FedAvg's last accuracy of the same seed: medians."""
    base = Row(row.study, BASE)
    rounds = []
    for seed in common_seeds(row, base):
        target = round(base.runs[seed]["summary"]["final"]["accuracy_mean"], 4)
        curve = row.runs[seed]["accuracy_mean"].items()
        rounds.append(next((int(at) for at, value in curve if value >= target), None))
    if not rounds or None in rounds:
        reached = sum(each is not None for each in rounds)
        return f"{reached} of {len(rounds)} seeds", ""
    at = statistics.median(each for each in rounds if each is not None)
    cost = next(iter(row.runs.values()))["summary"]
    each = (cost["cost"]["bytes_down"] + cost["cost"]["bytes_up"]) / cost["rounds"]
    return f"{at:g}", f"{at * each / 1e6:.0f}"


def closed(row: Row) -> str:
    """The share of the gap that a row closes, and on how many seeds if not on all of its own."""
    found = gap_closed(row)
    if found is None:
        return ""
    share, seeds = found
    return f"{100 * share:.0f} %" + ("" if seeds == len(row.runs) else f" ({seeds} seeds)")


def table(which: str) -> str:
    """Write one table: a study's main rows (`pacs`), its other methods (`pacs others`), or one of `TABLES`."""
    study, _, part = which.partition(" ")
    return TABLES[part](study) if part in TABLES else study_table(study, part == "others")


def study_table(study: str, others: bool) -> str:
    rows = list(rows_of(study, main=not others))
    base = Row(study, BASE)
    domains = list(next(iter(rows[0].runs.values()))["summary"]["final"]["accuracy"])
    header = ["method", "norm", "seeds", "mean", f"difference to fedavg ({COVERS})"]
    ceilings = CEILING in published(study)
    if ceilings:
        header += ["gap closed", f"difference to centralized on the same norm ({COVERS})"]
    cells = [[*header, "worst", *domains, "rounds to match fedavg", "MB to match fedavg"]]
    for row in rows:
        ceiling = Row(study, CEILING, row.norm)
        shown = [row.algorithm, NORMS[row.norm], f"{len(row.runs)}", percent(row.finals("accuracy_mean"))]
        shown.append("" if row == base else signed(difference(row, base)))
        if ceilings:
            shown += ["" if row == base else closed(row), "" if row == ceiling else signed(difference(row, ceiling))]
        shown.append(percent(row.finals("accuracy_worst")))
        cells.append([*shown, *(percent(row.domain(name)) for name in domains), *matched(row)])
    return join_markdown(cells)


def paper_table(study: str) -> str:
    """The methods of the paper's Table 1 beside its numbers, on seeds 0, 1 and 2."""
    with open(HERE / "distances.json", encoding="utf-8") as file:
        distances = json.load(file)[study]
    header = ["method", "accuracy", "paper's", f"difference to fedavg ({COVERS})", "distance of clients"]
    cells = [[*header, "change to fedavg (95 %, seeds)"]]
    base = Row(study, BASE)
    for name, (distance, change) in distances.items():
        row, theirs = Row(study, name), published_accuracy(name, study)
        accuracy = percent([row.runs[seed]["summary"]["final"]["accuracy_mean"] for seed in range(3)])
        printed = "" if theirs is None else f"{theirs[0]:.1f} ± {theirs[1]:.1f}"
        gain = "" if name == BASE else signed(difference(row, base, range(3)))
        cells.append([name, accuracy, printed, gain, distance, change])
    return join_markdown(cells)


def align_table(study: str) -> str:
    """FedCiR on other weights of its alignment."""
    with open(HERE / "distances.json", encoding="utf-8") as file:
        distances = json.load(file)
    header = ["FedCiR, 3 seeds", "accuracy", f"difference to fedavg ({COVERS})", "distance of clients"]
    cells = [[*header, "change to fedavg (95 %, seeds)"]]
    for folder, name in (
        ("-plain", "`lambda_align = 0, lambda_reg = 0` (plain)"),
        ("", "`lambda_align = 5e-7` (the paper's)"),
        ("-align-1e-4", "`lambda_align = 1e-4`"),
        ("-align-1e-3", "`lambda_align = 1e-3`"),
        ("-align-1e-2", "`lambda_align = 1e-2`"),
    ):
        row = Row(f"{study}{folder}", "fedcir")
        gain = signed(difference(row, Row(study, BASE)))
        cells.append([name, percent(row.finals("accuracy_mean")), gain, *distances[row.study]["fedcir"]])
    return join_markdown(cells)


def curve_table(study: str) -> str:
    """Mean accuracy over the rounds of every run of a study, and the paper's after 300 rounds."""
    columns = [(name, seed, run) for name, runs in published(study).items() for seed, run in runs.items()]
    runs = [(run, run["summary"]["final"]) for _, _, run in columns]
    rounds = sorted({int(round) for _, _, run in columns for round in run["accuracy_mean"]})
    cells = [["round", *(f"{name}, seed {seed}" for name, seed, _ in columns)]]
    for round in (round for round in rounds if round % 10 == 0):
        curves = ({**run["accuracy_mean"], str(final["round"]): final["accuracy_mean"]} for run, final in runs)
        values = (curve.get(str(round)) for curve in curves)
        cells.append([f"{round}", *("" if value is None else f"{100 * value:.1f}" for value in values)])
    theirs = (published_accuracy(name, study.partition("-paper")[0]) for name, _, _ in columns)
    cells.append(["paper, 300", *("" if value is None else f"{value[0]:.1f} ± {value[1]:.1f}" for value in theirs)])
    return join_markdown(cells)


def domains_table(study: str) -> str:
    """Accuracy by domain after the last round of every run of a study."""
    columns = [
        (name, seed, run["summary"]["final"]) for name, runs in published(study).items() for seed, run in runs.items()
    ]
    domains = list(columns[0][2]["accuracy"])
    cells = [["run", "rounds", "mean", *domains]]
    for name, seed, final in columns:
        accuracies = [final["accuracy_mean"], *(final["accuracy"][domain] for domain in domains)]
        cells.append([f"{name}, seed {seed}", f"{final['round']}", *(f"{100 * value:.1f}" for value in accuracies)])
    return join_markdown(cells)


def shift_table(study: str) -> str:
    """What the shift costs FedAvg on the digits, and where."""
    rows = {
        "fedavg, no shift: `partition.scheme=iid`": Row(f"{study}-iid", "fedavg"),
        "fedavg, `model.batchnorm=local`": Row(f"{study}-local", "fedavg"),
        "fedcir, `model.batchnorm=local`": Row(f"{study}-local", "fedcir"),
    }
    domains = list(next(iter(Row(study, BASE).runs.values()))["summary"]["final"]["accuracy"])
    cells = [["FedAvg / FedCiR, 3 seeds", *domains, "mean", "worst"]]
    for name, row in rows.items():
        by_domain = [percent(row.domain(domain)) for domain in domains]
        cells.append([name, *by_domain, percent(row.finals("accuracy_mean")), percent(row.finals("accuracy_worst"))])
    return join_markdown(cells)


def norms_table(study: str) -> str:
    """The main methods on both norms, as README.md shows them."""
    names = {
        "FedAvg": "fedavg",
        "FedCiR": "fedcir",
        "FedCiRPlus": "fedcirplus",
        "all data in one place, as many steps as a client takes": "centralizedbatch",
        "all data in one place, as many steps as all clients take": "centralized",
    }
    cells = [["", "BatchNorm", "`--norm invariant`"]]
    for shown, name in names.items():
        cells.append([shown, *(percent(Row(study, name, norm).finals("accuracy_mean")) for norm in NORMS)])
    return join_markdown(cells)


def gains_table(which: str) -> str:
    """FedAvg on BatchNorm, FedCiRPlus on the invariant network and Centralized on both: all studies."""
    one_place = "all data in one place, BatchNorm / invariant"
    cells = [["data", "scale", "seeds", "FedAvg", "FedCiRPlus", f"gain ({COVERS})", one_place]]
    for study, about in GAINS.items():
        base, ours = Row(study, BASE), Row(study, "fedcirplus", "invariant")
        seeds = common_seeds(base, ours)
        gain = difference(ours, base)
        assert gain is not None
        points = f"{100 * gain.mean:.1f}"
        shown = f"**{points}** ({ends(gain)})" if gain.is_beyond_chance else f"{points} ({ends(gain)})"
        means = [f"{100 * statistics.fmean(_accuracies(row, None, seeds)):.1f}" for row in (base, ours)]
        both = [Row(study, CEILING, norm).finals("accuracy_mean") for norm in NORMS]
        ceiling = " / ".join(f"{100 * statistics.fmean(values):.1f}" for values in both)
        cells.append([*about, f"{len(seeds)}", *means, shown, ceiling])
    return join_markdown(cells)


def fedcir_table(which: str) -> str:
    """FedCiR and FedAvg, both on BatchNorm: all studies."""
    cells = [["data", "scale", "seeds", f"difference in points ({COVERS})"]]
    for study, about in GAINS.items():
        row, base = Row(study, "fedcir"), Row(study, BASE)
        cells.append([*about, f"{len(common_seeds(row, base))}", signed(difference(row, base))])
    return join_markdown(cells)


def choices_table(study: str) -> str:
    """FedCiR with one field changed at a time, on validation images: the runs of benchmarks/choices.py."""
    base = Row(study, "01")  # FedCiR with its defaults
    covers = "validation images" if len(base.runs) == 1 else "seeds and validation images"
    header = ["method", "changed", "seeds", "validation accuracy, mean over domains (%)"]
    cells = [[*header, f"difference to fedcir (95 %, {covers})"]]
    defaults = base.runs[0]["config"]["algorithm"]
    for number in published(study):
        row = Row(study, number)
        fields = row.runs[0]["config"]["algorithm"]
        changed = {name: value for name, value in fields.items() if name != "name" and value != defaults.get(name)}
        values = [f"{value:g}" if isinstance(value, float) else f"{value}" for value in changed.values()]
        text = ", ".join(f"`{name} = {value}`" for name, value in zip(changed, values, strict=True))
        gain = difference(row, base)
        assert gain is not None
        assert gain.half_width is not None
        shown = "" if row == base else f"{100 * gain.mean:+.1f} ± {100 * gain.half_width:.1f}"
        cells.append([fields["name"], text, f"{len(row.runs)}", percent(row.finals("accuracy_mean")), shown])
    return join_markdown(cells).replace("---:", "---", 1)


TABLES: dict[str, Callable[[str], str]] = {
    "paper": paper_table,
    "align": align_table,
    "changed": choices_table,
    "shift": shift_table,
    "curve": curve_table,
    "domains": domains_table,
    "norms": norms_table,
    "gains": gains_table,
    "fedcir": fedcir_table,
}


def figure(spec: str) -> str:
    """Write one figure of a sentence.

    `mean STUDY ROW [DOMAIN]` is an accuracy in per cent, `spread` with its standard deviation over seeds.
    `points STUDY ROW - ROW` is a difference, `gain` with both ends of its interval, `difference` with a sign and half
    of its interval, `below` the same turned round, `verdict` whether it is more than chance. `seeds 0,1,2` at the end
    restricts them. `closed STUDY ROW` is the share of the gap, `rounds STUDY ROW` how many it takes to match FedAvg.
    """
    match = re.fullmatch(r"(\w+) ([\w-]+) (\w+/\w+)(?: - (\w+/\w+))?(?: (?!seeds)(\w+))?(?: seeds ([\d,]+))?", spec)
    if match is None:
        raise ValueError(f"no figure {spec!r}: see results/table.py")
    kind, study, first, second, domain, listed = match.groups()
    row = Row(study, *first.split("/"))
    seeds = None if listed is None else [int(seed) for seed in listed.split(",")]
    if kind in ("mean", "spread"):
        values = _accuracies(row, domain, seeds)
        return percent(values) if kind == "spread" else f"{100 * statistics.fmean(values):.1f}"
    if kind == "closed":
        return closed(row)
    if kind == "rounds":
        return matched(row)[0]
    interval = None if second is None else difference(row, Row(study, *second.split("/")), seeds)
    if interval is None or kind not in ("verdict", "below", "points", "gain", "difference"):
        raise ValueError(f"no figure {spec!r}: see results/table.py")
    if kind == "verdict":
        return "more than chance" if interval.is_beyond_chance else "which could be chance"
    points = 100 * interval.mean
    if kind == "below":
        return f"{-points:.1f} ± {100 * (interval.half_width or 0):.1f}"
    return {"points": f"{points:.1f}", "gain": f"{points:.1f} ({ends(interval)})", "difference": signed(interval)}[kind]


def _accuracies(row: Row, domain: str | None, seeds: Sequence[int] | None) -> list[float]:
    finals = [run["summary"]["final"] for seed, run in row.runs.items() if seeds is None or seed in seeds]
    return [final["accuracy_mean"] if domain is None else final["accuracy"][domain] for final in finals]
