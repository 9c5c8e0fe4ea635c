"""Accuracy against the steps that a client takes in a round."""

from fedcir.insight.experiments.axes import accuracy_against
from fedcir.insight.experiments.experiment import Experiment, Outcome, Point, Results
from fedcir.insight.experiments.paper import METHODS

STEPS = {"paper": (5, 20, 50, 100, 200), "small": (5, 20, 50, 100), "smoke": (1, 4)}


def points(scale: str) -> list[Point]:
    return [Point(f"E {steps}", {"local": {"steps": steps}}) for steps in STEPS[scale]]


def outcome(results: Results) -> Outcome:
    return accuracy_against(results, "local steps E in a round")


EXPERIMENT = Experiment(
    "test accuracy (%) against the local steps in a round",
    ("domainnet", "pacs"),
    METHODS,
    outcome,
    points,
)
