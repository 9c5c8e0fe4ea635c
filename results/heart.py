"""FedCiROne on a table: heart disease at four hospitals, FLamby's protocol, five splits declared as seeds 0 to 4.

python results/heart.py DIR    (DIR holds cleveland.csv, hungarian.csv, switzerland.csv and va.csv)

As in FLamby (du Terrail et al., NeurIPS 2022, https://arxiv.org/abs/2210.04620): the columns slope, ca, thal and rows
with gaps are left out, cp and restecg are one-hot, two thirds of each hospital are for training, stratified where that
is possible, and the accuracy is that of all test rows. Writes results/heart.json.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

import fedcir

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
KINDS = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
SEEDS = range(5)
ROWS = ("auto", "federation", "client")
FLAMBY = {"pooled training": 0.795, "best local model": 0.784, "FedAvg": 0.748, "best federated method": 0.779}
"""FLamby's published results, means of five seeds."""
TARGET = Path(__file__).parent / "heart.json"


def read_hospital(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read features (N, 15) and whether a patient is ill."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[name] for name in (*NUMBERS, *KINDS, "num"))]
    x = [
        [float(row[name]) for name in NUMBERS]
        + [float(float(row[name]) == kind) for name, kinds in KINDS.items() for kind in kinds]
        for row in rows
    ]
    return np.array(x, np.float32), np.array([float(row["num"]) > 0 for row in rows], np.int64)


def train(data: dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]], standardise: str, seed: int) -> float:
    """Accuracy on all test rows."""
    clients, tested = {}, {}
    for name, (x, y) in data.items():
        # Of the 46 rows of switzerland, one is healthy: they cannot be stratified.
        stratify = y if np.bincount(y).min() > 1 else None
        parts = train_test_split(x, y, test_size=0.34, random_state=seed, stratify=stratify)
        x_train, x_test, y_train, y_test = map(torch.from_numpy, parts)
        clients[name] = TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)
        tested[name] = len(y_test)
    algorithm = fedcir.FedCiROne(standardise=standardise)
    result = fedcir.train(clients, encoder=torch.nn.Identity(), num_classes=2, algorithm=algorithm, seed=seed)
    accuracy = result.records[-1].accuracy
    assert accuracy is not None
    return sum(accuracy[name] * tested[name] for name in tested) / sum(tested.values())


def main() -> None:
    data = {name: read_hospital(Path(sys.argv[1], f"{name}.csv")) for name in HOSPITALS}
    found = {row: [round(train(data, row, seed), 4) for seed in SEEDS] for row in ROWS}
    for row, values in found.items():
        print(f"{row}: {statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f} {values}")
    rows = {name: len(y) for name, (_, y) in data.items()}
    TARGET.write_text(
        json.dumps({"rows": rows, "accuracy": found, "flamby": FLAMBY}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
