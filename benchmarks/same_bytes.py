"""Compare the models of two versions: `python benchmarks/same_bytes.py BEFORE AFTER` (two folders with `fedcir`).

Both train methods of several kinds on minidigits: 3 rounds with one worker, with two, and 1 round that is resumed to 3.
Prints the SHA-256 of `model.safetensors` for each, and exits with 1 if two versions differ in any of them.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ALGORITHMS = ("fedavg", "fedcir", "fedsr", "fedgen", "scaffold", "fedbn")
WAYS = {"1 worker": [["--rounds=3", "--workers=1"]], "2 workers": [["--rounds=3", "--workers=2"]]}
WAYS["resumed"] = [["--rounds=1", "--workers=1"], ["--rounds=3", "--resume"]]


def hash_model(source: Path, algorithm: str, runs: list[list[str]], out: Path, steps: int) -> str:
    """Hash of the model that a version trains."""
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    for options in runs:
        settings = ["--dataset=minidigits", f"--algorithm={algorithm}", f"--local-steps={steps}", "--quiet", *options]
        command = [sys.executable, "-m", "fedcir", "run", f"--out={out}", "--no-report", *settings]
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs=2)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=5, help="local steps")
    options = parser.parse_args()
    different = 0
    for algorithm in options.algorithms.split(","):
        for way, runs in WAYS.items():
            with tempfile.TemporaryDirectory() as name:
                folders = [(source.resolve(), Path(name, str(number))) for number, source in enumerate(options.sources)]
                hashes = [hash_model(source, algorithm, runs, out, options.steps) for source, out in folders]
            different += len(set(hashes)) > 1
            print(f"{algorithm}, {way}: {' '.join(value[:16] for value in dict.fromkeys(hashes))}", flush=True)
    print(f"{different} of {len(WAYS) * len(options.algorithms.split(','))} differ")
    raise SystemExit(different > 0)


if __name__ == "__main__":
    main()
