"""Targets of tables and arrays: the task that they suggest, their form, and what is wrong with them in one line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcir import Classification, MultiLabel, Regression, Segmentation, Survival, Task
from fedcir.config import Config, DataConfig, ModelConfig, PrivacyConfig, TaskConfig
from fedcir.data.examples import ArrayExamples, PooledExamples
from fedcir.data.federation import open_federation
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError

RNG = np.random.default_rng(0)
Write = Callable[[str, Callable[[int], str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write tables of sites a and b: a column x, and others that a function of the row number gives."""

    def write_tables(header: str, row: Callable[[int], str]) -> Path:
        for shift, site in enumerate("ab"):
            lines = [f"{number / 3},{row(number + shift)}" for number in range(40)]
            (tmp_path / f"{site}.csv").write_text("\n".join([f"x,{header}", *lines]))
        return tmp_path

    return write_tables


@pytest.mark.parametrize(
    ("target", "row", "task"),
    [
        ("y", lambda n: str(n % 3), Classification(("0", "1", "2"))),
        ("y", lambda n: "ill" if n % 2 else "well", Classification(("ill", "well"))),
        ("y", lambda n: str(n % 2 + 0.5), Regression(("y",))),
        ("y", str, Regression(("y",))),
        ("y>5", str, Classification(("y<=5", "y>5"))),
        ("y,z", lambda n: f"{n % 2},{n % 3 == 0:d}", MultiLabel(("y", "z"))),
        ("y>9, z>0", lambda n: f"{n},{n % 5}", MultiLabel(("y>9", "z>0"))),
    ],
)
def test_the_task_follows_the_target_columns(write: Write, target: str, row: Callable[[int], str], task: Task) -> None:
    root = write("y,z" if "z" in target else "y", row)
    assert open_dataset(DataConfig("csv", str(root), target=target), 0).task == task


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (lambda n: RNG.integers(0, 2, n), Classification(("0", "1"))),
        (lambda n: RNG.normal(size=n), Regression(("y",))),
        (lambda n: RNG.normal(size=(n, 2)), Regression(("0", "1"))),
        (lambda n: RNG.integers(0, 2, (n, 3)), MultiLabel(("0", "1", "2"))),
        (lambda n: RNG.integers(0, 2, (n, 3)) > 0, MultiLabel(("0", "1", "2"))),
        (lambda n: RNG.integers(0, 3, (n, 8, 8), dtype=np.uint8), Segmentation(("0", "1", "2"))),
    ],
)
def test_the_task_follows_the_targets_of_arrays(tmp_path: Path, y: Callable[[int], object], task: Task) -> None:
    for site in "ab":
        x_train, x_test = (RNG.integers(0, 255, (n, 8, 8, 3), dtype=np.uint8) for n in (20, 10))
        np.savez(tmp_path / f"{site}.npz", x_train=x_train, y_train=y(20), x_test=x_test, y_test=y(10))
    domains = open_dataset(DataConfig("arrays", str(tmp_path), image_size=4), 0)
    assert domains.task == task
    if isinstance(task, Segmentation):
        assert domains["a"].train.select_targets(np.arange(3)).shape == (3, 4, 4)


def test_targets_reach_the_loss_and_splits_balance_strata(write: Write) -> None:
    root = write("y,z", lambda n: f"{n % 2},{n % 4 == 0:d}")
    federation = open_federation(Config(DataConfig("csv", str(root), target="y,z"), model=ModelConfig("linear")))
    client = federation.clients[0]
    assert client.train is not None
    assert client.test is not None
    rows = np.arange(len(client.train))
    x, y = client.train.batch(rows, torch.device("cpu"), torch.contiguous_format)
    assert (x.shape, y.shape, y.dtype) == ((32, 1), (32, 2), torch.float32)
    numbers = torch.arange(40)
    expected = {(n % 2, float(n % 4 == 0)) for n in numbers.tolist()}
    assert {tuple(row) for row in y.tolist()} == expected
    assert client.test.labels().bincount().tolist() == [2, 4, 2]  # of 10 with neither, 20 with y and 10 with z


def test_pooled_examples_have_targets_of_any_shape(write: Write) -> None:
    domains = open_dataset(DataConfig("csv", str(write("y", lambda n: str(n + 0.5))), target="y"), 0)
    pooled = PooledExamples([ArrayExamples(domain.train) for domain in domains])
    _, y = pooled.batch(np.arange(len(pooled)), torch.device("cpu"), torch.contiguous_format)
    assert y.shape == (64, 1)
    expected = [domain.train.select_targets(np.arange(32)) for domain in domains]
    assert np.array_equal(y.numpy(), np.concatenate(expected))


def test_regression_is_fitted_to_exact_sums_over_training_rows(write: Write) -> None:
    config = Config(
        DataConfig("csv", str(write("y", lambda n: str(n + 0.25))), target="y"), model=ModelConfig("linear")
    )
    domains, _ = open_federation(config).dataset_and_partition or pytest.fail("no data")
    values = np.concatenate([domain.train.select_targets(np.arange(32)) for domain in domains]).astype(np.float64)
    assert isinstance(domains.task, Regression)
    assert domains.task.means == pytest.approx(values.mean(0), rel=1e-15)
    assert domains.task.spreads == pytest.approx(values.std(0), rel=1e-12)


