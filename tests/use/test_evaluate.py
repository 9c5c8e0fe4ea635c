"""A run's model on labelled images: of its own data, of others, and of a site that nobody trained on."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bands import CLASSES, write_pictures

import fedcir
from fedcir import InputError
from fedcir.config import Config
from fedcir.insight.evaluation import findings, rows_by_domain
from fedcir.models.tensors import is_statistic
from fedcir.use.adapt import adapted, statistics_layers
from fedcir.use.evaluate import evaluate_run
from fedcir.use.evaluation import Evaluation, Figures, Judged
from fedcir.use.trained import open_trained

Settings = Callable[..., Config]


@pytest.fixture(scope="module")
def found(run: Path) -> Evaluation:
    return evaluate_run(run, device="cpu")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A domain that the run knows, and one that it does not, of two of its classes."""
    return write_pictures(tmp_path_factory.mktemp("elsewhere"), ("night", "dusk"), CLASSES[:2], count=10, seed=1)


def test_its_own_test_images_give_the_accuracies_of_the_last_round(run: Path, found: Evaluation) -> None:
    final = fedcir.load_run(run).final
    assert {each.tested.domain: each.accuracy.value for each in found} == pytest.approx(final["accuracy"])
    assert found.mean.value == pytest.approx(final["accuracy_mean"])
    assert all(each.tested.trained_on for each in found)


def test_figures_by_hand() -> None:
    """Four images, of which the third is wrong: sure by 0.9, 0.8, 0.6 and 0.7."""
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]])
    figures = Figures(Judged("site", np.array([0, 1, 0, 1]), probabilities), ("well", "ill"))
    assert figures.accuracy.value == 0.75
    assert figures.confusion.tolist() == [[1, 1], [0, 2]]
    assert figures.log_loss == pytest.approx(-np.log([0.9, 0.8, 0.4, 0.7]).mean())
    assert figures.calibration_error == pytest.approx((0.1 + 0.2 + 0.6 + 0.3) / 4)
    bins = [(each.images, each.sure, each.right) for each in figures.reliability()]
    assert np.allclose(bins, [(1, 0.6, 0.0), (1, 0.7, 1.0), (1, 0.8, 1.0), (1, 0.9, 1.0)])
    assert figures.further == pytest.approx({"AUC": 1.0, "F1": 0.8, "sensitivity": 1.0, "specificity": 0.5})
    assert figures.recall["well"].value == 0.5  # type: ignore[union-attr]


def test_with_three_classes_there_is_a_macro_f1_and_a_class_without_images_has_no_recall() -> None:
    figures = Figures(Judged("site", np.array([0, 1]), np.eye(3)[:2]), ("a", "b", "c"))
    assert figures.further == {"macro F1": 1.0}
    assert figures.recall["c"] is None


def test_other_data_are_matched_by_name_and_a_new_domain_is_marked(run: Path, elsewhere: Path) -> None:
    found = evaluate_run(run, dataset="folders", data_root=elsewhere, split="all", device="cpu")
    assert {each.tested.domain: each.tested.trained_on for each in found} == {"dusk": False, "night": True}
    assert found.classes == CLASSES
    assert found.all.images == 40
    assert found.all.recall["middle"] is None
    numbers = {CLASSES.index(name) for name in CLASSES[:2]}
    assert set(found.all.tested.labels.tolist()) == numbers
    assert [row[0] for row in rows_by_domain(found)[1:3]] == ["dusk (not trained on)", "night"]
    assert any("No image shows middle" in each for each in findings(found))


def test_a_class_that_the_model_does_not_know_is_named(run: Path, tmp_path: Path) -> None:
    root = write_pictures(tmp_path / "data", ("dusk",), ("high", "low", "slanted"), count=5, seed=1)
    with pytest.raises(InputError, match="does not know the class 'slanted' of folders; it knows high, low, middle"):
        evaluate_run(run, data_root=root)
    some = evaluate_run(run, data_root=root, set=["data.classes=high,low"], split="all", device="cpu")
    assert some.all.images == 10


def test_adapting_changes_nothing_but_statistics(run: Path) -> None:
    trained = open_trained(run, device="cpu")
    before = {name: tensor.clone() for name, tensor in trained.network.state_dict().items()}
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    x = trained.inputs(pixels)
    other = adapted(trained.network, [x[:20], x[20:]])
    changed = {name for name, tensor in other.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if is_statistic(name)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.network.state_dict().items())
    first = statistics_layers(other)[0]
    with torch.no_grad():
        maps = other.encoder.convs[0](x)  # type: ignore[operator, union-attr, index]
    assert np.allclose(first.running_mean, maps.mean((0, 2, 3)), atol=1e-5)
    assert not any(module.training for module in other.modules())


def test_adapting_tells_what_it_brought(run: Path, elsewhere: Path) -> None:
    plainly = evaluate_run(run, data_root=elsewhere, device="cpu")
    found = evaluate_run(run, data_root=elsewhere, adapt=True, device="cpu")
    assert found.mean_before == pytest.approx(plainly.mean.value)
    assert "before" in rows_by_domain(found)[0]
    assert any("BatchNorm statistics of each domain" in each for each in findings(found))


def test_a_model_without_statistics_says_that_there_is_nothing_to_adapt(plain: Path) -> None:
    found = evaluate_run(plain, adapt=True, device="cpu")
    assert found.mean_before is None
    assert any("has no BatchNorm statistics" in note for note in found.notes)


def test_each_domain_is_tested_with_its_own_model(apart: Path, elsewhere: Path) -> None:
    found = evaluate_run(apart, device="cpu")
    final = fedcir.load_run(apart).final
    assert {each.tested.domain: each.accuracy.value for each in found} == pytest.approx(final["accuracy"])
    with pytest.raises(InputError, match=r"no client of .* trained on 'dusk'.* choose one as site, from day, night"):
        evaluate_run(apart, data_root=elsewhere)
    assert len(evaluate_run(apart, data_root=elsewhere, site="day", device="cpu").tested) == 2


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
    assert numbers["accuracy_mean"]["value"] == pytest.approx(first.evaluation.mean.value)
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
        evaluate_run(run, **options)  # type: ignore[arg-type]


def test_an_output_that_cannot_be_written_is_named_before_the_work(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file: name a folder"):
        fedcir.evaluate(run, out=tmp_path / "file" / "deeper")
