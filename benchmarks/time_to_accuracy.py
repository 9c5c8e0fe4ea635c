"""Seconds and bytes from a folder of images to an accuracy: `fedcir init` and `run`, and Flower fine-tuning.

    python benchmarks/time_to_accuracy.py DIR [--target 0.85] [--minutes 20] [--json FILE]

DIR holds <domain>/<class>/<image>. Ours starts from a cold cache: `fedcir init`, `fedcir run` (fedcirone on a frozen
EfficientNet-Lite0: at its own size as init chooses, and at 128 pixels with one stage), then `fedcir evaluate`.
Flower's simulation engine fine-tunes the same encoder by FedAvg on the same split, for at most so many minutes. CPU
seconds are those of all processes; with other work on the machine they say more than seconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTESTANT = Path(__file__).parent / "contestants" / "flower_finetune.py"
SMALL = ("--image-size", "128", "--set", "model.native_size=false", "--set", "model.stages=1")


def measure(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command: its seconds, and the CPU seconds of its processes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - started, "cpu": cpu}


def train_ours(root: Path, work: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """`init`, `run` and `evaluate` from a cold cache."""
    fedcir, cache = [sys.executable, "-m", "fedcir"], {"FEDCIR_CACHE": str(work / "cache")}
    steps = {
        "init": ["init", str(root), "--out", str(work / "fedcir.toml"), "--quiet"],
        "run": ["run", str(work / "fedcir.toml"), "--out", str(work / "run"), "--quiet", *options],
        "evaluate": ["evaluate", str(work / "run"), "--quiet"],
    }
    taken: dict[str, Any] = {name: measure([*fedcir, *words], cache) for name, words in steps.items()}
    summary = json.loads((work / "run" / "summary.json").read_text(encoding="utf-8"))
    cost = summary["cost"]
    total = {key: taken["init"][key] + taken["run"][key] for key in ("seconds", "cpu")}
    moved = cost["bytes_up"] + cost["bytes_down"]
    return {**taken, **total, "bytes": moved, "accuracy": summary["final"]["accuracy_mean"]}


def describe_flower(rounds: list[dict[str, float]], target: float) -> dict[str, Any]:
    """Cost of the first round that reached the target, or of the last one."""
    reached = [at for at in rounds if at["accuracy"] >= target]
    at = reached[0] if reached else rounds[-1] if rounds else {}
    return {**at, "rounds": len(rounds), "reached": bool(reached)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--minutes", type=float, default=20, help="limit of the Flower side")
    parser.add_argument("--only", choices=("native", "small", "flower"))
    parser.add_argument("--manifest", type=Path, help="split for --only flower: manifest.json of a run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="fedcir-") as name:
        manifest = options.manifest
        for mode, more in (("native", ()), ("small", SMALL)):
            if options.only in (None, mode):
                work = Path(name, mode)
                work.mkdir()
                results[mode] = train_ours(options.root.resolve(), work, more)
                print(mode, json.dumps(results[mode]), flush=True)
                manifest = work / "run" / "manifest.json"
        if options.only in (None, "flower"):
            out = Path(name, "flower.json")
            command = [
                sys.executable,
                str(CONTESTANT),
                str(options.root),
                str(manifest),
                str(out),
                str(options.minutes),
            ]
            measure(command, {"OMP_NUM_THREADS": "1"})
            rounds = json.loads(out.read_text(encoding="utf-8"))
            results["Flower, fine-tuning"] = describe_flower(rounds, options.target)
            print("Flower", json.dumps(results["Flower, fine-tuning"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
