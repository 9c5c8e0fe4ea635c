"""How soon the first step is done: a prepared dataset in a new process, beside `import torch` alone.

    python benchmarks/startup.py --dataset pacs --data-root DIR

Medians of five, in turn. The step is one of two images, so that the start is what is measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

FIRST_STEP = """
import json, sys
from fedcir.config import config_from
from fedcir.models.optimizers import SGD
from fedcir.runtime.simulation import open_run

class Done(Exception): ...

def stop(*arguments):
    raise Done

SGD.step = stop
try:
    with open_run(config_from(json.loads(sys.argv[1]))) as (session, rounds):
        next(rounds)
except Done:
    pass
"""


def seconds(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="pacs")
    parser.add_argument("--data-root", required=True)
    given = parser.parse_args()
    tables = {
        "data": {"name": given.dataset, "root": given.data_root, "image_size": 128},
        "local": {"batch_size": 2},
        "run": {"workers": 1, "device": "cpu"},
    }
    commands = {
        "import torch": (sys.executable, "-c", "import torch"),
        "the first step": (sys.executable, "-c", FIRST_STEP, json.dumps(tables)),
        "fedcir --help": (str(Path(sys.executable).with_name("fedcir")), "--help"),
    }
    seconds(*commands["the first step"])  # prepares the dataset
    taken = {name: [] for name in commands}
    for _ in range(5):
        for name, command in commands.items():
            taken[name].append(seconds(*command))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, value in medians.items():
        print(f"| {name} | {value:.2f} s | {value / medians['import torch']:.2f} |")


if __name__ == "__main__":
    main()
