"""How fast the simulator is beside others, on one machine.

    python benchmarks/simulator.py [--workloads W1,W2] [--repeats 3] [--envs DIR] [--json FILE]

Contestants take turns in one run; figures are medians. W1: 100 clients of 200 images, 10 active, 20 steps of 32, a
small CNN at 28x28, 10 rounds. W2: 4 clients, 20 steps, ResNet18 at 64x64, 3 rounds. `bare` is a loop as one writes it
by hand (plain nn.Module, NCHW, foreach SGD). Flower's simulation engine and pfl-research are installed from PyPI into
environments of their own. A round's time is the median of all but the first; the total is from start to end of the
command; memory is the largest sum of resident memory over all processes, looked at ten times a second.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "contestants"
TORCH = "torch==2.13.0"
RESNET = ("tomli-w", "safetensors")  # what fedcir's ResNet18, which all contestants train, imports


def environment(folder: Path, name: str, *packages: str) -> Path:
    """A virtual environment with these packages; made once."""
    place = folder / name
    if not (place / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([place / "bin/pip", "install", "--quiet", TORCH, *packages], check=True)
        (place / ".ready").touch()
    return place / "bin"


class Marked:
    """All processes that carry a mark in their environment, which is handed down to children and daemons alike."""

    def __init__(self) -> None:
        self.mark = f"FEDCIR_BENCH={os.getpid()}-{time.monotonic_ns()}"

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def memory(self) -> int:
        total = 0
        for process in self.processes():
            try:
                total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            except OSError:
                continue
        return total

    def end(self) -> None:
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue


def measured(command: list[Any], variables: dict[str, str], read: Callable[[str], list[float]]) -> dict[str, Any]:
    """Run a contestant: seconds of its rounds, in all, and megabytes."""
    marked, peak, done = Marked(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak[0] = max(peak[0], marked.memory())

    name, _, value = marked.mark.partition("=")
    started = time.perf_counter()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **variables, name: value},
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
        )
        total = time.perf_counter() - started
    finally:
        done.set()
        watcher.join()
        marked.end()
    if result.returncode:
        raise SystemExit(f"{command}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    seconds = read(result.stdout)
    return {"round": statistics.median(seconds[1:]), "first": seconds[0], "total": total, "memory": peak[0] / 1e6}


def last_line(text: str) -> list[float]:
    return json.loads(text.strip().splitlines()[-1])


def contestants(workload: str, clients: int, envs: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    one = {"OMP_NUM_THREADS": "1"}

    def ours(workers: int) -> dict[str, Any]:
        return measured([sys.executable, "ours.py", workload, workers], one, last_line)

    def bare(processes: int, threads: int) -> dict[str, Any]:
        return measured(
            [sys.executable, "bare.py", workload, processes, threads], {"OMP_NUM_THREADS": str(threads)}, last_line
        )

    def pfl() -> dict[str, Any]:
        place = environment(envs, "pfl", "pfl[pytorch]", *RESNET)
        return measured([place / "torchrun", "--nproc-per-node", 2, "pfl_run.py", workload], one, last_line)

    def flower() -> dict[str, Any]:
        place = environment(envs, "flower", "flwr[simulation]>=1.41", *RESNET)
        with tempfile.TemporaryDirectory() as home:
            settings = f'[superlink.local]\naddress = ":local:"\noptions.num-supernodes = {clients}\n'
            settings += "options.backend.client-resources.num-cpus = 1\n"
            Path(home, "config.toml").write_text(settings, encoding="utf-8")
            out = Path(home, "seconds.json")
            given = f'contestants="{HERE.resolve()}" out="{out}" workload="{workload}"'
            variables = {
                **one,
                "FLWR_HOME": home,
                "FLWR_TELEMETRY_ENABLED": "0",
                "PATH": f"{place}{os.pathsep}{os.environ['PATH']}",
            }
            command = [place / "flwr", "run", "flower_app", "local", "--stream", "--run-config", given]
            return measured(command, variables, lambda text: json.loads(out.read_text()))

    return {
        "fedcir, 2 workers": lambda: ours(2),
        "fedcir, 1 worker": lambda: ours(1),
        "bare, 2 processes": lambda: bare(2, 1),
        "bare, 2 threads": lambda: bare(1, 2),
        "pfl-research, 2 processes": pfl,
        "Flower's simulation engine": flower,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="W1,W2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--envs", type=Path, default=Path(tempfile.gettempdir(), "fedcir-bench-envs"))
    parser.add_argument("--only", default="", help="contestants whose names contain one of these words")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for workload in given.workloads.split(","):
        entries = contestants(workload, {"W1": 100, "W2": 4}[workload], given.envs)
        words = [word for word in given.only.split(",") if word]
        chosen = {n: run for n, run in entries.items() if not words or any(word in n for word in words)}
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
        for repeat in range(given.repeats):
            for name, run in chosen.items():
                taken[name].append(run())
                print(f"{workload} {repeat + 1}/{given.repeats} {name}: {taken[name][-1]}", file=sys.stderr, flush=True)
        medians = {
            name: {key: statistics.median(one[key] for one in all_of) for key in ("round", "first", "total", "memory")}
            for name, all_of in taken.items()
        }
        results[workload] = {"medians": medians, "all": taken}
        base = medians.get("fedcir, 2 workers") or next(iter(medians.values()))
        print(f"\n| {workload} | a round | ratio | in all | ratio | memory | ratio |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, value in medians.items():
            cells = [f"{value['round']:.2f} s", f"{value['round'] / base['round']:.2f}"]
            cells += [f"{value['total']:.1f} s", f"{value['total'] / base['total']:.2f}"]
            cells += [f"{value['memory']:.0f} MB", f"{value['memory'] / base['memory']:.2f}"]
            print(f"| {name} | {' | '.join(cells)} |")
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
