"""The tables of docs/results.md, from the published runs: python results/table.py pacs digits ...

Every row is compared with FedAvg on BatchNorm, seed by seed.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.insight.report.tables import markdown
from fedcir.runs.compare import Estimate, half_width

HERE = Path(__file__).parent
BASE = "fedavg"


@dataclass(frozen=True)
class Row:
    name: str
    runs: dict[int, dict[str, Any]]
    """What was published, by seed."""

    def finals(self, name: str) -> dict[int, float]:
        return {seed: run["summary"]["final"][name] for seed, run in self.runs.items()}


def rows_of(study: str) -> list[Row]:
    """One for each algorithm and norm, BatchNorm's first."""
    rows = []
    for folder, suffix in ((HERE / study, ""), (HERE / f"{study}-invariant", ", invariant")):
        by_name: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.json")):
            name, _, seed = path.stem.rpartition("-")
            by_name.setdefault(name, {})[int(seed)] = json.loads(path.read_text(encoding="utf-8"))
        rows += [Row(name + suffix, dict(sorted(runs.items()))) for name, runs in by_name.items()]
    return rows


def percent(values: list[float]) -> str:
    estimate = Estimate.of(values)
    return f"{100 * estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {100 * estimate.std:.1f}")


def matched(row: Row, base: dict[int, float]) -> tuple[str, str]:
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


def table(study: str) -> str:
    rows = rows_of(study)
    base = next(row.finals("accuracy_mean") for row in rows if row.name == BASE)
    domains = list(next(iter(rows[0].runs.values()))["summary"]["final"]["accuracy"])
    header = ["method", *domains, "mean", "worst", "rounds to match fedavg", "MB to match fedavg"]
    cells = [[*header, "difference to fedavg (95 %)", "seeds"]]
    for row in rows:
        means = row.finals("accuracy_mean")
        paired = [mean - base[seed] for seed, mean in means.items() if seed in base]
        difference = "" if row.name == BASE or not paired else f"{100 * statistics.fmean(paired):+.1f}"
        if difference and len(paired) > 1:
            difference += f" ± {100 * half_width(paired):.1f}"
        by_domain = [[run["summary"]["final"]["accuracy"][name] for run in row.runs.values()] for name in domains]
        worst = percent(list(row.finals("accuracy_worst").values()))
        accuracies = [percent(values) for values in by_domain]
        mean, seeds = percent(list(means.values())), str(len(means))
        cells.append([row.name, *accuracies, mean, worst, *matched(row, base), difference, seeds])
    return markdown(cells)


if __name__ == "__main__":
    for study in sys.argv[1:]:
        print(f"## {study}\n\n{table(study)}")