def test_exact_sums_of_targets_do_not_go_with_differential_privacy(tmp_path: Path) -> None:
    x = RNG.normal(size=(20, 3))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=x[:, 0], x_test=-x, y_test=-x[:, 0])
    noise = PrivacyConfig(clip=1.0, noise=1.0)
    with pytest.raises(InputError, match=r"set data.scale=client, or none"):
        open_federation(Config(DataConfig("arrays", str(tmp_path)), model=ModelConfig("linear"), privacy=noise))
    data = DataConfig("arrays", str(tmp_path), scale="none")
    federation = open_federation(Config(data, model=ModelConfig("linear"), privacy=noise))
    assert (federation.dataset_and_partition or pytest.fail("no data"))[0].task == Regression(("y",))


def test_survival_has_to_be_named_and_has_a_time_grid(write: Write) -> None:
    data = DataConfig("csv", str(write("dead,days", lambda n: f"{n % 2},{100 * n}")), target="dead,days")
    with pytest.raises(InputError, match=r"data.target names 2 columns that are not all 0 or 1.* task.name=survival"):
        open_dataset(data, 0)
    config = Config(data, model=ModelConfig("linear"), task=TaskConfig("survival"))
    domains, _ = open_federation(config).dataset_and_partition or pytest.fail("no data")
    assert domains.task == Survival(("dead", "days"), 10000.0)  # 1950 + 3 * 1155, rounded up
    assert domains["a"].train.labels.tolist() == domains["a"].train.select_targets(np.arange(32))[:, 0].tolist()


def test_digits_can_be_predicted_as_numbers(tmp_path: Path) -> None:
    x = RNG.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    y = np.arange(20) % 3
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=255 - x, y_test=y)
    domains = open_dataset(DataConfig("arrays", str(tmp_path)), 0, task="regression")
    assert domains.task == Regression(("y",))
    assert domains["a"].train.select_targets(np.arange(20)).tolist() == [[float(n)] for n in y]


def test_a_column_can_say_which_rows_are_for_testing(write: Write) -> None:
    root = write("y,part", lambda n: f"{n % 2},{'test' if n < 10 else 'train'}")
    domains = open_dataset(DataConfig("csv", str(root), target="y", split="part"), 0)
    assert domains["a"].test.ids == [f"a/{line:06d}" for line in range(2, 12)]
    assert domains.input_shape == (1,)
    (root / "a.csv").write_text("x,y,part\n1,0,trian\n")
    with pytest.raises(InputError, match=r"a\.csv, line 2: part must be train, validation or test, got 'trian'"):
        open_dataset(DataConfig("csv", str(root), target="y", split="part"), 0)


@pytest.mark.parametrize(
    ("task", "target", "row", "message"),
    [
        ("survival", "y,z", lambda n: f"{n},{n}", r"a\.csv, line 4 gives the event 2: events are 1, or 0 if censored"),
        ("survival", "y,z", lambda n: f"{n % 2},{5 - n}", r"a\.csv, line 8 gives the time -1: times are 0 or more"),
        ("survival", "y", lambda n: f"{n},{n}", "task.name=survival needs two target columns"),
        ("multilabel", "y,z", lambda n: f"{n % 2},{n % 3}", r"a\.csv, line 4 gives 2 for the label 'z': labels are 0"),
        ("regression", "y", lambda n: f"{'low' if n == 7 else n},1", r"line 9: the target 'y' is 'low', no number"),
        ("regression", "y", lambda n: f"{'' if n == 7 else n},1", r"a\.csv, line 9 has no y: fill it in"),
        ("classification", "y", lambda n: f"{n / 2},1", "takes classes, but y holds numbers that are not whole"),
        ("classification", "y,z", lambda n: f"{n},1", "data.target names 2 columns, but a class is one"),
        ("segmentation", "y", lambda n: f"{n},1", "task.name=segmentation takes masks of images, not columns"),
        ("clasification", "y", lambda n: f"{n},1", "no task 'clasification'; did you mean 'classification'"),
        (None, "y,w", lambda n: f"{n},1", r"a\.csv has no column 'w'; it has x, y, z"),
    ],
)
def test_targets_that_do_not_fit_the_task_are_an_error_of_one_line(
    write: Write, task: str | None, target: str, row: Callable[[int], str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_dataset(DataConfig("csv", str(write("y,z", row)), target=target), 0, task=task)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        ("survival", np.full((20, 2), 3.0), "y_train of 'a' gives the event 3"),
        ("survival", np.zeros(20), "gives targets of the shape .N.: give the event"),
        ("multilabel", np.full((20, 2), 3), "y_train of 'a' gives 3 for the label '0'"),
        ("segmentation", np.zeros(20), r"takes a class number for each pixel, .*, but y is of the shape \(N\)"),
        ("regression", np.zeros((20, 8, 8), int), r"takes numbers .*, but y is of the shape \(N, 8, 8\)"),
        ("classification", np.zeros(20), "takes classes: y must be one whole number a sample"),
        (None, np.full((20, 8, 8), 255, np.uint8), "no mask has a pixel of class 0, but one has class 255"),
        (None, np.full((20, 8, 8), 300), "a mask holds the class 300: classes are 0 to 255"),
        (None, np.zeros((20, 8, 8), np.uint8), "all masks are 0, the background"),
    ],
)
def test_arrays_that_do_not_fit_the_task_are_refused(
    tmp_path: Path, task: str | None, y: np.ndarray, message: str
) -> None:
    x = RNG.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(InputError, match=message):
        open_dataset(DataConfig("arrays", str(tmp_path)), 0, task=task)


def test_class_folders_hold_no_numbers() -> None:
    with pytest.raises(InputError, match=r"task.name=survival needs|does not fit minidigits|of the shape"):
        open_dataset(DataConfig(), 0, task="survival")
