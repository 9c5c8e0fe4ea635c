"""Federations of other tasks than classification: losses, records, the best round, and what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import InputError, MultiLabel, Regression, Survival, Task
from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.client.prediction import GROUP
from fedcir.client.uploads import set_private_gradients
from fedcir.config import LocalConfig, PrivacyConfig
from fedcir.conformance import TASKS, Subject, _make_settings
from fedcir.runtime.file_formats import find_best, format_record, has_stalled, parse_record
from fedcir.runtime.simulation import check_run, open_rounds
from fedcir.server.replies import find_evaluation_fault
from fedcir.types import ACCURACY, ClientReply, LocalContext, Metric, RoundRecord

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(30, 4))).float()
NEEDS_CLASSES = {
    *("fedcir", "fedreg", "fedalign", "fedcirplus", "fedcirone", "fedgen", "fedsr", "fedproc", "fedproto", "fpl"),
    "fedlc",
}
RMSE = Regression(("a",)).primary


def pairs(targets: Tensor, sizes: tuple[int, ...] = (20, 10)) -> list[tuple[TensorDataset, TensorDataset]]:
    parts = zip(X.split(sizes), targets.split(sizes), strict=True)
    return [(TensorDataset(x, y), TensorDataset(x[::2], y[::2])) for x, y in parts]


def train(task: Task, targets: Tensor, **settings: Any) -> fedcir.Result:
    options = {"algorithm": "fedavg", "rounds": 2, "local_steps": 2, "lr": 0.1, "workers": 1, **settings}
    return fedcir.train(pairs(targets), encoder=nn.Flatten(), task=task, **options)


def record(round: int, score: float | None, metric: Metric = RMSE, **more: Any) -> RoundRecord:
    by_domain = None if score is None else {"a": score}
    return RoundRecord(round, {}, by_domain, score, score, score, 0, 0, 0, {}, {}, metric=metric, **more)


def test_a_step_of_regression_follows_the_gradient_of_the_squared_error() -> None:
    y, task = X @ torch.tensor([1.0, 2.0, 3.0, 4.0]), Regression(("a",))
    settings = {"algorithm": "fedavg", "rounds": 1, "local_steps": 1, "momentum": 0.0, "weight_decay": 0.0}
    start, end = (
        fedcir.train(pairs(y, (30,)), encoder=nn.Flatten(), task=task, batch_size=30, lr=lr, **settings).model.head
        for lr in (1e-12, 0.5)
    )
    errors = X @ start.weight.flatten() + start.bias - y  # (N,)
    assert torch.allclose(end.weight.flatten(), start.weight.flatten() - 0.5 * 2 * (errors[:, None] * X).mean(0))
    assert torch.allclose(end.bias, start.bias - 0.5 * 2 * errors.mean())


def test_a_record_of_regression_holds_the_scores_of_the_models_on_each_domain(tmp_path: Path) -> None:
    y = X.sum(1)
    result = train(Regression(("a",)), y, out=tmp_path / "run")
    with torch.no_grad():
        errors = [(result.model(x).flatten() - t).double() for x, t in ((X[:20:2], y[:20:2]), (X[20::2], y[20::2]))]
    rmse = [float(error.square().mean().sqrt()) for error in errors]
    last = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["rmse"] == pytest.approx({"client-0": rmse[0], "client-1": rmse[1]})
    assert last["rmse_mean"] == pytest.approx(sum(rmse) / 2)
    assert last["rmse_worst"] == max(last["rmse"].values())
    assert last["rmse_weighted"] == pytest.approx(float(torch.cat(errors).square().mean().sqrt()))
    assert last["metrics"]["mae"]["client-1"] == pytest.approx(float(errors[1].abs().mean()))
    assert last["metric"] == {"name": "rmse", "title": "RMSE", "higher_is_better": False, "is_share": False}
    assert last["losses"].keys() == {"mse", "total"}
    assert not any(key.startswith("accuracy") for key in last)
    assert not (tmp_path / "run" / "hits.json").exists()
    run = fedcir.load_run(tmp_path / "run")
    assert run.records == tuple(result.records)
    assert run.task == Regression(("a",))
    assert run.records[-1].accuracy_mean is None
    assert run.final["rmse_mean"] == run.curve("rmse_mean")[1][-1] == run.records[-1].score_mean
    assert run.to_rows()[-1]["mae/client-1"] == last["metrics"]["mae"]["client-1"]
    assert run.summary is not None
    assert run.summary["best"]["rmse_mean"] == min(r.score_mean or math.inf for r in run.records)
    network = run.model(encoder=nn.Flatten())
    assert torch.equal(network(X), result.model(X))


def test_a_metric_that_no_example_of_a_domain_defines_is_left_out() -> None:
    targets = torch.stack([X[:, 0] > 0, X[:, 1] > 0], dim=1).float()
    targets[20:] = 0.0  # no pair of a positive and a negative example in the second client
    last = train(MultiLabel(("a", "b")), targets).records[-1]
    assert last.scores is not None
    assert list(last.scores) == ["client-0"]
    assert last.score_mean == last.score_worst == last.scores["client-0"]


def test_metrics_of_survival_are_those_of_all_examples_of_a_client_at_once() -> None:
    x = torch.arange(600.0)[:, None]  # more than a batch of an evaluation
    targets = torch.stack([torch.ones(600), 600 - x.flatten()], dim=1)
    data = TensorDataset(x / 600, targets)
    result = fedcir.train(
        [(data, data)], encoder=nn.Flatten(), task=Survival(("event", "time")), algorithm="fedavg", rounds=1, lr=0.5
    )
    sign = result.model.head.weight.item()
    assert result.records[0].score_mean == (1.0 if sign > 0 else 0.0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_methods_that_compute_with_classes_say_so(task: Task) -> None:
    refused = {}
    for name in list_algorithms():
        config, federation = _make_settings(Subject(find_algorithm(name)()), task=task)
        try:
            check_run(config, find_algorithm(name)(), federation)
        except InputError as error:
            refused[name] = str(error).partition(":")[0]
    assert refused == {name: f"{name} computes with classes, which {task.name} has not" for name in NEEDS_CLASSES}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior": "client"}, "local.prior=client computes with classes, which regression has not: leave it out"),
        ({"set": {"local.balance": "classes"}}, "local.balance=classes computes with classes, which regression has"),
        ({"algorithm": "fedcir"}, "fedcir computes with classes, which regression has not: use fedavg"),
        ({"num_classes": 3}, "give either num_classes or task, .*, got both"),
        ({"task": None}, "give either num_classes or task, .*, got neither"),
        ({"task": "regression"}, "task must be one such as fedcir.Regression.*, got 'regression'"),
    ],
)
def test_what_does_not_fit_a_task_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(settings.pop("task", Regression(("a",))), X.sum(1), **settings)


def test_attacks_on_labels_and_noise_on_examples_that_are_compared_are_refused() -> None:
    method = find_algorithm("fedavg")()
    config, federation = _make_settings(Subject(method), task=TASKS[1])
    config = replace(config, attack=replace(config.attack, kind="label-flip", clients=1))
    with (
        pytest.raises(InputError, match=r"attack\.kind=label-flip changes classes, which regression has not: choose"),
        open_rounds(config, method, federation, out=None, resume=False),
    ):
        pass
    private = {"privacy.unit": "example", "privacy.clip": 1.0, "privacy.noise": 1.0}
    with pytest.raises(InputError, match=r"the loss of survival compares examples, .*: set privacy\.unit=client"):
        train(TASKS[2], torch.stack([torch.ones(30), X[:, 0].abs()], dim=1), set=private)


def test_a_clip_that_no_gradient_reaches_leaves_the_gradient_of_the_tasks_loss() -> None:
    task, model, y = Regression(("a",)), nn.Linear(4, 1), X.sum(1, keepdim=True)
    ctx = LocalContext(1, 1, 1, len(X), {}, torch.Generator(), loss=task.loss)
    set_private_gradients(model, X, y, ctx, PrivacyConfig(clip=1e6), np.random.default_rng(0))
    private = model.weight.grad
    model.zero_grad()
    task.loss(model(X), y).backward()
    torch.testing.assert_close(private, model.weight.grad)


def test_the_best_round_has_the_lowest_error_and_patience_follows_it() -> None:
    records = [record(n, score, validation={"a": score}) for n, score in enumerate((3.0, 1.0, 2.0, 2.5), start=1)]
    best = find_best(records)
    assert best is not None
    assert best.round == 2
    assert has_stalled(records, 2)
    assert not has_stalled(records, 3)
    rising = [replace(r, metric=ACCURACY) for r in records]
    assert find_best(rising) == rising[0]


@pytest.mark.parametrize("metric", [RMSE, ACCURACY])
def test_a_record_of_any_metric_is_read_as_it_was_written(metric: Metric) -> None:
    written = record(1, 0.5, metric, unseen=["b"], score_unseen=0.25, metrics={"mae": {"a": 0.1}})
    line = format_record(written)
    assert parse_record(line.encode()) == written
    assert json.loads(line)[f"{metric.name}_unseen"] == 0.25
    assert ("metric" in json.loads(line)) == (metric != ACCURACY)
    assert (written.accuracy, written.accuracy_mean) == (({"a": 0.5}, 0.5) if metric == ACCURACY else (None, None))


def test_a_reply_of_another_task_is_no_evaluation() -> None:
    classes = {"correct": 3.0, "count": 4.0, "loss": 0.5}
    assert find_evaluation_fault(ClientReply(0, 4, {}, classes), None, RMSE_TASK) == "metric 'correct' is not expected"
    sums = dict.fromkeys(RMSE_TASK.sum_names, 1.0) | {"loss": -0.5}
    assert find_evaluation_fault(ClientReply(0, 4, {}, sums), None, RMSE_TASK) is None
    negative = {**sums, "squared_0": -1.0}
    assert find_evaluation_fault(ClientReply(0, 4, {}, negative), None, RMSE_TASK) == "its sums of errors are negative"


RMSE_TASK = Regression(("a",))


def test_evaluations_of_other_tasks_carry_no_bits_and_no_calibration() -> None:
    y = X.sum(1)
    config, federation = _make_settings(Subject(find_algorithm("fedavg")()), task=RMSE_TASK, lr=LocalConfig.lr)
    with open_rounds(config, find_algorithm("fedavg")(), federation, out=None, resume=False) as (session, records):
        assert len(list(records)) == 3
        assert session.hits is None
        flops = session.expected_flops()
    assert flops > 0
    assert GROUP not in session.state.shared
    assert y.shape == (30,)
