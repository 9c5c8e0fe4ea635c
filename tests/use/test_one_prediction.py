"""Whatever asks a run to predict gets what the run's own tests got."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bands import FURTHER_METHODS

from fedcir.algorithms import names
from fedcir.analysis.diagnose import diagnose_run
from fedcir.analysis.metrics import expected_calibration_error
from fedcir.analysis.views import data_of_run
from fedcir.config import Config
from fedcir.runs.run import Run, load_run
from fedcir.use.evaluate import evaluate_run
from fedcir.use.predictor import Predictor
from fedcir.use.trained import open_trained

Train = Callable[..., Path]


@pytest.mark.parametrize("name", [*names(), *FURTHER_METHODS])
def test_evaluate_on_the_runs_own_test_set_gives_exactly_the_summarys_accuracies(
    method_run: Callable[[str], Run], name: str
) -> None:
    run = method_run(name)
    found = evaluate_run(run, device="cpu")
    assert {each.tested.domain: each.accuracy.value for each in found} == run.final["accuracy"]
    assert found.mean.value == pytest.approx(run.final["accuracy_mean"], abs=1e-12)
    assert {view.domain: view.accuracy for view in diagnose_run(run).views} == run.final["accuracy"]


@pytest.mark.parametrize("name", ["fedproto", "fedcir-sampling"])
def test_these_accuracies_are_not_those_of_the_plain_network(method_run: Callable[[str], Run], name: str) -> None:
    """Otherwise the test above would show nothing."""
    run = method_run(name)
    _, domains, _ = data_of_run(run)
    plain = {}
    for domain in domains:
        network = run.model(domain=domain.name if name == "fedproto" else None)
        inputs = open_trained(run, site=domain.name, device="cpu").inputs(domain.test.pixels(np.arange(90)))
        with torch.inference_mode():
            plain[domain.name] = float((network(inputs).argmax(-1).numpy() == domain.test.labels).mean())
    assert plain != run.final["accuracy"]


@pytest.mark.parametrize("name", ["fedavg", "fedproto", "fedcir-sampling"])
def test_what_is_predicted_of_an_image_does_not_depend_on_the_images_beside_it(
    method_run: Callable[[str], Run], name: str
) -> None:
    run = method_run(name)
    _, domains, _ = data_of_run(run)
    predictor = Predictor(run, site="one" if name == "fedproto" else None, device="cpu")
    images = domains["one"].test.pixels(np.arange(12))
    together = predictor(images)
    for number in (0, 5, 11):
        (alone,) = predictor(images[number])
        assert alone.label == together[number].label
        assert alone.probability == pytest.approx(together[number].probability, abs=1e-5)


def test_the_temperature_of_fedproto_is_that_of_its_prototypes(method_run: Callable[[str], Run]) -> None:
    """It lowers the calibration error of what the method predicts, on other images than it was fitted on."""
    found = evaluate_run(method_run("fedproto"), device="cpu")
    assert found.temperature is not None
    tested = found.all.tested
    raw = tested.probabilities**found.temperature  # softmax(logits), up to a factor for each image
    before = expected_calibration_error(tested.labels, raw / raw.sum(1, keepdims=True))
    assert found.all.calibration_error < before


@pytest.mark.parametrize("method", ["fedbn", "fedproto"])
def test_a_client_that_never_trained_is_evaluated_as_the_run_tested_it(
    tiny: Callable[..., Config], train: Train, tmp_path: Path, method: str
) -> None:
    config = tiny(method, "server.active=1", "server.rounds=1", "run.workers=1")
    run = load_run(train(config, tmp_path / "run"))
    assert len(list((run.path / "clients").iterdir())) == 1
    found = evaluate_run(run, device="cpu")
    assert {each.tested.domain: each.accuracy.value for each in found} == run.final["accuracy"]
