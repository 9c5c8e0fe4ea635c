"""Publish finished runs: results/<study>/<run>.json, one file per run, named after the run's folder.

python results/collect.py STUDY FOLDER_OF_RUNS
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from fedcir.runs.reader import Run, load_run
from fedcir.runs.statistics import RunScores


def publish(folder: Path, target: Path) -> None:
    """What is worth keeping of a run, without the paths of the machine that it ran on."""
    run = load_run(folder)
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    for name in ("root", "lists"):
        config["data"].pop(name, None)
    curve = {at: round(accuracy, 4) for at, accuracy in zip(*run.curve("accuracy_mean"), strict=True)}
    published = {"summary": run.summary, "accuracy_mean": curve, "config": config, "manifest": run.manifest["hash"]}
    published["test"] = tested(run)
    target.write_text(json.dumps(published, indent=1) + "\n", encoding="utf-8")


def tested(run: Run) -> dict[str, Any]:
    """How many test images there were by domain, which set they are, and the packed bits of those that were right."""
    accuracy = RunScores.from_run(run)
    hits = {name: np.packbits(correct).tobytes().hex() for name, correct in accuracy.hits.items()}
    return {"images": dict(accuracy.images), "set": accuracy.test_set, **({"hits": hits} if hits else {})}


def main() -> None:
    study, folder = sys.argv[1], Path(sys.argv[2])
    target = Path(__file__).parent / study
    target.mkdir(exist_ok=True)
    for path in sorted(path.parent for path in folder.glob("*/summary.json")):
        publish(path, target / f"{path.name}.json")


if __name__ == "__main__":
    main()
