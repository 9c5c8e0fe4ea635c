"""Replicate the paper's Table 1 at its own scale: ResNet18 at full width, 128 pixels, 20 local steps, up to 300 rounds.

python results/replication.py --pacs DIR --lists DIR --office DIR [--runs DIR] [--workers N] [--only fedcir-0 ...]

Runs are made one after the other, in the order of `JOBS`, or only those of `--only`. Every 50 rounds the run is
published in `results/<dataset>-paper/<algorithm>-<seed>.json`. Local steps run under autocast to bfloat16, which takes
about half of the time on a CPU that has its instructions; `--precision float32` makes them in single precision. An
interrupted command continues where its run folders end; without the folders it makes the same bits again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from collect import publish

RESULTS = Path(__file__).parent
SEGMENT = 50
"""Rounds between two publications."""


class Job(NamedTuple):
    dataset: str
    algorithm: str
    seed: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.seed}"

    @property
    def published(self) -> Path:
        return RESULTS / f"{self.dataset}-paper" / f"{self.name}.json"


MAIN = ("fedavg", "fedcir", "fedcirplus")
JOBS = (
    *(Job("pacs", algorithm, 0, 100) for algorithm in MAIN),  # first, so that the three can be compared early
    *(Job("pacs", algorithm, 0, 300) for algorithm in MAIN),
    *(Job("pacs", algorithm, 1, 300) for algorithm in ("fedavg", "fedcir")),
    *(Job("pacs", algorithm, 0, 300) for algorithm in ("fedgen", "fedreg", "fedalign")),
    *(Job("office-caltech-10", algorithm, 0, 300) for algorithm in MAIN),
)


def count_published_rounds(job: Job) -> int:
    """Rounds of this run that are published already."""
    if not job.published.exists():
        return 0
    return int(json.loads(job.published.read_text(encoding="utf-8"))["summary"]["rounds"])


def train(job: Job, rounds: int, out: Path, data: list[str], workers: int, precision: str) -> None:
    """Start or continue one run up to `rounds`."""
    command = [sys.executable, "-m", "fedcir", "run", "--out", str(out), "--rounds", str(rounds)]
    if (out / "config.toml").exists():
        command += ["--resume"]
    else:
        command += ["--preset", job.dataset, *data, "--algorithm", job.algorithm, "--seed", str(job.seed)]
        command += ["--eval-every", "5", "--set", f"run.precision={precision}"]
    subprocess.run([*command, "--workers", str(workers), "--quiet", "--no-report"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pacs", "lists", "office"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/replication"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", nargs="*", choices=sorted({job.name for job in JOBS}), help="ALGORITHM-SEED")
    options = parser.parse_args()
    data = {
        "pacs": ["--data-root", options.pacs, "--set", f"data.lists={options.lists}"],
        "office-caltech-10": ["--data-root", options.office],
    }
    for job in (job for job in JOBS if not options.only or job.name in options.only):
        out = options.runs / job.dataset / job.name
        out.parent.mkdir(parents=True, exist_ok=True)
        job.published.parent.mkdir(exist_ok=True)
        first = count_published_rounds(job) // SEGMENT * SEGMENT + SEGMENT
        for rounds in range(first, job.rounds + 1, SEGMENT):
            train(job, rounds, out, data[job.dataset], options.workers, options.precision)
            publish(out, job.published)
            mean = json.loads(job.published.read_text(encoding="utf-8"))["summary"]["final"]["accuracy_mean"]
            print(f"{job.dataset} {job.name}: {100 * mean:.1f} after {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
