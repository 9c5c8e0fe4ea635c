"""Losses and metrics of tasks against numbers worked out by hand, scikit-learn, and sums over clients."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, r2_score, roc_auc_score
from torch import Tensor

from fedcir import InputError, MultiLabel, Regression, Segmentation, Survival, Task
from fedcir.tasks.survival import GROUPS, INTERVALS
from fedcir.tasks.task import add_sums, find_task, list_tasks, make_task

RNG = np.random.default_rng(0)
NAMES = ("a", "b", "c")


def draw(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """Random outputs and targets of a task."""
    values = torch.from_numpy(RNG.normal(size=(count, 3)).round(1)).float()
    if isinstance(task, MultiLabel):
        return values, torch.from_numpy(RNG.integers(0, 2, (count, 3))).float()
    if isinstance(task, Survival):
        event_and_time = np.stack([RNG.integers(0, 2, count), RNG.exponential(10, count).round(1)], axis=1)
        return values[:, :1], torch.from_numpy(event_and_time).float()
    if isinstance(task, Segmentation):
        return torch.randn(count, 3, 5, 4), torch.from_numpy(RNG.integers(0, 3, (count, 5, 4)))
    return values, torch.from_numpy(10 + 5 * RNG.normal(size=(count, 3))).float()


TASKS = [
    MultiLabel(NAMES),
    Regression(NAMES, (9.0, 10.0, 11.0), (5.0, 4.0, 5.0)),
    Survival(("event", "time"), 50.0),
    Segmentation(NAMES),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sums_are_those_that_the_task_names_and_add_over_clients(task: Task) -> None:
    (first, first_targets), (second, second_targets) = draw(task, 30), draw(task, 50)
    parts = [task.metrics(first, first_targets), task.metrics(second, second_targets)]
    for part in parts:
        assert set(part) == set(task.sum_names)
        assert task.find_sums_fault(part) is None
    if task.adds_over_batches:
        whole = task.metrics(torch.cat([first, second]), torch.cat([first_targets, second_targets]))
        assert add_sums(parts) == pytest.approx(whole)
    assert {metric.name for metric in task.metrics_reported} == set(task.scores(add_sums(parts)))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sums_that_no_client_can_have_are_faults(task: Task) -> None:
    sums = task.metrics(*draw(task, 40))
    assert task.find_sums_fault({**sums, "count": 0.5}) is not None
    assert task.find_sums_fault({**sums, "more": 1.0}) is not None
    for name in sums:
        if not name.startswith("total_"):
            assert task.find_sums_fault({**sums, name: -1.0}) is not None, name
        assert task.find_sums_fault({**sums, name: math.nan}) is not None


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_is_read_from_its_card_and_found_by_its_name(task: Task) -> None:
    assert make_task(task.to_card()) == task
    assert find_task(task.name) is type(task)
    assert task.name in list_tasks()


def test_multilabel_agrees_with_scikit_learn() -> None:
    task = MultiLabel(NAMES)
    outputs, targets = draw(task, 200)
    sums = task.metrics(outputs, targets)
    macro = {"auroc": roc_auc_score(targets, outputs), "f1": f1_score(targets, outputs > 0, average="macro")}
    assert task.scores(sums) == pytest.approx(macro)
    assert task.scores_by_name(sums)["b"]["auroc"] == pytest.approx(roc_auc_score(targets[:, 1], outputs[:, 1]))


def test_auroc_of_a_label_that_nobody_has_does_not_count() -> None:
    task = MultiLabel(("a", "b"))
    sums = task.metrics(torch.tensor([[1.0, 0], [-1, 0], [0, 0]]), torch.tensor([[1.0, 0], [0, 0], [1, 0]]))
    assert math.isnan(task.scores_by_name(sums)["b"]["auroc"])
    assert task.scores(sums)["auroc"] == 1.0


def test_multilabel_strata_are_the_rarest_label() -> None:
    targets = np.array([[1, 0], [1, 1], [0, 0], [1, 0]])
    assert MultiLabel(("a", "b")).strata(targets).tolist() == [1, 2, 0, 1]


def test_regression_is_judged_in_units_and_trained_on_standardised_targets() -> None:
    task = Regression(("y",)).fit([100.0], [10.0])
    outputs, targets = torch.tensor([[0.0], [1.0]]), torch.tensor([[100.0], [130.0]])
    assert task.predict(outputs).tolist() == [[100.0], [110.0]]
    assert float(task.loss(outputs, targets)) == pytest.approx((0 + 2**2) / 2)
    assert task.scores(task.metrics(outputs, targets)) == pytest.approx(
        {"rmse": math.sqrt(20**2 / 2), "mae": 10.0, "r2": r2_score([100, 130], [100, 110])}
    )


def test_r2_of_a_constant_target_is_undefined() -> None:
    task = Regression(("y",))
    assert math.isnan(task.scores(task.metrics(torch.zeros(5, 1), torch.full((5, 1), 0.1)))["r2"])


def test_regression_strata_are_quarters() -> None:
    assert Regression(("y",)).strata(np.arange(8.0)[:, None]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_partial_likelihood_is_that_worked_out_by_hand() -> None:
    # At time 1 all three are at risk, at time 2 the last two; the third is censored.
    task, risks = Survival(("event", "time")), [0.5, -1.0, 2.0]
    targets = torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.0, 3.0]])
    first = math.log(sum(map(math.exp, risks))) - risks[0]
    second = math.log(sum(map(math.exp, risks[1:]))) - risks[1]
    assert float(task.loss(torch.tensor(risks)[:, None], targets)) == pytest.approx((first + second) / 3)


def test_tied_events_are_at_risk_together() -> None:
    risks, targets = torch.tensor([[1.0], [0.0]], requires_grad=True), torch.tensor([[1.0, 5.0], [1.0, 5.0]])
    loss = Survival(("event", "time")).loss(risks, targets)
    assert float(loss.detach()) == pytest.approx((2 * math.log(math.e + 1) - 1) / 2)
    loss.backward()
    assert risks.grad is not None
    assert risks.grad.isfinite().all()


def test_a_batch_without_events_has_no_loss() -> None:
    risks = torch.tensor([[1.0], [0.0]], requires_grad=True)
    loss = Survival(("event", "time")).loss(risks, torch.tensor([[0.0, 5.0], [0.0, 1.0]]))
    loss.backward()
    assert float(loss.detach()) == 0
    assert risks.grad is not None
    assert not risks.grad.any()


def test_concordance_counts_comparable_pairs() -> None:
    # Events at 1 and 2, censored at 2 and 3. Comparable: 1 with all others, the event at 2 with both censored.
    targets = torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.0, 2.0], [0.0, 3.0]])
    sums = Survival(("event", "time")).metrics(torch.tensor([[3.0], [1.0], [1.0], [2.0]]), targets)
    assert (sums["concordant"], sums["pairs"]) == (3 + 0.5 + 0, 5)


def test_survival_curves_follow_the_life_table() -> None:
    task = Survival(("event", "time")).fit([0.0, 12.0], [0.0, 1.0])
    assert task.horizon == 20  # 15, rounded up; intervals of 1
    targets = torch.tensor([[1.0, 0.5], [0.0, 0.5], [1.0, 1.0], [0.0, 30.0]])
    sums = task.metrics(torch.zeros(4, 1), targets)
    assert (sums["low"], sums["high"]) == (4, 0)
    curve = task.curve(sums, "low")
    assert curve[:3] == [(0.0, 1.0), (1.0, pytest.approx(1 - 1 / 3.5)), (2.0, pytest.approx((1 - 1 / 3.5) / 2))]
    assert len(curve) == INTERVALS + 1
    assert len(task.curve(sums, "high")) == 1
    divided = task.metrics(torch.tensor([[1.0], [0.0], [0.0], [1.0]]), targets)
    assert (divided["low"], divided["high"]) == (2, 2)
    assert task.curve(divided, *GROUPS) == curve
    assert set(GROUPS) < set(task.sum_names)


def test_dice_and_iou_leave_out_the_background_and_absent_classes() -> None:
    task = Segmentation(("background", "organ", "lesion"))
    truth = torch.tensor([[[0, 0], [1, 1]]])
    predicted = torch.nn.functional.one_hot(torch.tensor([[[0, 1], [1, 1]]]), 3).permute(0, 3, 1, 2).float()
    sums = task.metrics(predicted, truth)
    assert task.scores(sums) == {"dice": pytest.approx(4 / 5), "iou": pytest.approx(2 / 3)}
    assert math.isnan(task.scores_by_name(sums)["lesion"]["dice"])
    assert task.head(7)(torch.zeros(2, 7, 4, 4)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize(
    ("task", "targets", "message"),
    [
        (MultiLabel(("a", "b")), [[0, 1], [0, 2]], "x gives 2 for the label 'b': labels are 0 or 1"),
        (MultiLabel(("a", "b")), [0, 1], r"x gives targets of the shape \(N\): give 0 or 1 for each of the 2 labels"),
        (Regression(("y",)), [[math.nan]], "x gives targets that are not finite"),
        (Regression(("y",)), [[1, 2]], r"of the shape \(N, 2\): give 1 number a sample"),
        (Survival(("e", "t")), [[2, 1]], "x gives the event 2: events are 1, or 0 if censored"),
        (Survival(("e", "t")), [[1, -3]], "x gives the time -3: times are 0 or more"),
        (Survival(("e", "t")), [1, 2], r"x gives targets of the shape \(N\): give the event"),
        (Segmentation(("0", "1")), [[[0, 2]]], "x gives the class 2: classes of pixels are 0 to 1"),
        (Segmentation(("0", "1")), [0, 1], r"of the shape \(N\): give a class for each pixel"),
    ],
)
def test_targets_of_the_wrong_kind_are_refused(task: Task, targets: list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        task.check_targets(torch.tensor(targets), "x")


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InputError, match="no task 'regresion'; did you mean 'regression'"):
        find_task("regresion")


@pytest.mark.parametrize(
    "card",
    [{"name": "survival", "names": ["e", "t"], "horizon": math.nan}, {"name": "segmentation", "names": ["a"] * 257}],
)
def test_a_card_cannot_describe_an_impossible_task(card: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"horizon must be a time|256 classes at most"):
        make_task(card)
