"""Measure full fine-tuning, partial training and adapters of EfficientNet-Lite0 on PACS, and write adapters.json.

python results/adapters.py --pacs DIR --lists DIR [--runs DIR] [--rounds 3] [--seeds 0] [--kinds all]

Every run is a `fedcir run` of FedAvg with one worker, in a process of its own, so that its processor time is that of
the run. Peak memory is that of another process, which takes three steps on each client and does not test, because tests
take larger batches. All have the same settings but for what trains; none of them was tuned.
"""

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

from fedcir.client.cost import peak_memory
from fedcir.config.toml import config_from_tables, merge_tables, parse_assignment
from fedcir.reporting.page import join_markdown
from fedcir.runs.reader import load_run
from fedcir.runtime.simulation import open_run

PUBLISHED = Path(__file__).with_name("adapters.json")
SETTINGS = (
    *("data.image_size=128", "model.name=efficientnet-lite0", "model.batchnorm=frozen", "algorithm.name=fedavg"),
    *("local.steps=20", "local.batch_size=16", "local.optimizer=adam", "local.lr=0.0005", "server.eval_every=10"),
    *("run.workers=1", "server.checkpoint_every=1"),
)
KINDS = {
    "last": ("last stage", ["model.train=_blocks.15,_conv_head,_bn1"]),
    "lora": ("LoRA, rank 8", ["model.adapter=lora"]),
    "all": ("all", []),
}
"""What trains beside the head, and the settings for it."""


def measure(kind: str, data: list[str], out: Path, rounds: int, seed: int) -> dict[str, Any]:
    name, special = KINDS[kind]
    settings = [*SETTINGS, *special, *data, f"server.rounds={rounds}", f"run.seed={seed}"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "fedcir", "run", "--out", str(out), "--no-report", "--quiet", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = load_run(out)
    return {
        "kind": kind,
        "trains": name,
        "seed": seed,
        "rounds": rounds,
        "accuracy": run.final["accuracy"],
        "accuracy_mean": run.final["accuracy_mean"],
        "bytes_up": run.records[-1].bytes_up,
        "bytes_down": run.records[-1].bytes_down,
        "peak_memory": multiprocessing.get_context("spawn")
        .Pool(1)
        .apply(measure_memory, [[*settings, "local.steps=3"]]),
        "cpu_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "settings": [*SETTINGS, *special],
        "date": datetime.now(UTC).date().isoformat(),
    }


def measure_memory(settings: list[str]) -> int:
    """Peak memory of this process after a round without tests."""
    config = config_from_tables(reduce(merge_tables, map(parse_assignment, settings)))
    with open_run(config) as (_, rounds):
        record = next(rounds)
        assert record.score_mean is None
        return peak_memory()


def table(which: str = "") -> str:
    """Write a row for each run: accuracies in per cent, megabytes of a round, peak memory and processor time."""
    runs = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    domains = list(runs[0]["accuracy"])
    lines = [["trains, besides the head", *domains, "mean", "uploads of a round", "peak memory", "processor time"]]
    for run in runs:
        accuracies = (*run["accuracy"].values(), run["accuracy_mean"])
        cost = (f"{run['bytes_up'] / 1e6:.1f} MB", f"{run['peak_memory'] / 1e9:.2f} GB", f"{run['cpu_seconds']:.0f} s")
        lines.append([run["trains"], *(f"{100 * value:.1f}" for value in accuracies), *cost])
    return join_markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pacs", required=True)
    parser.add_argument("--lists", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    data = ["data.name=pacs", f"data.root={options.pacs}", f"data.lists={options.lists}"]
    for seed in options.seeds:
        for kind in options.kinds:
            run = measure(kind, data, options.runs / f"{kind}-{seed}", options.rounds, seed)
            print(json.dumps(run), flush=True)
            published = json.loads(PUBLISHED.read_text(encoding="utf-8")) if PUBLISHED.exists() else []
            others = [other for other in published if (other["kind"], other["seed"]) != (kind, seed)]
            runs = sorted([*others, run], key=lambda run: (run["seed"], list(KINDS).index(run["kind"])))
            PUBLISHED.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
