"""Accuracy against the number of clients, how many of them train in a round, and their label skew."""

from functools import partial

from fedcir.insight.experiments.axes import accuracy_against
from fedcir.insight.experiments.experiment import Experiment, Point
from fedcir.insight.experiments.paper import METHODS

PAIRS = {
    "paper": ((10, 5), (20, 10), (50, 10), (50, 25)),
    "small": ((10, 5), (20, 10), (50, 10)),
    "smoke": ((6, 3), (8, 4)),
}
BETAS = {"paper": (0.1, 0.5, 1, 10), "small": (0.1, 0.5), "smoke": (0.5,)}


def points(scale: str) -> list[Point]:
    return [
        Point(
            f"{active} of {clients}, beta {beta:g}",
            {
                "partition": {"scheme": "dirichlet", "clients": clients, "beta": float(beta)},
                "server": {"active": active},
            },
        )
        for beta in BETAS[scale]
        for clients, active in PAIRS[scale]
    ]


EXPERIMENT = Experiment(
    "test accuracy (%) by the number of clients, active clients and label skew",
    ("domainnet", "pacs"),
    METHODS,
    partial(accuracy_against, axis="active of all clients, Dirichlet beta", joined=False),
    points,
)
