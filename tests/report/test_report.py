"""`fedcir report`, and the page that other commands write."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from fedcir.records import RunFolder
from fedcir.report.sections import mean_interval, wilson

Command = Callable[..., Any]


@pytest.fixture
def reported(options: list[str]) -> list[str]:
    return [each for each in options if each != "--no-report"]


def text_of(page: Path) -> str:
    body = re.sub(r"<(style|script).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", body)


def test_run_and_compare_write_one_and_report_makes_it_again(
    fedcir: Command, reported: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "both"
    said = fedcir("compare", *reported, "--algorithms", "fedavg,fedcir", "--seeds", "0,1", "--out", out)
    assert said.code == 0, said.err
    assert "report.html" in said.out
    text = text_of(out / "report.html")
    for words in ("difference to fedavg", "Distances between clients", "rounds to fedavg", "ink", "pen", "wax"):
        assert words in text
    said = fedcir("report", out, "-o", tmp_path / "again.html")
    assert said.code == 0, said.err
    assert (tmp_path / "again.html").read_text() == (out / "report.html").read_text()
    said = fedcir("run", *reported, "--out", tmp_path / "one")
    assert "with a report.html to open" in said.out
    assert "1 method on arrays; 3 clients; 3 rounds of 2 local steps; 1 seed, 1 run." in text_of(
        tmp_path / "one" / "report.html"
    )


def test_without_the_data_all_but_distances_is_told_and_a_root_brings_them_back(
    fedcir: Command, reported: list[str], data_root: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "data"
    moved.mkdir()
    for file in data_root.glob("*.npz"):
        (moved / file.name).write_bytes(file.read_bytes())
    settings = [str(moved) if each == str(data_root) else each for each in reported]
    fedcir("run", *settings, "--out", tmp_path / "run", "--no-report")
    moved.rename(tmp_path / "elsewhere")
    said = fedcir("report", tmp_path / "run", "-o", tmp_path / "without.html")
    assert said.code == 0, said.err
    assert "Not measured" in text_of(tmp_path / "without.html")
    assert str(tmp_path) not in (tmp_path / "without.html").read_text()
    fedcir("report", tmp_path / "run", "-o", tmp_path / "with.html", "--data-root", tmp_path / "elsewhere")
    assert "Feature shift is" in text_of(tmp_path / "with.html")


def test_a_target_that_is_not_reached_says_so(fedcir: Command, options: list[str], tmp_path: Path) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html", "--target", "0.999", "--samples", 0)
    assert text_of(tmp_path / "r.html").count("not reached") == 3  # rounds, MB and TFLOPs


def test_no_path_of_the_machine_is_in_it(fedcir: Command, options: list[str], data_root: Path, tmp_path: Path) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert str(data_root) not in (tmp_path / "r.html").read_text()
    assert str(tmp_path) not in (tmp_path / "r.html").read_text()


def test_the_interval_of_one_run_is_that_of_its_test_images(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    accuracies = run.summary()["final"]["accuracy"].values()
    mean = sum(accuracies) / 3
    half = 1.96 * sum(p * (1 - p) / 12 for p in accuracies) ** 0.5 / 3  # twelve test images a domain
    assert mean_interval([run]) == (pytest.approx(max(0, mean - half)), pytest.approx(min(1, mean + half)))


def test_wilsons_interval_is_scipys() -> None:
    theirs = binomtest(9, 12).proportion_ci(0.95, "wilson")
    assert wilson(9 / 12, 12) == pytest.approx((theirs.low, theirs.high), abs=1e-4)
    assert wilson(1.0, 12)[1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere", "nowhere holds no run"),
        ("empty", "empty holds no run"),
        ("half", "holds no finished run: finish it with --resume"),
        ("one --target 70", "--target is an accuracy between 0 and 1, got 70"),
        ("one --samples 3", "--samples must be at least 8, or 0 for none, got 3"),
        ("one -o empty", "empty is a folder: name a file"),
    ],
)
def test_bad_input_is_one_line(
    fedcir: Command,
    options: list[str],
    tiny: Command,
    train: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    train(tiny(), tmp_path / "half", until=1)
    train(tiny(), tmp_path / "one")
    said = fedcir("report", *arguments.split())
    assert said.code == 2
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))
