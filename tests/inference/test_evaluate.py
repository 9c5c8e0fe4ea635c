"""A run's model on labelled images: of its own data, of others, and of a site that nobody trained on."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bands import CLASSES, write_pictures

import fedcir
from fedcir import InputError
from fedcir.config import Config
from fedcir.inference.evaluation import DomainPredictions, Evaluation, expected_calibration_error, wilson_interval
from fedcir.inference.model import open_model
from fedcir.models.normalisation import estimate_statistics, find_statistics_layers
from fedcir.models.tensors import is_statistic
from fedcir.reporting.evaluation_report import build_domain_rows, describe_evaluation, evaluate

Settings = Callable[..., Config]


@pytest.fixture(scope="module")
def result(run: Path) -> Evaluation:
    return evaluate(run, device="cpu")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A domain that the run knows, and one that it does not, of two of its classes."""
    return write_pictures(tmp_path_factory.mktemp("elsewhere"), ("night", "dusk"), CLASSES[:2], count=10, seed=1)


def test_its_own_test_images_give_the_accuracies_of_the_last_round(run: Path, result: Evaluation) -> None:
    final = fedcir.load_run(run).final
    assert {item.domain: item.accuracy for item in result} == pytest.approx(final["accuracy"])
    assert result.mean.value == pytest.approx(final["accuracy_mean"])
    assert all(item.is_trained_on for item in result)


def predictions(labels: list[int], probabilities: Any) -> DomainPredictions:
    with np.errstate(divide="ignore"):
        return DomainPredictions("site", np.array(labels), np.log(np.asarray(probabilities, float)))


def counted(confusion: list[list[int]]) -> DomainPredictions:
    """Predictions with this confusion matrix."""
    counts = np.array(confusion)
    pairs = [pair for pair in np.ndindex(*counts.shape) for _ in range(counts[pair])]
    return predictions([label for label, _ in pairs], np.eye(len(counts))[[predicted for _, predicted in pairs]])


def test_metrics_by_hand() -> None:
    """Four images, of which the third is wrong, with confidences of 0.9, 0.8, 0.6 and 0.7."""
    result = predictions([0, 1, 0, 1], [[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]])
    assert result.accuracy == result.accuracy_interval.value == 0.75
    assert result.confusion.tolist() == [[1, 1], [0, 2]]
    assert result.log_loss == pytest.approx(-np.log([0.9, 0.8, 0.4, 0.7]).mean())
    assert result.calibration_error == pytest.approx((0.1 + 0.2 + 0.6 + 0.3) / 4)
    bins = [(images, confidence, accuracy) for confidence, accuracy, images in result.reliability()]
    assert np.allclose(bins, [(1, 0.6, 0.0), (1, 0.7, 1.0), (1, 0.8, 1.0), (1, 0.9, 1.0)])
    assert result.class_metrics == pytest.approx({"AUC": 1.0, "F1": 0.8, "sensitivity": 1.0, "specificity": 0.5})
    assert result.recall[0].value == 0.5  # type: ignore[union-attr]


def test_metrics_of_two_classes_by_hand() -> None:
    """Of 10 sick and 90 healthy, 8 sick are recognised and 9 healthy are taken for sick."""
    result = counted([[81, 9], [2, 8]])
    assert result.accuracy == 0.89
    metrics = result.class_metrics
    assert (metrics["sensitivity"], metrics["specificity"]) == (0.8, 0.9)
    assert metrics["F1"] == pytest.approx(2 * 8 / (2 * 8 + 9 + 2))


def test_macro_f1_of_three_classes_by_hand() -> None:
    result = counted([[3, 1, 0], [0, 2, 2], [0, 0, 4]])
    assert [recall.value for recall in result.recall if recall] == [0.75, 0.5, 1.0]
    assert result.class_metrics == {"macro F1": pytest.approx((6 / 7 + 4 / 7 + 8 / 10) / 3)}


def test_a_class_without_images_has_no_recall_and_does_not_enter_the_mean() -> None:
    result = predictions([0, 1], np.eye(3)[:2])
    assert result.class_metrics == {"macro F1": 1.0}
    assert result.recall[2] is None
    assert result.log_loss == 0.0
    wrong = predictions([0], np.eye(2)[1:])
    assert wrong.log_loss == pytest.approx(-np.log(1e-12))  # a class that was ruled out


def test_auc_counts_pairs_and_halves_ties_and_needs_both_classes() -> None:
    # Pairs (positive, other): 0.9 beats both, 0.4 beats 0.1 and ties with 0.4: 3.5 of 4.
    scores = np.array([0.9, 0.4, 0.4, 0.1])
    assert predictions([1, 1, 0, 0], np.stack([1 - scores, scores], 1)).class_metrics["AUC"] == 3.5 / 4
    alone = predictions([1, 1], [[0.8, 0.2], [0.2, 0.8]]).class_metrics
    assert np.isnan(alone["AUC"])
    assert np.isnan(alone["specificity"])


