"""Compare methods on tasks other than classification, and write tasks.json for docs/tasks.md.

python results/tasks.py FOLDER --digits DIR [--tasks segmentation] [--seeds 0 1 2]

FOLDER gets the data and the runs; what is there already is not made again. DIR holds four domains of digits, 32x32
RGB, as <domain>.npz. Every task is one `fedcir compare` with settings that all methods share:

- multilabel: twelve labels of a digit: which of the ten it is, whether it is odd, and whether it is 5 or more.
- segmentation: each pixel is background or part of the digit. A mask is Otsu's threshold of the image of MNIST or USPS,
  whose strokes are light on black. An image of MNIST-M is made from the image of MNIST in the same row, and has its
  mask; the two domains use different rows. In SVHN, no threshold finds the digit: it is left out.
- regression: disease progression of 442 diabetes patients (Efron et al., 2004), in scikit-learn. The sites are women
  and men with a body mass index up to the median of 25.7 and above it.

The learning rates are those of 0.01, 0.03 and 0.1 with the best FedAvg on a fifth of the training examples set aside,
seed 0, after as many rounds. For regression, rate and rounds are the best of 0.003, 0.01 and 0.03 and of 5, 10, 15 and
20, on five seeds.
"""

import argparse
import csv
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_diabetes
from torch import nn

from fedcir.reporting.methods import format_estimate
from fedcir.reporting.page import join_markdown
from fedcir.runs.reader import Run, load_run
from fedcir.runs.statistics import Estimate, compare_methods
from fedcir.types import Metric

PUBLISHED = Path(__file__).with_name("tasks.json")
METHODS = ("fedavg", "fedprox", "fedbn", "fedrep", "centralized")
DOMAINS = ("mnist", "mnist_m", "svhn", "usps")
LABELLED, SEGMENTED = (500, 1000), (300, 300)
"""Training and test images of each domain."""
FIRST_ROWS = {"mnist_m": (SEGMENTED[0], SEGMENTED[1])}
"""First training and test row of a domain, other than 0: MNIST-M must not show the digits of MNIST."""

Images = NDArray[np.uint8]


class Part(NamedTuple):
    name: str
    images: Images  # (N, 32, 32, 3)
    digits: NDArray[np.int64]  # (N,)


def read_parts(digits: Path, domain: str, counts: tuple[int, int], first: tuple[int, int] = (0, 0)) -> Iterator[Part]:
    """Read training and test rows of a domain."""
    with np.load(digits / f"{domain}.npz") as arrays:
        for name, count, start in zip(("train", "test"), counts, first, strict=True):
            rows = slice(start, start + count)
            yield Part(name, arrays[f"x_{name}"][rows], arrays[f"y_{name}"][rows])


