"""Whatever asks a run to predict gets what the run's own tests got."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bands import FURTHER_METHODS

from fedcir.analysis.diagnosis import diagnose_run
from fedcir.config import Config
from fedcir.inference.evaluation import expected_calibration_error
from fedcir.inference.model import open_model
from fedcir.inference.predictor import Predictor
from fedcir.reporting.evaluation_report import evaluate
from fedcir.runs.evaluation_data import open_run_data
from fedcir.runs.reader import Run, load_run
from kinds import mark_others_slow

Train = Callable[..., Path]


@pytest.mark.parametrize(
    "name", [*mark_others_slow(fast=["fedavg", "fedbn", "fedproto", "centralized"]), *FURTHER_METHODS]
)
def test_evaluate_on_the_runs_own_test_set_gives_exactly_the_summarys_accuracies(
    method_run: Callable[[str], Run], name: str
) -> None:
    run = method_run(name)
    result = evaluate(run, device="cpu")
    assert {item.domain: item.accuracy for item in result} == run.final["accuracy"]
    assert result.mean.value == pytest.approx(run.final["accuracy_mean"], abs=1e-12)
    assert {view.domain: view.accuracy for view in diagnose_run(run).predictions} == run.final["accuracy"]


@pytest.mark.parametrize("name", ["fedproto", "fedcir-sampling"])
def test_these_accuracies_are_not_those_of_the_plain_network(method_run: Callable[[str], Run], name: str) -> None:
    """Otherwise the test above would show nothing."""
    run = method_run(name)
    _, domains, _ = open_run_data(run)
    plain = {}
    for domain in domains:
        network = run.model(domain=domain.name if name == "fedproto" else None)
        inputs = open_model(run, site=domain.name, device="cpu").inputs(domain.test.pixels(np.arange(90)))
        with torch.inference_mode():
            plain[domain.name] = float((network(inputs).argmax(-1).numpy() == domain.test.labels).mean())
    assert plain != run.final["accuracy"]


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedcir-sampling"])
def test_what_is_predicted_of_an_image_does_not_depend_on_the_images_beside_it(
    method_run: Callable[[str], Run], name: str
) -> None:
    run = method_run(name)
    _, domains, _ = open_run_data(run)
    predictor = Predictor(run, site="one" if name == "fedproto" else None, device="cpu")
    images = domains["one"].test.pixels(np.arange(12))
    together = predictor(images)
    for number in (0, 5, 11):
        (alone,) = predictor(images[number])
        assert alone.label == together[number].label
        assert alone.probability == pytest.approx(together[number].probability, abs=1e-5)


def test_the_temperature_of_fedproto_is_that_of_its_prototypes(method_run: Callable[[str], Run]) -> None:
    """It lowers the calibration error of what the method predicts, on other images than it was fitted on."""
    result = evaluate(method_run("fedproto"), device="cpu")
    assert result.temperature is not None
    tested = result.all
    raw = tested.probabilities**result.temperature  # softmax(logits), up to a factor for each image
    before = expected_calibration_error(tested.labels, raw / raw.sum(1, keepdims=True))
    assert result.all.calibration_error < before


@pytest.mark.parametrize("method", ["fedbn", "fedproto"])
def test_a_client_that_never_trained_is_evaluated_as_the_run_tested_it(
    tiny: Callable[..., Config], train: Train, tmp_path: Path, method: str
) -> None:
    config = tiny(method, "server.active=1", "server.rounds=1", "run.workers=1")
    run = load_run(train(config, tmp_path / "run"))
    assert len(list((run.path / "clients").iterdir())) == 1
    result = evaluate(run, device="cpu")
    assert {item.domain: item.accuracy for item in result} == run.final["accuracy"]
