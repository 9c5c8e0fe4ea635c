"""What is said of data and of runs, and the numbers it rests on."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcir.analysis.alignment import alignment
from fedcir.analysis.bound import average_risk, bound, risks
from fedcir.analysis.diagnosis import Diagnosis, diagnose_data, diagnose_run, verdict
from fedcir.analysis.divergence import Distance, Divergences
from fedcir.analysis.views import View, views_of_run
from fedcir.config import Config
from fedcir.records import RunFolder

Tiny = Callable[..., Config]
Train = Callable[..., Path]
Fedcir = Callable[..., Any]


def view(domain: str, labels: list[int], predicted: list[int], losses: list[float]) -> View:
    z = np.arange(2 * len(labels), dtype=np.float32).reshape(-1, 2)
    return View(domain, z, None, np.array(labels), np.array(predicted), np.array(losses, dtype=np.float32))


def apart(value: float) -> Divergences:
    distance = Distance(value, value - 0.1, value + 0.1)
    return Divergences({("a", "b"): distance}, {"a": distance, "b": replace(distance, value=value / 2)})


def found(value: float, name: str = "one") -> Diagnosis:
    views = [view("a", [0, 0, 1, 1], [0, 1, 1, 1], [1, 2, 3, 2]), view("b", [0, 1], [0, 1], [0.5, 1.5])]
    labels = {"a": np.array([2, 2]), "b": np.array([1, 1])}
    return Diagnosis(name, ("cat", "dog"), views, apart(value), labels, None, bound(views, apart(value)))


def test_the_terms_of_the_bound_are_the_mean_risk_and_the_mean_distance_to_the_mixture() -> None:
    both = found(1.6).bound
    assert both is not None
    assert both.risk == pytest.approx((2.0 + 1.0) / 2)
    assert both.divergence == pytest.approx((1.6 + 0.8) / 2)


def test_confusion_counts_what_is_there_by_what_it_was_taken_for() -> None:
    assert found(1.0).confusion("a").tolist() == [[1, 1], [0, 2]]
    assert found(1.0).mistaken() == ["cat for dog at a (50%)"]


def test_label_skew_is_the_total_variation_to_the_mean() -> None:
    skewed = replace(found(1.0), labels={"a": np.array([9, 1]), "b": np.array([1, 9])})
    assert skewed.skew == pytest.approx({"a": 0.4, "b": 0.4})
    assert found(1.0).skew == {"a": 0.0, "b": 0.0}
    assert any("part of the distance is theirs" in sentence for sentence in verdict(skewed))


@pytest.mark.parametrize(("value", "word"), [(0.2, "small"), (0.9, "moderate"), (1.8, "large")])
def test_the_verdict_has_a_word_and_its_number(value: float, word: str) -> None:
    first = verdict(found(value))[0]
    assert first.startswith(f"Feature shift is {word}: ")
    assert f"{value:.2f}" in first


def test_two_runs_are_compared_and_what_is_within_the_intervals_is_said_to_be() -> None:
    sure = verdict(found(1.8, "fedavg"), found(1.2, "fedcir"))[-2]
    assert sure == (
        "From fedavg to fedcir clients are nearer by 0.60: 1 of 1 pairs came nearer, 1 of them beyond their intervals."
    )
    unsure = verdict(found(1.2), found(1.25, "two"))[-2]
    assert "further apart by 0.05: 0 of 1 pairs came nearer, none of them beyond its interval" in unsure


def test_alignment_is_the_kl_that_the_formula_gives() -> None:
    # One dimension, one class: KL(N(1, 1) || N(0, 2)) = log 2 + (1 + 1) / 8 - 1/2.
    views = [View("a", np.ones((4, 1), np.float32), np.ones((4, 1), np.float32), *_three(4))]
    gaussians = {"mean": torch.zeros(1, 1), "std": torch.full((1, 1), 2.0)}
    made = alignment(views, gaussians)
    assert made is not None
    assert made.clients == {"a": pytest.approx(math.log(2) + 2 / 8 - 1 / 2)}
    # All z are 1, so the true Gaussian has the floor for its sigma: KL(N(1, 2) || N(0, 2)) = 1/8.
    assert made.generator == pytest.approx(1 / 8)
    assert alignment([replace(views[0], sigma=None)], gaussians) is None


def _three(samples: int) -> tuple[Any, Any, Any]:
    return np.zeros(samples, np.int64), np.zeros(samples, np.int64), np.zeros(samples, np.float32)


def test_a_run_seen_again_is_as_accurate_as_its_last_round_says(tiny: Tiny, train: Train, tmp_path: Path) -> None:
    folder = RunFolder(train(tiny("fedcir"), tmp_path / "run"))
    last = folder.records()[-1]
    again = {each.domain: each for each in views_of_run(folder)}
    assert {name: each.accuracy for name, each in again.items()} == last.accuracy
    assert last.risk is not None
    assert {name: each.risk for name, each in again.items()} == pytest.approx(last.risk, rel=1e-5)
    assert list(risks(folder.records())) == [1, 2, 3]
    assert average_risk(folder.records())[3] == pytest.approx(np.mean(list(last.risk.values())))
    assert diagnose_run(folder).aligned is not None


def test_data_are_told_by_their_pixels(tiny: Tiny) -> None:
    made = diagnose_data(tiny())
    assert made.pixels is not None
    assert all(0 < each.brightness < 1 for each in made.pixels.values())
    assert made.bound is None


def test_diagnose_of_data_of_a_run_and_of_two(
    fedcir: Fedcir, options: list[str], data_root: Path, tmp_path: Path
) -> None:
    data = ["--dataset", "arrays", "--data-root", data_root]
    said = fedcir("diagnose", *data, "-o", tmp_path / "data.png", "--samples", 12)
    assert said.code == 0, said.err
    assert "under an untrained encoder" in said.out
    for name in ("fedavg", "fedcir"):
        fedcir("run", *options, "--algorithm", name, "--out", tmp_path / name)
    said = fedcir("diagnose", tmp_path / "fedavg", tmp_path / "fedcir", "-o", tmp_path / "two.png")
    assert said.code == 0, said.err
    assert "From fedavg to fedcir clients are" in said.out
    assert "KL to q(z|y)" in said.out
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    said = fedcir("diagnose", tmp_path / "fedavg", "--json", "-o", tmp_path / "one.png")
    (told,) = json.loads(said.out)
    assert set(told["pad"]["to_mixture"]) == set(told["accuracy"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere holds no run"),
        (["--samples", "3"], "--samples must be at least 8, got 3"),
        (["--projection", "som", "--samples", "12"], "--projection takes pca, tsne, umap, got 'som'"),
        (["x", "--dataset", "pacs"], "leave --dataset, --image-size and --set out"),
    ],
)
def test_bad_input_is_one_line(
    fedcir: Fedcir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = fedcir("diagnose", *arguments)
    assert said.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))


def test_runs_on_other_data_and_runs_that_are_not_finished_are_refused(
    fedcir: Fedcir, options: list[str], tiny: Tiny, train: Train, tmp_path: Path
) -> None:
    fedcir("run", *options, "--out", tmp_path / "one")
    fedcir("run", *options, "--seed", 1, "--clients", 6, "--out", tmp_path / "other")
    said = fedcir("diagnose", tmp_path / "one", tmp_path / "other", "-o", tmp_path / "x.png")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "ran on different data" in said.err
    train(tiny(), tmp_path / "half", until=1)
    said = fedcir("diagnose", tmp_path / "half", "-o", tmp_path / "x.png")
    assert said.code == 2
    assert "holds no finished run" in said.err