def test_calibration_error_weights_bins_by_their_samples() -> None:
    # Two bins: 0.6 and 0.8 fall into (0.5, 1], of which one is right; three at 0.5 into (0, 0.5], of which one is.
    probabilities = [[0.6, 0.4], [0.2, 0.8], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    expected = 2 / 5 * abs(1 / 2 - 0.7) + 3 / 5 * abs(1 / 3 - 0.5)
    assert expected_calibration_error([0, 0, 0, 1, 1], probabilities, bins=2) == pytest.approx(expected)
    assert expected_calibration_error([0, 1], np.eye(2)) == 0.0
    assert expected_calibration_error([1, 0], np.eye(2)) == 1.0


def test_wilson_interval_by_its_formula() -> None:
    z, p, n = 1.959964, 0.8, 10
    middle, half = p + z**2 / (2 * n), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    result = wilson_interval(8, 10)
    assert result.value == 0.8
    assert result.low == pytest.approx((middle - half) / (1 + z**2 / n), abs=1e-6)
    assert result.high == pytest.approx((middle + half) / (1 + z**2 / n), abs=1e-6)
    assert wilson_interval(5, 5).high == 1.0


def test_other_data_are_matched_by_name_and_a_new_domain_is_marked(run: Path, elsewhere: Path) -> None:
    result = evaluate(run, dataset="folders", data_root=elsewhere, split="all", device="cpu")
    assert {item.domain: item.is_trained_on for item in result} == {"dusk": False, "night": True}
    assert result.classes == CLASSES
    assert len(result.all) == 40
    assert result.all.recall[CLASSES.index("middle")] is None
    numbers = {CLASSES.index(name) for name in CLASSES[:2]}
    assert set(result.all.labels.tolist()) == numbers
    assert [row[0] for row in build_domain_rows(result)[1:3]] == ["dusk (not trained on)", "night"]
    assert any("None of the images is of middle" in item for item in describe_evaluation(result))


def test_a_class_that_the_model_does_not_know_is_named(run: Path, tmp_path: Path) -> None:
    root = write_pictures(tmp_path / "data", ("dusk",), ("high", "low", "slanted"), count=5, seed=1)
    with pytest.raises(InputError, match="does not know the class 'slanted' of folders; it knows high, low, middle"):
        evaluate(run, data_root=root)
    some = evaluate(run, data_root=root, set=["data.classes=high,low"], split="all", device="cpu")
    assert len(some.all) == 10


def test_adapting_changes_nothing_but_statistics(run: Path) -> None:
    trained = open_model(run, device="cpu")
    before = {name: tensor.clone() for name, tensor in trained.network.state_dict().items()}
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    x = trained.inputs(pixels)
    other = copy.deepcopy(trained.network)
    with estimate_statistics(other), torch.no_grad():
        other(x[:20])
        other(x[20:])
    changed = {name for name, tensor in other.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if is_statistic(name)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.network.state_dict().items())
    first = find_statistics_layers(other)[0]
    with torch.no_grad():
        maps = other.encoder.convs[0](x)  # type: ignore[operator, union-attr, index]
    assert np.allclose(first.running_mean, maps.mean((0, 2, 3)), atol=1e-5)
    assert not any(module.training for module in other.modules())


def test_adapting_tells_what_it_brought(run: Path, elsewhere: Path) -> None:
    plainly = evaluate(run, data_root=elsewhere, device="cpu")
    result = evaluate(run, data_root=elsewhere, adapt=True, device="cpu")
    assert result.mean_before == pytest.approx(plainly.mean.value)
    assert "before" in build_domain_rows(result)[0]
    assert any("statistics of each domain's own images" in item for item in describe_evaluation(result))


def test_a_model_without_statistics_says_that_there_is_nothing_to_adapt(plain: Path) -> None:
    result = evaluate(plain, adapt=True, device="cpu")
    assert result.mean_before is None
    assert any("has no statistics of features or of BatchNorm" in note for note in result.notes)


def test_each_domain_is_tested_with_its_own_model(apart: Path, elsewhere: Path) -> None:
    result = evaluate(apart, device="cpu")
    final = fedcir.load_run(apart).final
    assert {item.domain: item.accuracy for item in result} == pytest.approx(final["accuracy"])
    with pytest.raises(InputError, match=r"no client of .* trained on 'dusk': .*of site day, night"):
        evaluate(apart, data_root=elsewhere)
    assert len(evaluate(apart, data_root=elsewhere, site="day", device="cpu").domains) == 2


def test_the_page_and_the_numbers_are_equal_for_equal_runs_and_hold_no_path(
    run: Path, pictures: Path, tmp_path: Path
) -> None:
    first, second = (fedcir.evaluate(run, out=tmp_path / name, device="cpu") for name in ("a", "b"))
    assert first.page is not None
    assert first.numbers is not None
    assert second.page is not None
    text = first.page.read_text(encoding="utf-8")
    assert text == second.page.read_text(encoding="utf-8")
    assert str(pictures) not in text
    assert str(run.parent) not in text
    numbers = json.loads(first.numbers.read_text(encoding="utf-8"))
    assert numbers["accuracy_mean"]["value"] == pytest.approx(first.mean.value)
    assert numbers["domains"]["day"]["trained_on"] is True
    assert sum(map(sum, numbers["all"]["confusion"])) == numbers["all"]["images"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, "split cannot be 'trian'; did you mean 'train'"),
        ({"dataset": "foldrs"}, "did you mean 'folders'"),
        ({"set": ["local.lr=1"]}, "set takes settings of the data only"),
        ({"data_root": "nowhere"}, "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_evaluated_on_is_named(run: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(run, **options)  # type: ignore[arg-type]


def test_an_output_that_cannot_be_written_is_named_before_the_work(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file: choose another folder"):
        fedcir.evaluate(run, out=tmp_path / "file" / "deeper")
