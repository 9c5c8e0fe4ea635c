"""Accuracy against the steps that a client takes in a round."""

from functools import partial

from fedcir.insight.experiments.axes import accuracy_against
from fedcir.insight.experiments.experiment import Experiment, Point
from fedcir.insight.experiments.paper import METHODS

STEPS = {"paper": (5, 20, 50, 100, 200), "small": (5, 20, 50, 100), "smoke": (1, 4)}


def points(scale: str) -> list[Point]:
    return [Point(f"E {steps}", {"local": {"steps": steps}}) for steps in STEPS[scale]]


EXPERIMENT = Experiment(
    "test accuracy (%) against the local steps in a round",
    ("domainnet", "pacs"),
    METHODS,
    partial(accuracy_against, axis="local steps E in a round"),
    points,
)
