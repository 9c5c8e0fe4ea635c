"""The tables of docs/results.md, from the published runs: `make docs` writes them there.

Every row is compared with FedAvg on BatchNorm, seed by seed.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.insight.report.tables import markdown
from fedcir.runs.compare import Estimate, half_width

HERE = Path(__file__).parent
BASE = "fedavg"
CEILING = "centralized"
MAIN = ("fedavg", "fedcir", "fedgen", "fedbn", "fedcirplus", "centralized", "centralizedbatch")
NORMS = {"": "BatchNorm", "-invariant": "invariant"}


@dataclass(frozen=True)
class Row:
    algorithm: str
    norm: str
    runs: Mapping[int, dict[str, Any]]
    """What was published, by seed."""

    def finals(self, name: str) -> dict[int, float]:
        return {seed: run["summary"]["final"][name] for seed, run in self.runs.items()}


def rows_of(study: str, main: bool) -> Iterator[Row]:
    """The main rows, or the others in the order of their names; BatchNorm's first."""
    for suffix, norm in NORMS.items():
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted((HERE / f"{study}{suffix}").glob("*.json")):
            name, _, seed = path.stem.rpartition("-")
            found.setdefault(name, {})[int(seed)] = json.loads(path.read_text(encoding="utf-8"))
        names = MAIN if main else sorted(found.keys() - set(MAIN))
        yield from (Row(name, norm, found[name]) for name in names if name in found)


def percent(values: list[float]) -> str:
    estimate = Estimate.of(values)
    return f"{100 * estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {100 * estimate.std:.1f}")


def paired(row: Row, base: Mapping[int, float]) -> list[float]:
    return [mean - base[seed] for seed, mean in row.finals("accuracy_mean").items() if seed in base]


def difference(values: list[float]) -> str:
    """Its mean, and half of its 95 % interval."""
    if not values:
        return ""
    shown = f"{100 * statistics.fmean(values):+.1f}"
    return shown if len(values) == 1 else f"{shown} ± {100 * half_width(values):.1f}"


def matched(row: Row, base: Mapping[int, float]) -> tuple[str, str]:
    """Rounds, and megabytes both ways, until FedAvg's last accuracy of the same seed: medians."""
    rounds = [
        next((int(at) for at, value in run["accuracy_mean"].items() if value >= round(base[seed], 4)), None)
        for seed, run in row.runs.items()
        if seed in base
    ]
    if not rounds or None in rounds:
        reached = sum(each is not None for each in rounds)
        return f"{reached} of {len(rounds)} seeds", ""
    at = statistics.median(each for each in rounds if each is not None)
    cost = next(iter(row.runs.values()))["summary"]
    each = (cost["cost"]["bytes_down"] + cost["cost"]["bytes_up"]) / cost["rounds"]
    return f"{at:g}", f"{at * each / 1e6:.0f}"


def table(which: str) -> str:
    """Of a study's main rows, or of its other methods: `pacs`, or `pacs others`."""
    study, _, others = which.partition(" ")
    first = {row.algorithm: row for row in rows_of(study, main=True) if row.norm == "BatchNorm"}
    base = first[BASE].finals("accuracy_mean")
    gap = statistics.fmean(paired(first[CEILING], base)) if CEILING in first else None
    rows = list(rows_of(study, main=not others))
    domains = list(next(iter(rows[0].runs.values()))["summary"]["final"]["accuracy"])
    header = ["method", "norm", "seeds", "mean", "difference to fedavg (95 %)", "gap closed", "worst", *domains]
    cells = [[*header, "rounds to match fedavg", "MB to match fedavg"]]
    for row in rows:
        means, gains = row.finals("accuracy_mean"), paired(row, base)
        is_base = row.algorithm == BASE and row.norm == "BatchNorm"
        closed = "" if is_base or not gap else f"{100 * statistics.fmean(gains) / gap:.0f} %"
        by_domain = [[run["summary"]["final"]["accuracy"][name] for run in row.runs.values()] for name in domains]
        shown = [row.algorithm, row.norm, f"{len(means)}", percent(list(means.values()))]
        shown += ["" if is_base else difference(gains), closed, percent(list(row.finals("accuracy_worst").values()))]
        cells.append([*shown, *map(percent, by_domain), *matched(row, base)])
    return markdown(cells)


def beyond_half(study: str, algorithm: str, norm: str = "invariant") -> str:
    """How far a method is above the middle between FedAvg and Centralized, seed by seed: above zero, it closed half."""
    rows = {(row.algorithm, row.norm): row.finals("accuracy_mean") for row in rows_of(study, main=True)}
    base, ceiling = rows[BASE, "BatchNorm"], rows[CEILING, "BatchNorm"]
    found = rows[algorithm, norm]
    return difference([found[s] - (base[s] + ceiling[s]) / 2 for s in found if s in base and s in ceiling])
