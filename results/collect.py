"""Publish finished runs: results/<dataset>/<algorithm>-<seed>.json, one a run.

python results/collect.py DATASET FOLDER_OF_RUNS
"""

import json
import sys
import tomllib
from pathlib import Path

from fedcir.runs.run import load_run


def publish(folder: Path, target: Path) -> None:
    """What is worth keeping of a run, without the paths of the machine that it ran on."""
    run = load_run(folder)
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    for name in ("root", "lists"):
        config["data"].pop(name, None)
    curve = {at: round(accuracy, 4) for at, accuracy in zip(*run.curve("accuracy_mean"), strict=True)}
    published = {"summary": run.summary, "accuracy_mean": curve, "config": config, "manifest": run.manifest["hash"]}
    target.write_text(json.dumps(published, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    dataset, folder = sys.argv[1], Path(sys.argv[2])
    target = Path(__file__).parent / dataset
    target.mkdir(exist_ok=True)
    for path in sorted(path.parent for path in folder.glob("*/summary.json")):
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        publish(path, target / f"{summary['algorithm']}-{summary['seed']}.json")


if __name__ == "__main__":
    main()