def write_labels(digits: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for domain in DOMAINS:
        arrays = {}
        for part in read_parts(digits, domain, LABELLED):
            identity = part.digits[:, None] == np.arange(10)
            labels = np.column_stack([identity, part.digits % 2 == 1, part.digits >= 5])  # (N, 12)
            arrays |= {f"x_{part.name}": part.images, f"y_{part.name}": labels.astype(np.uint8)}
        np.savez(out / f"{domain}.npz", **arrays)


def write_masks(digits: Path, out: Path) -> None:
    for domain, original in (("mnist", "mnist"), ("mnist_m", "mnist"), ("usps", "usps")):
        first = FIRST_ROWS.get(domain, (0, 0))
        sources = read_parts(digits, original, SEGMENTED, first)
        for part, source in zip(read_parts(digits, domain, SEGMENTED, first), sources, strict=True):
            assert np.array_equal(part.digits, source.digits)
            folders = [out / domain / part.name / kind for kind in ("images", "masks")]
            for folder in folders:
                folder.mkdir(parents=True)
            for row, (image, grey) in enumerate(zip(part.images, source.images[..., 0], strict=True)):
                mask = (grey > find_threshold(grey)).astype(np.uint8)
                for folder, pixels in zip(folders, (image, mask), strict=True):
                    Image.fromarray(pixels).save(folder / f"{row:04d}.png")


def find_threshold(grey: Images) -> int:
    """Threshold above which pixels are foreground: the one of the largest variance between both (Otsu, 1979)."""
    shares = np.bincount(grey.ravel(), minlength=256) / grey.size
    below = shares.cumsum()
    mean_below = (shares * np.arange(256)).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (mean_below[-1] * below - mean_below) ** 2 / (below * (1 - below))
    return int(np.nanargmax(between))


def write_patients(digits: Path, out: Path) -> None:
    out.mkdir(parents=True)
    data = load_diabetes(scaled=False)
    median = np.median(data.data[:, data.feature_names.index("bmi")])
    with open(out / "diabetes.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*data.feature_names, "progression", "site"])
        for row, target in zip(data.data, data.target, strict=True):
            patient = dict(zip(data.feature_names, row, strict=True))
            weight = "high" if patient["bmi"] > median else "low"
            writer.writerow([*row, target, f"{'women' if patient['sex'] == 1 else 'men'}, {weight} BMI"])


def mlp(inputs: int = 10, width: int = 32) -> nn.Module:
    """Two layers with BatchNorm, which FedBN needs and the network for tables of fedcir does not have."""
    layers = [(nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU()) for size in (inputs, width)]
    return nn.Sequential(*(layer for block in layers for layer in block))


class Study(NamedTuple):
    write: Callable[[Path, Path], None]
    """Writes the data into a folder."""
    data: str
    """What the folder's file is called, if the data are a file."""
    options: tuple[str, ...]


STUDIES = {
    "multilabel": Study(
        write_labels, "", ("--dataset", "arrays", "--rounds", "20", "--lr", "0.1", "--batch-size", "32")
    ),
    "segmentation": Study(
        write_masks,
        "",
        (
            *("--dataset", "masks", "--image-size", "32", "--rounds", "10", "--lr", "0.1", "--batch-size", "16"),
            *("--set", "model.width=8", "--set", "data.classes=background,digit"),
        ),
    ),
    "regression": Study(
        write_patients,
        "diabetes.csv",
        (
            *("--dataset", "csv", "--model", "results/tasks.py:mlp", "--rounds", "5", "--lr", "0.003"),
            *("--batch-size", "32", "--set", "data.target=progression", "--set", "data.test_fraction=0.3"),
        ),
    ),
}
COMMON = ("--local-steps", "20", "--eval-every", "5")


def make_command(task: str, folder: str, seeds: Sequence[int]) -> list[str]:
    study = STUDIES[task]
    root = f"{folder}/data/{task}/{study.data}".rstrip("/")
    command = ["fedcir", "compare", "--algorithms", ",".join(METHODS), "--seeds", ",".join(map(str, seeds))]
    return [*command, *study.options, *COMMON, "--data-root", root, "--out", f"{folder}/{task}"]


def measure(task: str, folder: Path, digits: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Run the comparison of a task, or what is missing of it, and return its results."""
    data = folder / "data" / task
    if not data.exists():
        partial = data.with_name(f"{task}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        STUDIES[task].write(digits, partial)
        partial.rename(data)
    resume = ["--resume"] if (folder / task).exists() else []
    subprocess.run([sys.executable, "-m", *make_command(task, str(folder), seeds), *resume], check=True)
    runs = {method: {seed: load_run(folder / task / f"{method}-{seed}") for seed in seeds} for method in METHODS}
    first = runs[METHODS[0]][seeds[0]]
    reported = first.task.metrics_reported
    differences = {
        result.algorithm: None if result.difference is None else [result.difference.mean, result.half_width]
        for result in compare_methods(runs, METHODS[0])
    }
    return {
        "command": shlex.join(make_command(task, "FOLDER", seeds)),
        "seeds": list(seeds),
        "date": datetime.now(UTC).date().isoformat(),
        "sites": count_examples(first),
        "metrics": [asdict(metric) for metric in reported],
        "methods": {
            method: {
                "sites": list_scores(by_seed.values(), reported[0].name),
                **{metric.name: list_means(by_seed.values(), metric.name) for metric in reported},
                "worst": [run.scores["score_worst"] for run in by_seed.values()],
                "difference": differences[method],
            }
            for method, by_seed in runs.items()
        },
    }


def count_examples(run: Run) -> dict[str, list[int]]:
    """Training and test examples of each site."""
    clients = run.manifest["clients"]
    train = {name: sum(len(c["train"]) for c in clients if c["domain"] == name) for name in run.test_images}
    return {name: [train[name], count] for name, count in run.test_images.items()}


def list_scores(runs: Iterable[Run], name: str) -> dict[str, list[float]]:
    """Values of a metric after the last round by site, one for each seed."""
    by_seed = [run.final[name] if name in run.final else run.final["metrics"][name] for run in runs]
    return {site: [values[site] for values in by_seed] for site in by_seed[0]}


def list_means(runs: Iterable[Run], name: str) -> list[float]:
    """Means of a metric over sites, one for each seed."""
    return [statistics.fmean(values) for values in zip(*list_scores(runs, name).values(), strict=True)]


def table(task: str) -> str:
    """Write the command of a task, and a row for each method: mean and standard deviation over seeds."""
    study = json.loads(PUBLISHED.read_text(encoding="utf-8"))[task]
    primary, *others = (Metric(**metric) for metric in study["metrics"])
    sites = [f"{name} ({train} / {test})" for name, (train, test) in study["sites"].items()]
    best = "higher" if primary.higher_is_better else "lower"
    header = ["method", *sites, f"mean {primary.label}", "worst site", *(f"mean {metric.label}" for metric in others)]
    rows = [[*header, "difference to fedavg (95 %, seeds)"]]
    for method, found in study["methods"].items():
        cells = [format_estimate(Estimate.of(values), primary) for values in found["sites"].values()]
        cells += [format_estimate(Estimate.of(found[name]), primary) for name in (primary.name, "worst")]
        cells += [format_estimate(Estimate.of(found[metric.name]), metric) for metric in others]
        difference = ""
        if found["difference"] is not None:
            change, half = found["difference"]
            difference = f"{primary.format_change(change)} ± {primary.format(half)}"
        rows.append([method, *cells, difference])
    seeds = ", ".join(map(str, study["seeds"]))
    about = f"{primary.title} by site (training / test examples), {best} is better; seeds {seeds}; {study['date']}."
    return f"\n{about}\n\n```bash\n{study['command']}\n```\n\n{join_markdown(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--digits", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    folder, digits = options.folder.resolve(), options.digits.resolve()
    os.chdir(PUBLISHED.parents[1])  # the command names a network in this file
    for task in options.tasks:
        study = measure(task, folder, digits, options.seeds)
        published = json.loads(PUBLISHED.read_text(encoding="utf-8")) if PUBLISHED.exists() else {}
        studies = {name: made for name in STUDIES if (made := {**published, task: study}.get(name))}
        PUBLISHED.write_text(json.dumps(studies, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
