"""Real hospitals in FLamby's protocol: heart disease at four hospitals, survival with breast cancer in six regions.

python results/hospitals.py HEART_DIR TCGA_DIR

HEART_DIR holds cleveland.csv, hungarian.csv, switzerland.csv and va.csv; TCGA_DIR brca.csv and train_test_split.csv.
Writes the tables of sites into a temporary folder, trains each row with `fedcir run --dataset csv` and the options of
`HEART` or `TCGA`, and writes results/hospitals.json.

As in FLamby (du Terrail et al., NeurIPS 2022, https://arxiv.org/abs/2210.04620), clients take 100 steps a round for 15
or 5 rounds, and the mean over clients is weighted by their training rows; local and pooled training are 50 or 30 epochs
of Adam. Heart disease: rows with gaps and the columns slope, ca, thal are left out, cp and restecg are one-hot without
their first value, the model is logistic regression. TCGA-BRCA: 39 covariates, not scaled, and a linear Cox model.

FLamby's figure of a method is that of its model on the test rows of all sites as one set: the concordance index
compares patients of different regions too, and heart disease is scaled with the mean and the spread of all training
rows, although clients trained with those of their own. FLamby's split is fixed, so its seeds differ in initial weights
and batches.
"""

import contextlib
import csv
import datetime
import io
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from typer.main import get_command

import fedcir
from fedcir.cli import app
from fedcir.reporting.page import join_markdown
from fedcir.tasks.survival import count_concordant

TARGET = Path(__file__).with_suffix(".json")
SEEDS = range(5)
FOLDS = 5
RESAMPLES = 2000
FLAMBY_SPLIT = 43
"""Seed of the split of heart disease in FLamby's source."""
Scale = Literal["client", "federation", "none"]


@dataclass(frozen=True)
class Patients:
    """Rows of all sites."""

    names: tuple[str, ...]
    """Columns of x, sorted, as fedcir orders them."""
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    """Whether a patient is ill (N, 1), or event and time (N, 2)."""
    site: NDArray[np.str_]
    test: NDArray[np.bool_]

    @property
    def sites(self) -> list[str]:
        return sorted(set(self.site.tolist()))

    def take(self, rows: NDArray[np.bool_]) -> "Patients":
        return replace(self, x=self.x[rows], y=self.y[rows], site=self.site[rows], test=self.test[rows])

    def standardise(self, scale: Scale) -> NDArray[np.float64]:
        """Scale x with the mean and the spread of the training rows: of each site, or of all."""
        x = self.x.copy()
        for site in self.sites if scale == "client" else [None] if scale == "federation" else []:
            rows = np.full(len(x), True) if site is None else self.site == site
            train = self.x[rows & ~self.test]
            spread = train.std(0)
            x[rows] = (x[rows] - train.mean(0)) / np.where(spread > 0, spread, 1)
        return x


@dataclass(frozen=True)
class Row:
    """A method with its options for `fedcir run`."""

    options: tuple[str, ...]
    scale: Scale
    """`data.scale`: whose mean and spread scale the covariates."""
    alone: bool = False
    """Whether each site trains a model of its own."""
    task: str | None = None
    """Task, if not that of the study."""


@dataclass(frozen=True)
class Study:
    task: str
    targets: tuple[str, ...]
    score: Callable[[NDArray[np.float64], NDArray[np.float64]], float]
    """Metric of the outputs (N,) and targets of test rows."""
    split: Callable[[Patients, int], NDArray[np.bool_]]
    """Test rows of a random split."""
    pooled_scale: Scale
    """How FLamby scales the test rows of all sites as one set."""
    rows: Mapping[str, Row]
    published: Mapping[str, Sequence[float]]
    """FLamby's results on that set, its seeds 42 to 46."""


