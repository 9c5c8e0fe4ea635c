"""Published runs as values: the accuracies of a study's rows, and their intervals over seeds and test images.

A row is written `algorithm/norm`, as in `fedcirplus/invariant`. Runs that were published before hits were kept take the
number of their test images from test_images.json, which says also whether all seeds share them: those of PACS are the
official lists, those of the digits are given, and Office-Caltech-10 is split anew by every seed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedcir.runs.statistics import Estimate, MeanInterval, RunScores, mean_interval

HERE = Path(__file__).parent
SUFFIXES = {"batch": "", "invariant": "-invariant"}
BASE, CEILING = "fedavg", "centralized"
Runs = Mapping[int, dict[str, Any]]
"""What was published, by seed."""


@dataclass(frozen=True)
class Row:
    study: str
    algorithm: str
    norm: str = "batch"

    @property
    def runs(self) -> Runs:
        return published(f"{self.study}{SUFFIXES[self.norm]}").get(self.algorithm, {})

    def finals(self, name: str) -> list[float]:
        return [run["summary"]["final"][name] for run in self.runs.values()]

    def domain(self, name: str) -> list[float]:
        return [run["summary"]["final"]["accuracy"][name] for run in self.runs.values()]


@cache
def published(folder: str) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs of a folder by algorithm and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted((HERE / folder).glob("*.json")):
        name, _, seed = path.stem.rpartition("-")
        found.setdefault(name, {})[int(seed)] = json.loads(path.read_text(encoding="utf-8"))
    return {name: dict(sorted(by_seed.items())) for name, by_seed in found.items()}


@cache
def load_test_images() -> dict[str, Any]:
    """Test images by dataset and domain."""
    counted: dict[str, Any] = json.loads((HERE / "test_images.json").read_text(encoding="utf-8"))
    return counted


def run_accuracy(run: Mapping[str, Any]) -> RunScores:
    """A published run as intervals take it."""
    summary = run["summary"]
    accuracy = summary["final"]["accuracy"]
    if "test" in run:
        test = run["test"]
        hits = {
            name: np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=test["images"][name]).astype(bool)
            for name, text in test.get("hits", {}).items()
        }
        return RunScores(accuracy, test["images"], test["set"], hits)
    counted = load_test_images()[summary["dataset"]]
    return RunScores(accuracy, counted["images"], "shared" if counted["shared"] else f"seed {summary['seed']}")


def common_seeds(*rows: Row) -> list[int]:
    return sorted(set.intersection(*(set(row.runs) for row in rows)))


def difference(row: Row, other: Row, seeds: Sequence[int] | None = None) -> MeanInterval | None:
    """Of two rows, over the seeds that both have; None if there is none."""
    common = common_seeds(row, other) if seeds is None else list(seeds)
    if not common:
        return None
    return mean_interval(*([run_accuracy(each.runs[seed]) for seed in common] for each in (row, other)))


def gap_closed(row: Row) -> tuple[float, int] | None:
    """Gain over FedAvg as a share of Centralized's, both on BatchNorm, over the seeds that all three have.

    The share and the number of these seeds; None without any.
    """
    base, ceiling = Row(row.study, BASE), Row(row.study, CEILING)
    seeds = common_seeds(row, base, ceiling)
    gain, gap = difference(row, base, seeds), difference(ceiling, base, seeds)
    return None if gain is None or gap is None else (gain.mean / gap.mean, len(seeds))


def percent(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, in per cent."""
    estimate = Estimate.of(values)
    return f"{100 * estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {100 * estimate.std:.1f}")


def signed(interval: MeanInterval | None, digits: int = 1) -> str:
    """A difference in points and half of its interval, which one seed does not have."""
    if interval is None:
        return ""
    shown = f"{100 * interval.mean:+.{digits}f}"
    if interval.seed_half_width is None or interval.half_width is None:
        return shown
    return f"{shown} ± {100 * interval.half_width:.{digits}f}"


def ends(interval: MeanInterval) -> str:
    """Both ends of an interval, in points."""
    assert interval.half_width is not None
    low, high = (100 * (interval.mean + sign * interval.half_width) for sign in (-1, 1))
    return f"{low:.1f} to {high:.1f}"
