"""Make the runs of docs/results.md: those that are not published yet, two at a time, each published as it ends.

python results/campaign.py --pacs DIR --lists DIR --office DIR --digits DIR --minutes 60

A run that was stopped is resumed. `--plan` only says what is left to do.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from collect import publish

HERE = Path(__file__).parent
MAIN = ("fedavg", "fedcirplus", "centralized", "fedcir", "fedgen", "fedbn")
CEILINGS = (*MAIN, "centralizedbatch")
OTHERS = ("fedprox", "fedproc", "fedsr", "fedreg", "fedalign", "fedavgm", "fedadam", "scaffold", "moon", "feddyn")
OTHERS += ("fedproto", "fpl", "fedfa", "fedlc")
NORMS = ("batch", "invariant")
HEADLINE = (("fedavg", "batch"), ("fedcirplus", "invariant"), ("centralized", "batch"))
"""The runs that the headline for label skew compares."""
FRESH_SEEDS = (5, 6, 7)
"""Seeds of that headline that were declared on 2026-11-18 before any of their runs. All of them are published."""
GIVEN_NORM = ("-frozen", "-finetuned", "-scratch")
"""Studies of one norm."""
CNN = ("--image-size", "32", "--model", "cnn", "--set", "data.train_per_domain=2000")
FROZEN = ("--image-size", "128", "--model", "efficientnet-lite0", "--set", "model.freeze=true", "--rounds", "60")
# As long as the frozen encoder takes for its features and 60 rounds.
SCRATCH = ("--image-size", "128", "--model", "resnet18", "--rounds", "2", "--eval-every", "2")
SETTINGS = {
    "pacs": ("--preset", "pacs", *CNN, "--rounds", "100"),
    "digits": ("--dataset", "arrays", "--set", "data.train_per_domain=500", "--rounds", "60"),
    "office-caltech-10": ("--preset", "office-caltech-10", *CNN, "--rounds", "100"),
    "minidigits": (),
    "pacs-skew": ("--preset", "pacs", *CNN, "--rounds", "60", "--clients", "20", "--active", "10", "--beta", "0.1"),
    "pacs-long": ("--preset", "pacs", *CNN, "--rounds", "25", "--local-steps", "100"),
    "pacs-frozen": ("--preset", "pacs", *FROZEN),
    "office-caltech-10-frozen": ("--preset", "office-caltech-10", *FROZEN),
    "pacs-scratch": ("--preset", "pacs", *SCRATCH),
    "office-caltech-10-scratch": ("--preset", "office-caltech-10", *SCRATCH),
    "office-caltech-10-finetuned": (
        *("--preset", "office-caltech-10", "--image-size", "64", "--model", "efficientnet-lite0", "--rounds", "20"),
        *("--set", "model.batchnorm=frozen", "--lr", "0.001", "--eval-every", "5"),
    ),
    "pacs-resnet18": (
        *("--preset", "pacs", "--image-size", "64", "--rounds", "60", "--set", "model.width=16"),
        *("--set", "data.train_per_domain=2000", "--eval-every", "5"),
    ),
}


@dataclass(frozen=True)
class Job:
    study: str
    norm: str
    algorithm: str
    seed: int

    @property
    def table(self) -> str:
        return self.study if self.norm == "batch" else f"{self.study}-{self.norm}"

    @property
    def published(self) -> Path:
        return HERE / self.table / f"{self.algorithm}-{self.seed}.json"


def jobs() -> Iterator[Job]:
    """The main rows first, and of these one seed after the other, so that a table can be read early."""
    for study, algorithms, count in (
        ("pacs", CEILINGS, 5),
        ("digits", CEILINGS, 5),
        ("office-caltech-10", CEILINGS, 3),
        ("pacs-frozen", ("fedavg", "fedcir"), 3),
        ("office-caltech-10-frozen", ("fedavg", "fedcir"), 3),
        ("office-caltech-10-finetuned", ("fedavg", "fedcir"), 1),
        ("pacs-scratch", ("fedavg",), 3),
        ("office-caltech-10-scratch", ("fedavg",), 3),
        ("pacs-skew", MAIN, 3),
        ("pacs-skew", ("fedavg", "fedcirplus", "centralized"), 5),  # seeds differ by ten points there
        ("pacs-long", MAIN, 3),
        ("pacs-resnet18", ("fedavg", "fedcirplus", "centralized", "fedcir"), 3),
        ("pacs", OTHERS, 3),
        ("office-caltech-10-finetuned", ("fedavg", "fedcir"), 3),
        ("minidigits", CEILINGS, 5),
    ):
        for seed in range(count):
            for algorithm in algorithms:
                # FedBN needs BatchNorm, and a pretrained encoder keeps its own.
                for norm in NORMS[:1] if algorithm == "fedbn" or study.endswith(GIVEN_NORM) else NORMS:
                    yield Job(study, norm, algorithm, seed)
    for seed in FRESH_SEEDS:
        for algorithm, norm in HEADLINE:
            yield Job("pacs-skew", norm, algorithm, seed)


def command(job: Job, out: Path, roots: dict[str, list[str]]) -> list[str]:
    dataset = re.sub("-(skew|long|resnet18|frozen|scratch|finetuned)$", "", job.study)
    run = [sys.executable, "-m", "fedcir", "run", *SETTINGS[job.study], *roots[dataset], "--out", str(out)]
    run += ["--algorithm", job.algorithm, "--seed", str(job.seed)]
    run += [] if job.study.endswith(GIVEN_NORM) else ["--set", f"model.norm={job.norm}"]
    return [*run, "--workers", "1", "--quiet", "--no-report", *(["--resume"] if out.exists() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("pacs", "lists", "office", "digits"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/campaign"))
    parser.add_argument("--minutes", type=float, default=60, help="No run is started after so long.")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="Studies, algorithms or norms to take; all if not given.")
    parser.add_argument("--plan", action="store_true")
    given = parser.parse_args()
    roots = {
        "pacs": ["--data-root", given.pacs, "--set", f"data.lists={given.lists}"],
        "office-caltech-10": ["--data-root", given.office],
        "digits": ["--data-root", given.digits],
        "minidigits": [],
    }
    only = set(given.only or ())
    every = dict.fromkeys(jobs())
    wanted = [job for job in every if not only or only & {job.study, job.algorithm, job.norm, job.table}]
    left = [job for job in wanted if not job.published.exists()]
    print(f"{len(left)} of {len(wanted)} runs to do", flush=True)
    if given.plan:
        return
    begun, running = time.monotonic(), {}
    while left or running:
        while left and len(running) < given.at_once and time.monotonic() - begun < 60 * given.minutes:
            job = left.pop(0)
            out = given.runs / job.table / f"{job.algorithm}-{job.seed}"
            out.parent.mkdir(parents=True, exist_ok=True)
            with open(out.with_suffix(".log"), "w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    command(job, out, roots), stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
            running[process] = job, out
        if not running:
            break
        time.sleep(1)
        for process in [process for process in running if process.poll() is not None]:
            job, out = running.pop(process)
            if process.returncode:
                said = out.with_suffix(".log").read_text(encoding="utf-8").strip().splitlines()[-1:]
                print(f"{job.table} {job.algorithm}-{job.seed} failed: {''.join(said)}", flush=True)
                continue
            job.published.parent.mkdir(exist_ok=True)
            publish(out, job.published)
            mean = json.loads(job.published.read_text(encoding="utf-8"))["summary"]["final"]["accuracy_mean"]
            print(f"{job.table} {job.algorithm}-{job.seed}: {100 * mean:.1f}", flush=True)


if __name__ == "__main__":
    main()
