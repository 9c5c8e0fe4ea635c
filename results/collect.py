"""Publish finished runs: results/<dataset>/<algorithm>-<seed>.json, one a run.

python results/collect.py DATASET FOLDER_OF_RUNS
"""

import json
import sys
import tomllib
from pathlib import Path

from fedcir.engine.folder import RunFolder


def main() -> None:
    dataset, folder = sys.argv[1], Path(sys.argv[2])
    target = Path(__file__).parent / dataset
    target.mkdir(exist_ok=True)
    for path in sorted(path.parent for path in folder.glob("*/summary.json")):
        run = RunFolder(path)
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        for name in ("root", "lists"):  # paths of the machine that it ran on
            config["data"].pop(name, None)
        curve = {record.round: round(record.accuracy_mean, 4) for record in run.records() if record.accuracy_mean}
        published = {
            "summary": run.summary(),
            "accuracy_mean": curve,
            "config": config,
            "manifest": run.manifest()["hash"],
        }
        name = f"{config['algorithm']['name']}-{config['run']['seed']}"
        (target / f"{name}.json").write_text(json.dumps(published, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
