"""Make the runs of docs/privacy.md, one after the other, and its tables.

python results/privacy.py --pacs DIR --lists DIR --digits DIR

A run that is published is not repeated, and one that was stopped is resumed.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collect import publish
from published import percent

from fedcir.config import config_from_tables, merge_tables
from fedcir.reporting.page import join_markdown
from fedcir.runtime.simulation import open_run

PUBLISHED = Path(__file__).parent / "privacy"
SEEDS = (0, 1, 2)
NOISE = ("1", "2", "4")
UPLOADS = ("float32", "bfloat16", "int8")
FROZEN = {
    "algorithm": {"name": "fedavg"},
    "model": {"name": "efficientnet-lite0", "freeze": True},
    "server": {"rounds": 30, "eval_every": 30},
    "local": {"steps": 2, "batch_size": 20, "lr": 0.05},
}
MANY = {"partition": {"scheme": "iid", "clients": 400}, "server": {"active": 100}}
PACS = {"data": {"name": "pacs", "val_fraction": 0.1}}
DIGITS = {"data": {"name": "arrays", "val_fraction": 0.1, "image_size": 64, "train_per_domain": 1000}}
IMAGES = {"local": {"steps": 20, "batch_size": 32}}
STAGES: dict[str, Any] = merge_tables(merge_tables(FROZEN, PACS), {"model": {"stages": 5}, "data": {"image_size": 224}})
STUDIES: dict[str, dict[str, Any]] = {
    "pacs-400": merge_tables(merge_tables(FROZEN, MANY), PACS),
    "pacs-4": merge_tables(FROZEN, PACS),
    "pacs-images": merge_tables(merge_tables(FROZEN, PACS), IMAGES),
    "uploads": {
        "algorithm": {"name": "fedavg"},
        "data": {"name": "arrays", "train_per_domain": 500},
        "model": {"width": 8},
        "server": {"rounds": 10, "eval_every": 10},
    },
    "digits-400": merge_tables(merge_tables(FROZEN, MANY), DIGITS),
    "digits-4": merge_tables(FROZEN, DIGITS),
    "epsilon-fedcirone": merge_tables(STAGES, {"algorithm": {"name": "fedcirone"}, "server": {"rounds": 1}}),
    "epsilon-dpsgd": merge_tables(STAGES, IMAGES),
    "epsilon-dpfedavg": STAGES,
}
CLIP = 0.3
"""Chosen on validation images, seed 0, noise 1: from 0.1 and 0.3 on pacs-400, and from 0.3, 1 and 3 on pacs-images."""
EPSILONS = {
    "epsilon-fedcirone": {"1": 3.7307, "2": 1.9939, "5": 0.8919},
    "epsilon-dpsgd": {"1": 2.5299, "2": 1.4998, "5": 0.9104},
    "epsilon-dpfedavg": {"1": 22.158, "2": 11.772, "5": 5.2179},
}
"""Noise by study and epsilon, at the delta of 1e-5."""
SHOWN = {
    "epsilon-fedcirone": ("fedcirone, noised sums", "an image"),
    "epsilon-dpsgd": ("fedavg, DP-SGD", "an image"),
    "epsilon-dpfedavg": ("fedavg, DP-FedAvg", "a site"),
}


@dataclass(frozen=True)
class Job:
    study: str
    level: str
    """Of noise, or the kind of upload."""
    seed: int

    @property
    def published(self) -> Path:
        return PUBLISHED / f"{self.study}-{self.level}-{self.seed}.json"

    def settings(self, roots: dict[str, dict[str, str]]) -> dict[str, Any]:
        own: dict[str, Any] = {"run": {"seed": self.seed, "workers": 1}}
        noise = EPSILONS.get(self.study, {}).get(self.level, self.level)
        if self.study == "uploads":
            own["server"] = {"upload": self.level}
        elif self.level != "none":
            own["privacy"] = {"clip": CLIP, "noise": float(noise)}
            if self.study in ("pacs-images", "epsilon-dpsgd", "epsilon-fedcirone"):
                own["privacy"]["unit"] = "example"
            if self.study == "epsilon-fedcirone":
                own["privacy"]["clip"], own["algorithm"] = 1.0, {"project": 512}
        return merge_tables(
            merge_tables(STUDIES[self.study], {"data": roots[STUDIES[self.study]["data"]["name"]]}), own
        )


def jobs() -> Iterator[Job]:
    """One seed of a study after the other, so that its table can be read early."""
    for study in STUDIES:
        for seed in SEEDS:
            for level in UPLOADS if study == "uploads" else ("none", *EPSILONS.get(study, NOISE)):
                yield Job(study, level, seed)


def _levels(study: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The published summaries of each level."""
    for level in dict.fromkeys(job.level for job in jobs() if job.study == study):
        paths = [Job(study, level, seed).published for seed in SEEDS]
        found = [json.loads(path.read_text(encoding="utf-8"))["summary"] for path in paths if path.exists()]
        if found:
            yield level, found


def table(which: str) -> str:
    """`uploads`, `epsilon` (methods side by side), or a dataset, with 400 clients and with 4, or for each image."""
    if which == "uploads":
        rows = [["server.upload", "seeds", "mean accuracy (%)", "worst (%)", "MB up"]]
        for level, found in _levels(which):
            up = found[0]["cost"]["bytes_up"] / 1e6
            rows.append([f"`{level}`", f"{len(found)}", *_accuracies(found), f"{up:.1f}"])
        return join_markdown(rows)
    if which == "epsilon":
        rows = [["method", "protects", "privacy.noise", "epsilon", "seeds", "mean accuracy (%)", "worst (%)"]]
        for study, (method, protects) in SHOWN.items():
            for level, found in _levels(study):
                noise, epsilon = "none", "no privacy"
                if level != "none":
                    noise, epsilon = f"{EPSILONS[study][level]:.3g}", f"{found[0]['privacy']['epsilon']:.1f}"
                rows.append([method, protects, noise, epsilon, f"{len(found)}", *_accuracies(found)])
        return join_markdown(rows)
    rows = [["clients", "privacy.noise", "epsilon", "seeds", "mean accuracy (%)", "worst (%)"]]
    for study in (which,) if which in STUDIES else (f"{which}-400", f"{which}-4"):
        for level, found in _levels(study):
            epsilon = f"{found[0]['privacy']['epsilon']:.1f}" if "privacy" in found[0] else "no privacy"
            rows.append(
                [study.rpartition("-")[2].replace("images", "4"), level, epsilon, f"{len(found)}", *_accuracies(found)]
            )
    return join_markdown(rows)


def _accuracies(found: list[dict[str, Any]]) -> list[str]:
    return [percent([each["final"][name] for each in found]) for name in ("accuracy_mean", "accuracy_worst")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("pacs", "lists", "digits"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--only", nargs="*", default=list(STUDIES), help="Studies to take; all if not given.")
    given = parser.parse_args()
    roots = {"pacs": {"root": given.pacs, "lists": given.lists}, "arrays": {"root": given.digits}}
    PUBLISHED.mkdir(exist_ok=True)
    for job in jobs():
        if job.study in given.only and not job.published.exists():
            out = given.runs / job.published.stem
            with open_run(config_from_tables(job.settings(roots)), out, resume=True) as (_, rounds):
                last = list(rounds)[-1:]
            publish(out, job.published)
            print(job.published.stem, *(f"{100 * record.accuracy_mean:.1f}" for record in last), flush=True)


if __name__ == "__main__":
    main()
