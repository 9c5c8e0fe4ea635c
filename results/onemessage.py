"""Make the runs of docs/what-helps.md on one message: FedCiROne and methods in rounds on the same frozen features.

python results/onemessage.py --pacs DIR --lists DIR --office DIR --digits DIR [--only STUDY ...] [--seeds 0 1 2]

Each finished run is published in results/<study>/<row>-<seed>.json; those that are there are not made again. The stages
and the learning rate of methods in rounds (0.003 of 0.001 to 0.1) were chosen on validation images of PACS, seed 0.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from collect import publish
from published import Runs, percent, published

from fedcir.reporting.page import join_markdown

RESULTS = Path(__file__).parent
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
LITE0 = ("--model", "efficientnet-lite0")
BOTH = ("--model", "efficientnet-lite0+efficientnet-lite2")
NATIVE = ("--set", "model.native_size=true")
STAGES = ("--set", "model.stages=5")
BEST = (*LITE0, *NATIVE, *STAGES)
ROUNDS = ("--rounds", "60", "--eval-every", "10", "--lr", "0.003")
STUDIES = {
    "pacs-one": BEST,
    "pacs-one-last128": LITE0,
    "pacs-one-last224": (*LITE0, *NATIVE),
    "pacs-one-both": (*BOTH, *STAGES),
    "pacs-one-clients100": (*BEST, "--clients", "100", "--beta", "0.1"),
    **{f"pacs-one-without-{domain}": (*BEST, "--hold-out", domain) for domain in DOMAINS},
    "office-caltech-10-one": BEST,
    "digits-one": (*BEST, "--set", "data.train_per_domain=500"),
}
ONE = {
    name: ("--algorithm", "fedcirone", "--set", f"algorithm.standardise={name}") for name in ("federation", "domain")
}
ROWS = {
    "fedcirone": ("--algorithm", "fedcirone"),
    **ONE,
    **{name: ("--algorithm", name, *ROUNDS) for name in ("fedavg", "fedcirplus", "fedproto")},
}
"""Arguments of the rows: FedCiROne by its defaults and with two fixed statistics, and methods in rounds."""
BESIDE = {"pacs-one", "pacs-one-clients100", "digits-one"}
"""Studies with all rows; the others have FedCiROne by its defaults."""


FEATURES = {
    "pacs-one-last128": "Lite0, 128 pixels, last layer",
    "pacs-one-last224": "Lite0, 224 pixels, last layer",
    "pacs-one": "Lite0, 224 pixels, five stages",
    "pacs-one-both": "Lite0 at 224 and Lite2 at 260 pixels, five stages",
}
LABELS = {
    "fedcirone": "fedcirone",
    "federation": "fedcirone, `standardise=federation`",
    "domain": "fedcirone, `standardise=domain`",
}


class Job(NamedTuple):
    study: str
    row: str
    seed: int

    @property
    def published(self) -> Path:
        return RESULTS / self.study / f"{self.row}-{self.seed}.json"


def list_jobs(seeds: list[int]) -> Iterator[Job]:
    """One seed after the other, so that a table can be read early."""
    for seed in seeds:
        for study in STUDIES:
            for row in ROWS if study in BESIDE else ("fedcirone",):
                yield Job(study, row, seed)


def table(which: str) -> str:
    """Write a table: the rows of a study, or `features` or `unseen`."""
    return TABLES[which]() if which in TABLES else study_table(which)


def study_table(study: str) -> str:
    rows = {name: published(study)[name] for name in ROWS if name in published(study)}
    domains = list(next(iter(next(iter(rows.values())).values()))["summary"]["final"]["accuracy"])
    cells = [["method", "seeds", "mean", "worst", *domains, "rounds", "MB moved"]]
    for name, runs in rows.items():
        cost = next(iter(runs.values()))["summary"]
        moved = (cost["cost"]["bytes_up"] + cost["cost"]["bytes_down"]) / 1e6
        means = [f"{100 * statistics.fmean(finals(runs, 'accuracy', domain)):.1f}" for domain in domains]
        cells.append([LABELS.get(name, name), f"{len(runs)}", *accuracies(runs), *means])
        cells[-1] += [f"{cost['rounds']}", f"{moved:,.0f}"]
    return join_markdown(cells)


def features_table() -> str:
    """Mean and worst domain of PACS by features."""
    cells = [["features", "seeds", "mean", "worst"]]
    for study, about in FEATURES.items():
        for runs in filter(None, [published(study).get("fedcirone")]):
            cells.append([about, f"{len(runs)}", *accuracies(runs)])
    return join_markdown(cells)


def unseen_table() -> str:
    """Accuracy on the domain of PACS that is left out, trained on the other three."""
    cells = [["domain that is left out", "seeds", "accuracy on it"]]
    for domain in DOMAINS:
        for runs in filter(None, [published(f"pacs-one-without-{domain}").get("fedcirone")]):
            cells.append([domain, f"{len(runs)}", percent(finals(runs, "accuracy_unseen"))])
    return join_markdown(cells)


TABLES = {"features": features_table, "unseen": unseen_table}


def finals(runs: Runs, name: str, domain: str | None = None) -> list[float]:
    """Last accuracies of runs, of all domains or of one."""
    values = [run["summary"]["final"][name] for run in runs.values()]
    return values if domain is None else [value[domain] for value in values]


def accuracies(runs: Runs) -> list[str]:
    """Mean and worst domain over seeds, in per cent."""
    return [percent(finals(runs, "accuracy_mean")), percent(finals(runs, "accuracy_worst"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pacs", "lists", "office", "digits"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/onemessage"))
    parser.add_argument("--only", nargs="*", help="studies or rows")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    data = {
        "pacs": ("--dataset", "pacs", "--data-root", options.pacs, "--set", f"data.lists={options.lists}"),
        "office-caltech-10": ("--dataset", "office-caltech-10", "--data-root", options.office),
        "digits": ("--dataset", "arrays", "--data-root", options.digits),
    }
    common = ("--set", "model.freeze=true", "--set", "data.val_fraction=0.1", "--quiet", "--no-report")
    for job in list_jobs(options.seeds):
        if job.published.exists() or (options.only and not {job.study, job.row} & set(options.only)):
            continue
        out = options.runs / job.study / f"{job.row}-{job.seed}"
        out.parent.mkdir(parents=True, exist_ok=True)
        dataset = data[re.sub("-one.*", "", job.study)]
        size = () if "digits" in job.study else ("--image-size", "128")
        command = [sys.executable, "-m", "fedcir", "run", *dataset, *size, *common, *STUDIES[job.study], *ROWS[job.row]]
        subprocess.run(
            [*command, "--seed", str(job.seed), "--out", str(out), *(["--resume"] * out.exists())], check=True
        )
        job.published.parent.mkdir(exist_ok=True)
        publish(out, job.published)
        final = json.loads(job.published.read_text(encoding="utf-8"))["summary"]["final"]
        print(f"{job.study} {job.row}-{job.seed}: {100 * final['accuracy_mean']:.1f}", flush=True)


if __name__ == "__main__":
    main()
