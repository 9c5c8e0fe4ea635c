"""What opening and a round cost as clients grow in number, or those of them that are active.

    python benchmarks/scale.py [--clients 100,1000,10000,100000] [--active 10,100,1000] [--plot docs/scale.png]

Every client holds 20 grey images of 14x14, in a folder of .npz files that is opened as a user's own arrays. All numbers
of clients are tried with the first number of active ones, and the others with `--among` clients. Each is a process of
its own, with two workers. Memory is the peak of all its processes. Seconds are those of the processors, summed over
the processes, so that other work on the machine does not count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

RUN = """
import json, os, sys, time
from pathlib import Path
from fedcir.config import config_from
from fedcir.runtime.simulation import open_run

def spent():
    own = os.getpid()
    workers = Path(f"/proc/self/task/{own}/children").read_text().split()
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in workers]
    return time.process_time() + sum(int(each) for pair in ticks for each in pair) / os.sysconf("SC_CLK_TCK")

config = config_from(json.loads(sys.argv[1]))
began = spent()
with open_run(config, Path(sys.argv[2])) as (session, rounds):
    ends = [spent()]
    ends += [spent() for _ in rounds]
seconds = sorted(after - before for before, after in zip(ends[1:], ends[2:]))
print(json.dumps([ends[0] - began, seconds[len(seconds) // 2], session.peak_memory / 1e6]))
"""


class Point(NamedTuple):
    clients: int
    active: int
    opening: float
    round: float
    memory: float

    def __str__(self) -> str:
        seconds = f"{self.opening:.2f} s | {self.round:.2f} s"
        return f"| {self.clients:,} | {self.active:,} | {seconds} | {self.memory:.0f} MB |"


def measure(clients: int, active: int, steps: int, rounds: int, algorithm: str) -> Point:
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        for domain in range(4):
            count = 20 * clients // 4
            arrays = {
                "x_train": rng.integers(0, 256, (count, 14, 14), dtype=np.uint8),
                "y_train": np.arange(count) % 10,
                "x_test": rng.integers(0, 256, (100, 14, 14), dtype=np.uint8),
                "y_test": np.arange(100) % 10,
            }
            np.savez(Path(folder, f"domain-{domain}.npz"), **arrays)
        tables = {
            "data": {"name": "arrays", "root": folder},
            "partition": {"scheme": "dirichlet", "clients": clients, "beta": 1.0},
            "local": {"steps": steps},
            "server": {"rounds": rounds, "active": active},
            "algorithm": {"name": algorithm},
            "run": {"device": "cpu", "workers": 2},
        }
        command = [sys.executable, "-c", RUN, json.dumps(tables), str(Path(folder, "run"))]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return Point(clients, active, *json.loads(said))


def draw(points: list[Point], first: int, path: str) -> None:
    """Memory and the seconds of a round, against all clients and against the active ones."""
    from matplotlib import pyplot

    everyone = [point for point in points if point.active == first]
    among = max((point.clients for point in points if point.active != first), default=None)
    busy = sorted((point for point in points if point.clients == among), key=lambda point: point.active)
    sides = [("clients", everyone, f"clients, {first} active"), ("active", busy, f"active clients of {among or 0:,}")]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5.5), sharex="col")
    for column, (field, some, label) in zip(axes.T, sides, strict=True):
        x = [getattr(point, field) for point in some]
        for axis, values, what in (
            (column[0], [point.memory for point in some], "peak memory, MB"),
            (column[1], [point.round for point in some], "a round, processor seconds"),
        ):
            axis.plot(x, values, "o-")
            axis.set(xscale="log", ylabel=what, ylim=(0, 1.25 * max(values, default=1)))
            axis.grid(alpha=0.3)
        column[1].set_xlabel(label)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="100,1000,10000,100000")
    parser.add_argument("--active", default="10,100,1000")
    parser.add_argument("--among", type=int, default=10_000, help="clients of which more than the first are active")
    parser.add_argument("--steps", type=int, default=20, help="local steps")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--algorithm", default="fedcir")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture")
    given = parser.parse_args()
    first, *others = map(int, given.active.split(","))
    pairs = [(int(clients), first) for clients in given.clients.split(",")] + [(given.among, each) for each in others]
    print("| clients | active | opening | a round | peak memory |\n|---:|---:|---:|---:|---:|")
    points = []
    for clients, active in pairs:
        points.append(measure(clients, active, given.steps, given.rounds, given.algorithm))
        print(points[-1], flush=True)
    if given.plot:
        draw(points, first, given.plot)


if __name__ == "__main__":
    main()
