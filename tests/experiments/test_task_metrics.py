"""Tasks other than classification: their metrics, and which end of them is better, in everything that compares runs."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcir
from fedcir.errors import InputError
from fedcir.reporting.methods import choose_method, comparison_rows, describe_losses, find_best_method, measure_rise
from fedcir.runs.statistics import CostToTarget, Estimate, MethodResult, RunScores, compare_methods, mean_interval
from fedcir.tasks.task import add_sums
from fedcir.types import Metric

pytestmark = pytest.mark.usefixtures("fast_processes")

RMSE = Metric("rmse", "RMSE", higher_is_better=False, is_share=False)
TASKS = {
    "regression": ("RMSE", ("Test MAE,", "Test R2,")),
    "multilabel": ("AUROC (%)", ("F1 (%)", "AUROC of all examples together (%)")),
    "segmentation": ("Dice (%)", ("IoU (%)", "Dice of all examples together (%)")),
    "survival": ("concordance index (%)", ("Low risk is that of the half", "Whatever a model predicts")),
}
"""Primary metric of a task, and what else its report shows."""


def write_data(task: str, root: Path) -> dict[str, Any]:
    """Write two sites of a task, and return the settings to train on them."""
    rng = np.random.default_rng(0)
    common = {"data_root": root, "rounds": 2, "local_steps": 4, "batch_size": 8, "workers": 1}
    if task in ("regression", "survival"):
        for number, site in enumerate(("north", "south")):
            x = rng.normal(number, 1, (40, 2))
            y = 50 + 10 * x.sum(1) + rng.normal(0, 1, 40)
            columns = [*x.T, rng.integers(0, 2, 40), np.exp(y / 20).round(3)] if task == "survival" else [*x.T, y]
            names = ["a", "b", "event", "time"] if task == "survival" else ["a", "b", "y"]
            with open(root / f"{site}.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([names, *np.stack(columns, 1).tolist()])
        target = {"task.name": "survival", "data.target": "event,time"} if task == "survival" else {"data.target": "y"}
        return {**common, "dataset": "csv", "lr": 0.1, "set": {"model.width": 8, **target}}
    for number, site in enumerate(("north", "south")):
        arrays = {}
        for part, count in (("train", 30), ("test", 12)):
            images = rng.integers(0, 60 + 20 * number, (count, 8, 8, 3))
            labels = rng.integers(0, 2, (count, 3))
            for image, row in zip(images, labels, strict=True):
                image[np.flatnonzero(row) * 2 + 1] += 150
            masks = (images[..., 0] > 140).astype(np.int64)
            arrays |= {f"x_{part}": images.astype(np.uint8), f"y_{part}": labels if task == "multilabel" else masks}
        np.savez(root / f"{site}.npz", **arrays)
    model = {"model": "unet"} if task == "segmentation" else {}
    return {**common, **model, "dataset": "arrays", "lr": 0.05, "set": {"model.width": 2}}


@pytest.mark.parametrize("task", TASKS)
def test_a_comparison_and_its_report_show_the_metrics_of_the_task(task: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = write_data(task, tmp_path / "data")
    made = fedcir.compare(algorithms=["fedavg", "fedprox"], seeds=[0, 1], out=tmp_path / "runs", **settings)
    primary, others = TASKS[task]
    run = made.runs["fedprox"][1]
    assert run.metric.label == primary
    means = [made.runs["fedprox"][seed].final[f"{run.metric.name}_mean"] for seed in (0, 1)]
    assert made.methods[1].mean.mean == pytest.approx(sum(means) / 2)
    assert made.table()[0][:5] == ["method", "north", "south", "mean", "worst"]
    assert made.table()[0][-1] == "difference to fedavg (95 %, seeds)"
    page = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL))
    assert "accura" not in text
    for words in (f"Test {run.metric.title} after the last round", f"Test {run.metric.title} by domain", *others):
        assert words in text
    figures = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])["figures"]
    drawn = next(f for f in figures if f["title"] == f"Test {run.metric.title}, mean over domains")["choices"][0]
    assert drawn["y"] == f"test {primary}"
    last = [line["y"][-1] for line in drawn["series"] if line["name"] == "fedprox"]
    assert last == [pytest.approx(run.metric.scale * sum(means) / 2, rel=1e-5)]


def test_sums_of_the_last_evaluation_give_its_metrics_by_label(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    made = fedcir.compare(
        algorithms=["fedavg"], out=tmp_path / "runs", report=False, **write_data("multilabel", tmp_path / "data")
    )
    run = made.runs["fedavg"][0]
    for domain, sums in run.sums.items():
        assert run.task.scores(sums)["auroc"] == run.final["auroc"][domain]
        by_label = run.task.scores_by_name(sums)
        assert np.mean([scores["auroc"] for scores in by_label.values()]) == pytest.approx(run.final["auroc"][domain])
    assert run.task.scores(add_sums(list(run.sums.values())))["auroc"] == run.final["auroc_weighted"]
    path = tmp_path / "runs" / "fedavg-0" / "sums.json"
    values = json.loads(path.read_text())
    values["domains"]["north"]["pairs_0"] += 1
    path.write_text(json.dumps({name: value for name, value in values.items() if name in ("round", "domains")}))
    with pytest.raises(InputError, match=r"sums.json does not belong to this run: of north, its counts are invalid"):
        _ = fedcir.load_run(path.parent).sums


def method(name: str, mean: float, change: float | None = None, half: float | None = None, **more: Any) -> MethodResult:
    """RMSE of a method on two domains of three seeds."""
    domains = {"a": Estimate(mean - 1, 0.5), "b": Estimate(mean + 1, 0.5)}
    difference = None if change is None else Estimate(change, 0.5)
    goal = CostToTarget(None, None, 0)
    settings = {"paired_seeds": 3, "metric": RMSE, **more}
    return MethodResult(name, domains, Estimate(mean, 0.5), domains["b"], goal, difference, half, **settings)


def test_the_lower_error_is_the_better_one() -> None:
    base, worse, better = method("fedavg", 50), method("fedprox", 55, 5, 1), method("fedbn", 45, -5, 1)
    assert (worse.better, better.better) == (False, True)
    assert find_best_method([base, worse, better]) is better
    assert choose_method([base, worse, better], "fedavg") is better
    assert better.interval == "95 % interval -6.00 to -4.00"
    assert comparison_rows([base, better], "fedavg", 3)[2] == (
        ["fedbn", *(f"{mean} ± 0.50" for mean in ("44.0", "46.0", "45.0", "46.0")), *["not reached"] * 2, "-5.00 ± 1.0"]
    )
    assert describe_losses(base, better) == ["On a it is 5.00 above fedbn."]
    assert describe_losses(better, base) == []


def test_the_worst_domain_of_an_error_is_the_highest() -> None:
    scores = [RunScores({"a": 40.0, "b": 60.0}, metric=RMSE), RunScores({"a": 42.0, "b": 62.0}, metric=RMSE)]
    assert scores[0].worst == 60
    interval = mean_interval(scores)
    assert (interval.mean, interval.image_half_width) == (51, None)


def test_an_error_that_still_falls_asks_for_more_rounds(tmp_path: Path) -> None:
    def curve(values: list[float]) -> fedcir.Run:
        records = [
            fedcir.RoundRecord(n, {}, None, v, v, v, 0, 0, 0, {}, {}, metric=RMSE) for n, v in enumerate(values, 1)
        ]
        summary = {"metric": {"name": "rmse", "title": "RMSE", "higher_is_better": False, "is_share": False}}
        return fedcir.Run(tmp_path, fedcir.Config(), {}, tuple(records), summary)

    falling, rising = curve([80 - n for n in range(12)]), curve([80 + n for n in range(12)])
    assert measure_rise([falling]) == (2, 3)
    assert measure_rise([rising]) is None


def test_a_target_is_a_number_of_the_tasks_unit(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = write_data("regression", tmp_path / "data")
    made = fedcir.compare(algorithms=["fedavg"], out=tmp_path / "runs", target=1000, report=False, **settings)
    assert made.methods[0].to_target.rounds == 1
    assert compare_methods(made.runs, "fedavg", target=1e-3)[0].to_target.reached == 0
    assert "rounds to reach 1000" in made.table()[0]
    (tmp_path / "masks").mkdir()
    settings = write_data("segmentation", tmp_path / "masks")
    with pytest.raises(InputError, match=r"target must be between 0 and 1 for Dice, got 70"):
        fedcir.compare(algorithms=["fedavg"], out=tmp_path / "other", target=70, report=False, **settings)
    assert not (tmp_path / "other" / "fedavg-0").exists()


def test_a_search_takes_the_trial_with_the_lowest_error(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "data").mkdir()
    settings = write_data("regression", tmp_path / "data")
    space = {"local.lr": "1e-6,0.1"}
    found = fedcir.tune(algorithm="fedavg", trials=2, space=space, out=tmp_path / "tuned", **{**settings, "lr": 1e-6})
    scores = [trial.score for trial in found.trials]
    assert found.best is found.trials[1]
    assert scores[1] < scores[0]
    assert found.reason.startswith(f"Trial 2 of 2 is the best: RMSE {scores[1]:.4g} on validation images, ")
    assert f"{scores[0] - scores[1]:.2f} below the settings that you gave" in found.reason
    line = json.loads((tmp_path / "tuned" / "trials.jsonl").read_text().splitlines()[1])
    assert line["rmse"][-1] == scores[1] == found.to_rows()[1]["rmse"]


def test_a_recommendation_compares_errors(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = write_data("regression", tmp_path / "data")
    made = fedcir.recommend(
        pilot_rounds=2, seeds=(0, 1), **{name: settings[name] for name in settings if name != "rounds"}
    )
    assert [trial.candidate.name for trial in made.trials] == ["fedavg", "fedprox"]
    assert made.findings == []
    assert all(trial.worst.mean > trial.mean.mean for trial in made.trials)
    lower = replace(
        made.trials[1], difference=replace(made.trials[1].difference, mean=-5.0, seeds=3, seed_half_width=1.0)
    )
    assert lower.better
    chosen = replace(made, choice=lower, seeds=(0, 1, 2))
    assert chosen.reason == "Use fedprox: it beats fedavg by 5.00 (95 % interval -6.00 to -4.00) on validation images."


def test_runs_of_different_tasks_are_not_reported_together(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = write_data("multilabel", tmp_path / "data")
    for task in ("multilabel", "regression"):
        own = {**settings, "set": {**settings["set"], "task.name": task}}
        fedcir.compare(algorithms=["fedavg"], out=tmp_path / task, report=False, **own)
    with pytest.raises(InputError, match=r"ran for different tasks \(AUROC and RMSE\): look at each alone"):
        fedcir.report([tmp_path / "multilabel", tmp_path / "regression"], out=tmp_path / "report.html")
