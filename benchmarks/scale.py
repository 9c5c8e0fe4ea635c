"""What a round costs as clients grow in number, 10 of them active.

    python benchmarks/scale.py [--clients 10,100,1000,10000]

Every client holds 20 images of 28x28, in a folder of .npz files that is opened as a user's own arrays. Each size is a
process of its own; memory is the peak of all its processes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RUN = """
import json, sys, time
started = time.perf_counter()
from pathlib import Path
from fedcir.config import config_from
from fedcir.engine.simulate import open_run
config = config_from(json.loads(sys.argv[1]))
began = time.perf_counter()
with open_run(config, Path(sys.argv[2])) as (session, rounds):
    opened = time.perf_counter() - began
    records = list(rounds)
seconds = sorted(record.seconds["total"] for record in records[1:])
print(json.dumps([opened, seconds[len(seconds) // 2], session.peak_memory / 1e6]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="10,100,1000,10000")
    parser.add_argument("--algorithm", default="fedcir")
    given = parser.parse_args()
    print("| clients | opening | a round | peak memory |\n|---:|---:|---:|---:|")
    for clients in map(int, given.clients.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rng = np.random.default_rng(0)
            for domain in range(4):
                count = 20 * clients // 4
                arrays = {
                    "x_train": rng.integers(0, 256, (count, 28, 28, 3), dtype=np.uint8),
                    "y_train": np.arange(count) % 10,
                    "x_test": rng.integers(0, 256, (100, 28, 28, 3), dtype=np.uint8),
                    "y_test": np.arange(100) % 10,
                }
                np.savez(Path(folder, f"domain-{domain}.npz"), **arrays)
            tables = {
                "data": {"name": "arrays", "root": folder},
                "partition": {"scheme": "dirichlet", "clients": clients, "beta": 1.0},
                "server": {"rounds": 6, "active": min(10, clients)},
                "algorithm": {"name": given.algorithm},
                "run": {"device": "cpu"},
            }
            command = [sys.executable, "-c", RUN, json.dumps(tables), str(Path(folder, "run"))]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            opened, seconds, memory = json.loads(said)
            print(f"| {clients:,} | {opened:.2f} s | {seconds:.2f} s | {memory:.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
