"""Measure how well models adapt to a domain that no client has, by unlabelled images, and write adaptation.json.

python results/adaptation.py --pacs DIR --lists DIR --digits DIR --office DIR [--runs DIR]

Each domain of PACS is left out of a run of fedcirone. The model then gets 10, 50, 200 or up to 1,024 of its training
images without labels, and is tested on its test images and on all of its images. Digits, noise and the domains of
Office-Caltech-10, which shares one class with PACS, stand for sites that are too unlike those of training.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcir.algorithms import resolve_config
from fedcir.config import ConfigRequest
from fedcir.data.decoding import SUFFIXES
from fedcir.data.domains import Domain, Split
from fedcir.inference.adaptation import MAX_IMAGES, TOO_NOVEL, adapt_model
from fedcir.inference.model import TrainedModel, open_model
from fedcir.inference.predictor import read_file, to_pixels
from fedcir.reporting.page import join_markdown
from fedcir.runs.evaluation_data import open_run_data
from fedcir.runs.reader import load_run
from fedcir.runtime.simulation import open_run

PUBLISHED = Path(__file__).with_name("adaptation.json")
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
DIGITS = ("mnist", "mnist_m", "svhn", "usps")
OFFICE = ("amazon", "caltech", "dslr", "webcam")
COUNTS = (10, 50, 200, MAX_IMAGES)
SEEDS = (0, 1, 2)
UNLIKE_IMAGES = 100
SETTINGS = (
    "data.name=pacs",
    "data.image_size=128",
    "data.val_fraction=0.1",
    "model.name=efficientnet-lite0",
    "model.freeze=true",
    "model.native_size=true",
    "model.stages=5",
    "algorithm.name=fedcirone",
    "algorithm.standardise=domain",
    "algorithm.penalty=1",
)
"""Stages, standardise and penalty were chosen by leaving out the training domains of these runs in turn."""


def draw_images(folder: Path, kind: str, size: int) -> Split:
    """Draw images of a kind that the model was not trained for."""
    rng = np.random.default_rng(0)
    if kind == "noise":
        pixels = list(rng.integers(0, 256, (UNLIKE_IMAGES, size, size, 3), dtype=np.uint8))
    elif kind in DIGITS:
        with np.load(folder / f"{kind}.npz") as arrays:
            images = arrays["x_test"]
        pixels = [to_pixels(images[row], size, 3) for row in rng.permutation(len(images))[:UNLIKE_IMAGES]]
    else:
        files = sorted(str(path) for path in (folder / kind).rglob("*") if path.name.lower().endswith(SUFFIXES))
        pixels = [read_file(files[row], size, 3) for row in rng.permutation(len(files))[:UNLIKE_IMAGES]]
    return Split(np.stack(pixels), np.zeros(len(pixels), np.int64), "")


def measure(model: TrainedModel, domain: Domain) -> list[dict[str, Any]]:
    """Accuracies on test images and on all, without adaptation (0 images) and with each number of images."""
    train, test = domain.train, domain.test
    splits = [split for split in (test, train, domain.validation) if split is not None and len(split)]
    x = torch.cat([model.inputs(split.pixels(np.arange(len(split)))) for split in splits])
    labels = torch.from_numpy(np.concatenate([split.labels for split in splits]))

    def to_row(adapted: TrainedModel, images: int) -> dict[str, Any]:
        with torch.inference_mode():
            correct = (adapted.network.head(adapted.network.encoder(x)).argmax(-1) == labels).double()
        return {"images": images, "test": float(correct[: len(test)].mean()), "all": float(correct.mean())}

    rows = [to_row(model, 0)]
    for count in COUNTS:
        for seed in SEEDS if count < MAX_IMAGES else SEEDS[:1]:
            chosen = np.random.default_rng(seed).permutation(len(train))[:count]
            adapted, estimate = adapt_model(model, train.take(chosen))
            rows.append(to_row(adapted, count) | {"expected": estimate.accuracy, "novelty": estimate.novelty})
    return rows


def table(which: str) -> str:
    """`accuracy`: by number of images; `estimate`: expected and true accuracy; `unlike`: novelty of other images."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    values: dict[tuple[str, int, str], list[float]] = {}
    for domain, rows in published["domains"].items():
        for row in rows:
            for name in row.keys() - {"images"}:
                values.setdefault((domain, row["images"], name), []).append(row[name])

    def mean(domain: str, count: int, name: str) -> float:
        return float(np.mean(values[domain, count, name]))

    if which == "accuracy":
        lines = [["unlabelled images", *DOMAINS, "mean", "mean, all images"]]
        for count in (0, *COUNTS):
            test, whole = ([mean(domain, count, part) for domain in DOMAINS] for part in ("test", "all"))
            label = {0: "none", MAX_IMAGES: f"at most {MAX_IMAGES:,}"}.get(count, f"{count}")
            lines.append([label, *(f"{100 * v:.1f}" for v in (*test, np.mean(test), np.mean(whole)))])
    elif which == "estimate":
        lines = [["unlabelled images", *DOMAINS, "mean absolute error"]]
        for count in COUNTS:
            pairs = [(mean(domain, count, "expected"), mean(domain, count, "all")) for domain in DOMAINS]
            errors = [abs(e - row["all"]) for rows in published["domains"].values()
                      for row in rows if row["images"] == count for e in [row["expected"]]]  # fmt: skip
            cells = [f"{100 * expected:.0f} / {100 * true:.0f}" for expected, true in pairs]
            lines.append([f"{count:,}", *cells, f"{100 * np.mean(errors):.1f}"])
    else:
        lines = [["images", *(f"without {domain}" for domain in DOMAINS)]]
        for count in COUNTS:
            cells = []
            for domain in DOMAINS:
                drawn = values[domain, count, "novelty"]
                refused = sum(novelty >= TOO_NOVEL for novelty in drawn)
                cells.append(f"{np.mean(drawn):.2f}" + (f" ({refused} of {len(drawn)} refused)" if refused else ""))
            lines.append([f"the left-out domain, {count:,}", *cells])
        for kind in (*DIGITS, "noise", *OFFICE):
            cells = [published["unlike"][domain][kind] for domain in DOMAINS]
            lines.append([f"{kind}, {UNLIKE_IMAGES}", *(f"{v:.2f}" + " (refused)" * (v >= TOO_NOVEL) for v in cells)])
    return join_markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("pacs", "lists", "digits", "office"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/adaptation"))
    given = parser.parse_args()
    result: dict[str, Any] = {"domains": {}, "unlike": {}}
    for domain in DOMAINS:
        out = given.runs / domain
        if not (out / "summary.json").exists():
            where = (f"data.root={given.pacs}", f"data.lists={given.lists}", f"partition.hold_out={domain}")
            with open_run(resolve_config(ConfigRequest(None, None, {}, (*SETTINGS, *where))), out) as (_, rounds):
                list(rounds)
        run = load_run(out)
        model = open_model(run, device="cpu").with_cached_features()
        result["domains"][domain] = measure(model, open_run_data(run)[1][domain])
        folders = dict.fromkeys(DIGITS, given.digits) | dict.fromkeys(("noise", *OFFICE), given.office)
        novelties = {}
        for kind, folder in folders.items():
            _, estimate = adapt_model(model, draw_images(folder, kind, model.size))
            novelties[kind] = estimate.novelty
        result["unlike"][domain] = novelties
        print(domain, result["domains"][domain], novelties, flush=True)
    PUBLISHED.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
