"""Accuracy against label skew: Dirichlet(beta) within each domain, all clients active."""

from functools import partial

from fedcir.insight.experiments.axes import accuracy_against
from fedcir.insight.experiments.experiment import Experiment, Point
from fedcir.insight.experiments.paper import METHODS

CLIENTS = {"paper": 50, "small": 20, "smoke": 8}
BETAS = {"paper": (0.1, 0.5, 1, 10), "small": (0.1, 0.5, 1, 10), "smoke": (0.1, 10)}


def points(scale: str) -> list[Point]:
    split = {"scheme": "dirichlet", "clients": CLIENTS[scale]}
    return [Point(f"beta {beta:g}", {"partition": {**split, "beta": float(beta)}}) for beta in BETAS[scale]]


EXPERIMENT = Experiment(
    "test accuracy (%) against label skew; smaller beta gives more skew",
    ("domainnet", "pacs"),
    METHODS,
    partial(accuracy_against, axis="Dirichlet beta"),
    points,
)
