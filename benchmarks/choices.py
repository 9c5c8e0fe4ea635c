"""What the paper leaves open, measured: FedCiR with one field changed at a time, on validation data.

    python benchmarks/choices.py DIGITS OUT [--seeds 0,1]

DIGITS is a folder of <domain>.npz files. A fifth of each domain's training images is set aside and tested on; the
test images are not looked at. 500 training images a domain, cnn, 40 rounds. Prints a Markdown table.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from fedcir.config import config_from_tables
from fedcir.experiments.sweep import Job, sweep
from fedcir.reporting.methods import format_estimate
from fedcir.reporting.page import to_markdown
from fedcir.rng import numpy_rng
from fedcir.runs.statistics import Estimate
from fedcir.runtime.run_folder import RunFolder

CHOICES: list[tuple[str, dict[str, object]]] = [
    ("fedavg", {}),
    ("fedcir", {}),
    ("fedcir", {"lambda_reg": 0.0, "lambda_align": 0.0}),
    ("fedcir", {"sigma_init": 0.01}),
    ("fedcir", {"sigma_init": 0.5}),
    ("fedcir", {"sigma_init": 2.0}),
    ("fedcir", {"generator_lr": 1e-3}),
    ("fedcir", {"generator_statistics": "batch"}),
    ("fedcir", {"noise": 8}),
    ("fedcir", {"gaussian_floor": 0.01}),
    ("fedcir", {"lambda_align": 1e-5}),
    ("fedcir", {"lambda_align": 1e-4}),
    ("fedcir", {"lambda_align": 1e-3}),
]


def set_validation_aside(source: Path, target: Path) -> None:
    """Write the same domains with a part of their training images in the place of the test images."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.npz")):
        with np.load(file) as domain:
            x, y = domain["x_train"], domain["y_train"]
        order = numpy_rng(0, "validation", file.stem).permutation(len(x))
        held, kept = np.split(order, [len(x) // 5])
        np.savez(target / file.name, x_train=x[kept], y_train=y[kept], x_test=x[held], y_test=y[held])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("digits", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    data = arguments.out / "validation"
    set_validation_aside(arguments.digits, data)
    runs = {
        (number, seed): Job(
            config_from_tables(
                {
                    "data": {"name": "arrays", "root": str(data), "train_per_domain": 500},
                    "server": {"rounds": 40, "eval_every": 10},
                    "algorithm": {"name": name, **fields},
                    "run": {"seed": seed},
                }
            ),
            arguments.out / f"{number:02d}-{seed}",
        )
        for number, (name, fields) in enumerate(CHOICES)
        for seed in seeds
    }
    for step in sweep(list(runs.values()), os.cpu_count() or 1, resume=True):
        if step.event == "ended":
            print(f"{step.job.out.name} done", file=sys.stderr)
    rows = [["method", "changed", "validation accuracy, mean over domains (%)"]]
    for number, (name, fields) in enumerate(CHOICES):
        final = [RunFolder(runs[number, seed].out).summary()["final"]["accuracy_mean"] for seed in seeds]
        rows.append(
            [
                name,
                ", ".join(
                    f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"
                    for key, value in fields.items()
                ),
                format_estimate(Estimate.of(final)),
            ]
        )
    print(to_markdown(rows), end="")


if __name__ == "__main__":
    main()