def accuracy(outputs: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(((outputs > 0) == (y[:, 0] > 0)).mean())


def concordance(outputs: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    concordant, pairs = count_concordant(outputs, y[:, 0] > 0, y[:, 1])
    return concordant / pairs if pairs else math.nan


def read_heart(folder: Path) -> Patients:
    """Read the patients of four hospitals, in the split of FLamby."""
    numbers = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
    kinds = {"cp": (2, 3, 4), "restecg": (1, 2)}
    names = (*numbers, *(f"{name}={kind}" for name in kinds for kind in kinds[name]))
    x, y, sites = [], [], []
    for site in ("cleveland", "hungarian", "switzerland", "va"):
        with open(folder / f"{site}.csv", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if all(row[name] for name in (*numbers, *kinds, "num")):
                    one_hot = [float(row[name]) == kind for name in kinds for kind in kinds[name]]
                    x.append([*(float(row[name]) for name in numbers), *one_hot])
                    y.append([float(row["num"]) > 0])
                    sites.append(site)
    order = np.argsort(names)
    patients = Patients(
        tuple(sorted(names)), np.array(x, float)[:, order], np.array(y, float), np.array(sites), np.zeros(len(x), bool)
    )
    return replace(patients, test=split_heart(patients, FLAMBY_SPLIT))


def split_heart(patients: Patients, seed: int) -> NDArray[np.bool_]:
    """Draw a third of each hospital, stratified where more than two patients are healthy and ill."""
    test = np.zeros(len(patients.x), bool)
    for site in patients.sites:
        rows = np.flatnonzero(patients.site == site)
        ill = patients.y[rows, 0].astype(int)
        stratify = ill if np.bincount(ill, minlength=2).min() > 2 else None
        _, drawn = train_test_split(rows, test_size=0.34, train_size=0.66, random_state=seed, stratify=stratify)
        test[drawn] = True
    return test


def read_tcga(folder: Path) -> Patients:
    """Read the patients of six regions, in the split of FLamby."""
    with open(folder / "brca.csv", encoding="utf-8", newline="") as file:
        rows = {row["pid"]: row for row in csv.DictReader(file)}
    with open(folder / "train_test_split.csv", encoding="utf-8", newline="") as file:
        split = [(rows[row["pid"]], row["fold"], row["fold2"]) for row in csv.DictReader(file)]
    names = tuple(sorted(split[0][0].keys() - {"pid", "E", "T"}))
    return Patients(
        names,
        np.array([[float(row[name]) for name in names] for row, _, _ in split]),
        np.array([[float(row[name]) for name in ("E", "T")] for row, _, _ in split]),
        np.array([f"region-{region.rpartition('_')[2]}" for _, _, region in split]),
        np.array([part == "test" for _, part, _ in split]),
    )


def split_tcga(patients: Patients, seed: int) -> NDArray[np.bool_]:
    """Draw a fifth of the patients with an event, and of the others, of each region."""
    return fold_tcga(patients, seed) == 0


def fold_tcga(patients: Patients, seed: int) -> NDArray[np.int64]:
    """Divide the patients with an event, and the others, of each region into five folds."""
    rng, folds = np.random.default_rng(seed), np.zeros(len(patients.x), np.int64)
    for site in patients.sites:
        for event in (0, 1):
            rows = np.flatnonzero((patients.site == site) & (patients.y[:, 0] == event))
            folds[rng.permutation(rows)] = np.arange(len(rows)) % FOLDS
    return folds


def write_tables(folder: Path, patients: Patients, targets: Sequence[str]) -> None:
    """Write the CSV file of each site, with its split."""
    folder.mkdir(parents=True)
    for site in patients.sites:
        with open(folder / f"{site}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*patients.names, *targets, "part"])
            for row in np.flatnonzero(patients.site == site):
                numbers = [f"{value:g}" for value in (*patients.x[row], *patients.y[row])]
                writer.writerow([*numbers, "test" if patients.test[row] else "train"])


def train(study: Study, row: Row, patients: Patients, seed: int, folder: Path) -> fedcir.Run:
    """Train on the patients' tables by the command `fedcir run`."""
    write_tables(folder / "tables", patients, study.targets)
    command = ["run", "--dataset", "csv", "--data-root", str(folder / "tables"), "--model", "linear"]
    settings = [f"task.name={row.task or study.task}", f"data.target={','.join(study.targets)}", "data.split=part"]
    command += [part for setting in (*settings, f"data.scale={row.scale}") for part in ("--set", setting)]
    command += ["--workers", "1", "--eval-every", "1000", "--quiet", "--no-report", "--seed", str(seed)]
    with contextlib.redirect_stdout(io.StringIO()):
        get_command(app)([*command, "--out", str(folder / "run"), *row.options], standalone_mode=False)
    return fedcir.load_run(folder / "run")


def predict(run: fedcir.Run, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Outputs of the model of a run, (N,): of two classes, the difference."""
    with torch.inference_mode():
        outputs = run.model()(torch.from_numpy(x).float()).double().numpy()
    return outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0)


def check_metric(run: fedcir.Run, test: Patients, outputs: NDArray[np.float64]) -> None:
    """Check that outputs on test rows give the metric that the run itself reports, at each site that defines it."""
    metric = run.task.primary.name
    for site, value in (run.records[-1].scores or {}).items():
        rows = test.site == site
        score = {"accuracy": accuracy, "concordance": concordance, "auroc": auroc}[metric](outputs[rows], test.y[rows])
        assert abs(score - value) < 1e-6, (site, score, value)


def auroc(outputs: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(roc_auc_score(y[:, 0], outputs))


def train_row(study: Study, row: Row, patients: Patients, seed: int) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Train a row; return its scores, and its outputs for the test rows of all sites as one set."""
    test, sites = patients.take(patients.test), patients.sites
    own_x = patients.standardise(row.scale)[patients.test]
    pooled_x = own_x if row.scale == "none" else patients.standardise(study.pooled_scale)[patients.test]
    by_site: dict[str, float] = {}
    by_model: dict[str, float] = {}
    for model in sites if row.alone else ["all"]:
        members = patients.take(patients.site == model) if row.alone else patients
        with tempfile.TemporaryDirectory() as folder:
            run = train(study, row, members, seed, Path(folder))
            own, pooled = predict(run, own_x), predict(run, pooled_x)
            check_metric(run, test, own)
        by_model[model] = round(study.score(pooled, test.y), 4)
        for site in [model] if row.alone else sites:
            by_site[site] = round(study.score(own[test.site == site], test.y[test.site == site]), 4)
    defined = {site: score for site, score in by_site.items() if not math.isnan(score)}
    return {"pooled": by_model, "sites": defined}, pooled


def resample(study: Study, patients: Patients, outputs: Mapping[str, list[NDArray[np.float64]]]) -> dict[str, Any]:
    """Intervals (95 %) of each row's mean over seeds, and of the difference to the first, over patients: bootstrap."""
    y, rng = patients.y[patients.test], np.random.default_rng(0)
    draws = [rng.integers(0, len(y), len(y)) for _ in range(RESAMPLES)]
    means = {
        name: np.array([statistics.fmean(study.score(row[rows], y[rows]) for row in seeds) for rows in draws])
        for name, seeds in outputs.items()
    }
    first = next(iter(means))
    ends = {name: np.percentile(values, (2.5, 97.5)) for name, values in means.items()}
    gains = {name: np.percentile(means[first] - values, (2.5, 97.5)) for name, values in means.items() if name != first}
    return {
        "intervals": {name: [round(end, 4) for end in pair.tolist()] for name, pair in ends.items()},
        "gains": {name: [round(end, 4) for end in pair.tolist()] for name, pair in gains.items()},
    }


FLAMBY = "--set local.momentum=0 --set local.weight_decay=0 --set server.weighting=samples --set server.max_update=0"
ADAM = "--set local.optimizer=adam --rounds 1"
FEDADAM = "--algorithm fedadam --set algorithm.beta2=0.999 --set algorithm.tau=1e-8"


def make_row(options: str, scale: Scale, **more: Any) -> Row:
    return Row(tuple(options.split()), scale, **more)


HEART_100 = f"{FLAMBY} --rounds 15 --local-steps 100 --batch-size 4"
HEART = Study(
    "multilabel",
    ("ill",),
    accuracy,
    split_heart,
    "federation",
    {
        "ours": make_row("--algorithm fedcirone", "federation", task="classification"),
        "local": make_row(
            f"--algorithm fedavg {FLAMBY} {ADAM} --lr 0.001 --batch-size 4 --set local.epochs=50", "client", alone=True
        ),
        "FedAvg": make_row(f"--algorithm fedavg {HEART_100} --lr 0.001", "client"),
        "FedProx": make_row(f"--algorithm fedprox --set algorithm.mu=0.01 {HEART_100} --lr 0.001", "client"),
        "SCAFFOLD": make_row(f"--algorithm scaffold {HEART_100} --lr 0.001", "client"),
        "FedAdam": make_row(f"{FEDADAM} --set algorithm.server_lr=0.01 {HEART_100} --lr 0.01", "client"),
        "pooled": make_row(
            f"--algorithm centralized {FLAMBY} {ADAM} --lr 0.001 --batch-size 4 --local-steps 1525", "federation"
        ),
    },
    {
        "local": (0.7795, 0.7756, 0.7913, 0.7835, 0.7913),
        "FedAvg": (0.7520, 0.7638, 0.7638, 0.7008, 0.7598),
        "FedProx": (0.7520, 0.7638, 0.7638, 0.7008, 0.7598),
        "SCAFFOLD": (0.7520, 0.7638, 0.7638, 0.7008, 0.7598),
        "FedAdam": (0.7756, 0.7677, 0.7795, 0.8031, 0.7677),
        "pooled": (0.7913, 0.7953, 0.7953, 0.7992, 0.7953),
    },
)
TCGA_100 = f"{FLAMBY} --rounds 5 --local-steps 100 --batch-size 8"
FULL_BATCH = "--algorithm fedavg --rounds 50 --local-steps 10 --batch-size 256 --lr 0.1 --set server.weighting=samples"
SCALES: tuple[Scale, ...] = ("federation", "client")
CHOICES = {
    f"data.scale={scale}, local.weight_decay={decay}": make_row(f"{FULL_BATCH} --set local.weight_decay={decay}", scale)
    for scale in SCALES
    for decay in (0, 0.01, 0.03, 0.1)
}
"""Recipes for TCGA-BRCA, of which cross-validation on training rows chooses one."""
TCGA = Study(
    "survival",
    ("E", "T"),
    concordance,
    split_tcga,
    "federation",
    {
        "local": make_row(
            f"--algorithm fedavg {FLAMBY} {ADAM} --lr 0.1 --batch-size 8 --set local.epochs=30", "none", alone=True
        ),
        "FedAvg": make_row(f"--algorithm fedavg {TCGA_100} --lr 0.1", "none"),
        "FedProx": make_row(f"--algorithm fedprox --set algorithm.mu=0.1 {TCGA_100} --lr 0.1", "none"),
        "SCAFFOLD": make_row(f"--algorithm scaffold {TCGA_100} --lr 0.01", "none"),
        "FedAdam": make_row(f"{FEDADAM} --set algorithm.server_lr=0.1 {TCGA_100} --lr 0.01", "none"),
        "pooled": make_row(
            f"--algorithm centralized {FLAMBY} {ADAM} --lr 0.1 --batch-size 8 --local-steps 545", "none"
        ),
    },
    {
        "local": (0.7560, 0.6447, 0.7495, 0.7256, 0.7619),
        "FedAvg": (0.8026, 0.4227, 0.8081, 0.8289, 0.8143),
        "FedProx": (0.7758, 0.4278, 0.7963, 0.8084, 0.7751),
        "SCAFFOLD": (0.69707, 0.65788, 0.75128, 0.70916, 0.68205),
        "FedAdam": (0.8381, 0.8209, 0.8560, 0.8619, 0.8337),
        "pooled": (0.7963, 0.7799, 0.6095, 0.7824, 0.5524),
    },
)


def choose(study: Study, patients: Patients, choices: Mapping[str, Row]) -> dict[str, float]:
    """Cross-validate recipes on training rows: the mean over folds of the metric on the fold that is left out."""
    train_rows = patients.take(~patients.test)
    folds = fold_tcga(train_rows, seed=0)
    parts = [replace(train_rows, test=folds == fold) for fold in range(FOLDS)]
    return {
        name: round(statistics.fmean(train_row(study, row, part, 0)[0]["pooled"]["all"] for part in parts), 4)
        for name, row in choices.items()
    }


def measure(study: Study, patients: Patients) -> dict[str, Any]:
    """Train all rows with five seeds on FLamby's split, and on five random splits."""
    outputs: dict[str, list[NDArray[np.float64]]] = {}
    found: dict[str, Any] = {"test": {s: int((patients.test & (patients.site == s)).sum()) for s in patients.sites}}
    found |= {"flamby split": {}, "random splits": {}}
    for name, row in study.rows.items():
        trained = [train_row(study, row, patients, seed) for seed in SEEDS]
        found["flamby split"][name] = [scores for scores, _ in trained]
        if not row.alone:
            outputs[name] = [pooled for _, pooled in trained]
        splits = [replace(patients, test=study.split(patients, seed)) for seed in SEEDS]
        found["random splits"][name] = [
            train_row(study, row, split, seed)[0] for seed, split in zip(SEEDS, splits, strict=True)
        ]
        both = (summarise(best_pooled(found[split][name])) for split in ("flamby split", "random splits"))
        print(name, *both, flush=True)
    return found | resample(study, patients, outputs)


def best_pooled(scores: Sequence[Mapping[str, Any]]) -> list[float]:
    """Scores by seed on all test rows as one set; of local models, those of the site with the highest mean."""
    models = scores[0]["pooled"]
    best = max(models, key=lambda model: statistics.fmean(seed["pooled"][model] for seed in scores))
    return [seed["pooled"][best] for seed in scores]


def summarise(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def show_difference(ours: Sequence[float], others: Sequence[float], paired: bool = False) -> str:
    """Mean difference and its 95 % interval by Student's t, or Welch's where values are not paired."""
    pairs = [np.subtract(ours, others, dtype=float).tolist()] if paired else [ours, others]
    variances = [statistics.variance(values) / len(values) for values in pairs]  # of the means
    total = sum(variances)
    terms = (v**2 / (len(values) - 1) for v, values in zip(variances, pairs, strict=True))
    half = stats.t.ppf(0.975, total**2 / sum(terms)) * total**0.5 if total else 0.0
    mean = statistics.fmean(ours) - statistics.fmean(others)
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


STUDIES = {"heart": HEART, "tcga": TCGA}
LABELS = {"local": "best local model", "pooled": "pooled training"}
RECIPES = {"heart": "**fedcirone**", "tcga": "**fedavg, our settings**"}
BEST = "FedAdam"
"""Best federated method of FLamby on both data sets."""


def table(which: str) -> str:
    """Write a table: `heart` or `tcga`, how sure its figures are (`heart sure`), or how settings were chosen."""
    name, _, part = which.partition(" ")
    return TABLES[part](name, load_results()[name])


@cache
def load_results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
    return results


def find_best(choice: Mapping[str, float]) -> str:
    return max(choice, key=lambda settings: choice[settings])


def main_table(name: str, found: Mapping[str, Any]) -> str:
    """FLamby's split, beside what FLamby published."""
    cells = [["method", "fedcir", "FLamby", "difference (95 %, seeds)", "fedcir, mean over sites"]]
    for row, scores in found["flamby split"].items():
        published = STUDIES[name].published[BEST if row == "ours" else row]
        values, sites = best_pooled(scores), [statistics.fmean(seed["sites"].values()) for seed in scores]
        theirs = f"{summarise(published)}{f' ({BEST})' if row == 'ours' else ''}"
        cells.append(
            [label(name, row), summarise(values), theirs, show_difference(values, published), summarise(sites)]
        )
    return join_markdown(cells)


def sure_table(name: str, found: Mapping[str, Any]) -> str:
    """How much figures vary over patients and splits, and our differences to other rows."""
    header = ["method", "95 % over patients", "ours ahead by", "five random splits", "ours ahead by"]
    cells, ours = [header], best_pooled(found["random splits"]["ours"])
    for row, scores in found["random splits"].items():
        interval, gain = found["intervals"].get(row), found["gains"].get(row)
        values = best_pooled(scores)
        shown = [f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "", show_ends(gain) if gain else ""]
        ahead = "" if row == "ours" else show_difference(ours, values, paired=True)
        cells.append([label(name, row), *shown, summarise(values), ahead])
    return join_markdown(cells)


def show_ends(ends: Sequence[float]) -> str:
    return f"{ends[0]:+.3f} to {ends[1]:+.3f}"


def choice_table(name: str, found: Mapping[str, Any]) -> str:
    """Settings that were tried on training rows."""
    best = found["choice"][find_best(found["choice"])]
    cells = [["settings", "concordance index, mean over five folds"]]
    for settings, value in found["choice"].items():
        cells.append([f"`{settings}`", f"**{value:.3f}**" if value == best else f"{value:.3f}"])
    return join_markdown(cells)


def label(name: str, row: str) -> str:
    return RECIPES[name] if row == "ours" else LABELS.get(row, row)


TABLES = {"": main_table, "sure": sure_table, "choice": choice_table}


def main() -> None:
    heart, tcga = read_heart(Path(sys.argv[1])), read_tcga(Path(sys.argv[2]))
    choice = choose(TCGA, tcga, CHOICES)
    print(json.dumps(choice, indent=1), flush=True)
    recipe = CHOICES[find_best(choice)]
    found = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "heart": measure(HEART, heart),
        "tcga": measure(replace(TCGA, rows={"ours": recipe, **TCGA.rows}), tcga) | {"choice": choice},
    }
    TARGET.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
