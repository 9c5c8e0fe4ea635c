"""`fedcir report`, and the page that other commands write."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedcir.runs.reader import load_run
from fedcir.runs.statistics import RunScores, mean_interval
from fedcir.runtime.run_folder import RunFolder

Command = Callable[..., Any]


@pytest.fixture
def reported(options: list[str]) -> list[str]:
    return [option for option in options if option != "--no-report"]


def text_of(page: Path) -> str:
    body = re.sub(r"<(style|script).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", body)


def data_of(page: Path, title: str) -> Any:
    """What the page was given to draw under a title that begins so."""
    (text,) = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return next(figure for figure in json.loads(text)["figures"] if figure["title"].startswith(title))


def test_run_and_compare_write_one_and_report_makes_it_again(
    fedcir: Command, reported: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "both"
    output = fedcir("compare", *reported, "--algorithms", "fedavg,fedcir", "--seeds", "0,1", "--out", out)
    assert output.code == 0, output.err
    assert "report.html" in output.out
    text = text_of(out / "report.html")
    for words in ("difference to fedavg", "Distances between domains", "rounds to match fedavg", "ink", "pen", "wax"):
        assert words in text
    output = fedcir("report", out, "-o", tmp_path / "again.html")
    assert output.code == 0, output.err
    assert (tmp_path / "again.html").read_text() == (out / "report.html").read_text()
    output = fedcir("run", *reported, "--out", tmp_path / "one")
    assert "with a report.html to open" in output.out
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
    settings = [str(moved) if item == str(data_root) else item for item in reported]
    fedcir("run", *settings, "--out", tmp_path / "run", "--no-report")
    moved.rename(tmp_path / "elsewhere")
    output = fedcir("report", tmp_path / "run", "-o", tmp_path / "without.html")
    assert output.code == 0, output.err
    assert "Not measured: run ran on " in text_of(tmp_path / "without.html")
    assert output.err.startswith(
        f"note: distances not measured: {tmp_path / 'run'} ran on {moved}, which is no longer a folder"
    )
    assert output.err.count("\n") == 1
    assert str(tmp_path) not in (tmp_path / "without.html").read_text()
    fedcir("report", tmp_path / "run", "-o", tmp_path / "with.html", "--data-root", tmp_path / "elsewhere")
    assert "The distance of representations is" in text_of(tmp_path / "with.html")


def test_a_held_out_domain_is_marked_and_has_a_mean_of_its_own(
    fedcir: Command, reported: list[str], tmp_path: Path
) -> None:
    output = fedcir("run", *reported, "--hold-out", "pen", "--out", tmp_path / "run")
    assert output.code == 0, output.err
    final = RunFolder(tmp_path / "run").summary()["final"]
    text = text_of(tmp_path / "run" / "report.html")
    for words in ("seen mean (%)", "unseen mean (%)", "pen (not trained on)", "mean over domains trained on"):
        assert words in text
    assert f"On pen, which no client trained on, fedcirplus reaches {100 * final['accuracy_unseen']:.1f} %" in text


def test_every_accuracy_is_on_all_test_images_whatever_distances_are_measured_on(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html", "--samples", 8)  # of twelve
    final = RunFolder(tmp_path / "run").summary()["final"]["accuracy"]
    heats = {choice["name"]: choice for choice in data_of(tmp_path / "r.html", "Class by class")["choices"]}
    for index, (domain, accuracy) in enumerate(final.items()):
        rows = [[count or 0 for count in row] for row in heats[f"fedcirplus: confusion in {domain}"]["values"]]
        assert sum(map(sum, rows)) == 12
        assert sum(row[label] for label, row in enumerate(rows)) / 12 == pytest.approx(accuracy)
        right = [row[index] for row in heats["fedcirplus: accuracy by class and domain"]["values"]]  # of four
        assert sum(right) / 3 == pytest.approx(100 * accuracy)
    assert len(data_of(tmp_path / "r.html", "Representations of test images")["choices"][0]["points"]) == 3 * 8
    text = text_of(tmp_path / "r.html")
    assert "on up to 8 test images of each domain" in text
    assert "least accurate" not in text


def test_the_best_federated_method_leads_and_centralized_training_is_a_ceiling(
    fedcir: Command, reported: list[str], tmp_path: Path
) -> None:
    longer = ["12" if item == "3" else item for item in reported]
    fedcir("compare", *longer, "--algorithms", "centralized,fedavg,fedprox", "--out", tmp_path / "all")
    text = text_of(tmp_path / "all" / "report.html")
    assert re.search(r"The most accurate federated method is fed(avg|prox) ", text)
    assert re.search(
        r"Centralized training, which moves all data to one place, reaches [\d.]+ %, (a ceiling|less than fed)", text
    )
    assert "With one seed, every difference between methods could be chance." in text
    assert re.search("No other federated method came out above fedavg|fedprox came first|at chance level", text)


DAMAGE = {
    "config.toml": "not toml at all",
    "manifest.json": "{",
    "summary.json": "[",
    "rounds.jsonl": '{"round": 1}\n',
}


@pytest.mark.parametrize("file", DAMAGE)
def test_a_damaged_run_is_left_out_and_named_on_the_page_and_on_standard_error(
    fedcir: Command, tiny: Command, train: Command, tmp_path: Path, file: str
) -> None:
    whole, broken = (train(tiny("fedavg", f"run.seed={seed}"), tmp_path / f"fedavg-{seed}") for seed in (0, 1))
    (broken / file).write_text(DAMAGE[file])
    output = fedcir("report", whole, broken, "-o", tmp_path / "r.html")
    assert output.code == 0, output.err
    (line,) = output.err.splitlines()
    assert line.startswith("note: left out: ")
    assert str(broken) in line
    assert file in line
    text = text_of(tmp_path / "r.html")
    assert "Left out: " in text
    assert "fedavg-1" in text
    assert "1 method on arrays; 3 clients; 3 rounds of 2 local steps; 1 seed, 1 run." in text
    assert str(tmp_path) not in (tmp_path / "r.html").read_text()
    (tmp_path / "r.html").unlink()
    output = fedcir("report", broken, "-o", tmp_path / "r.html")
    assert output.code == 2
    assert output.err.count("\n") == 1
    assert file in output.err
    assert not (tmp_path / "r.html").exists()


def test_a_run_whose_distances_cannot_be_measured_is_named_and_the_others_are_measured(
    fedcir: Command, tiny: Command, train: Command, tmp_path: Path
) -> None:
    runs = [train(tiny("fedavg", f"run.seed={seed}"), tmp_path / f"fedavg-{seed}") for seed in (0, 1)]
    (runs[0] / "model.safetensors").write_bytes(b"damaged")
    output = fedcir("report", *runs, "-o", tmp_path / "r.html")
    assert output.code == 0, output.err
    (line,) = output.err.splitlines()
    assert line.startswith("note: distances not measured for fedavg-0: ")
    assert str(runs[0] / "model.safetensors") in line
    text = text_of(tmp_path / "r.html")
    assert re.search("Not measured for fedavg-0: [^/]*fedavg-0/model.safetensors", text)
    assert "under the model of fedavg-1" in text
    assert "1 seed" not in text  # its accuracies are told


def test_durations_and_sizes_have_units_that_people_use(fedcir: Command, options: list[str], tmp_path: Path) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html", "--samples", 0)
    text = text_of(tmp_path / "r.html")
    assert re.search(r"\d (s|min)\b", text)
    assert re.search(r"[\d.]+ [kMG]B", text)
    assert "minutes" not in text
    axes = [choice["x"] for choice in data_of(tmp_path / "r.html", "Test accuracy, mean over domains")["choices"]]
    assert axes[0] == "round"
    assert re.fullmatch("[kM]B moved, all clients", axes[1])
    assert axes[3] == "seconds"


def test_a_target_that_is_not_reached_says_so(fedcir: Command, options: list[str], tmp_path: Path) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html", "--target", "0.999", "--samples", 0)
    assert text_of(tmp_path / "r.html").count("not reached") == 3  # rounds, bytes and FLOPs


def test_no_path_of_the_machine_is_in_it(fedcir: Command, options: list[str], data_root: Path, tmp_path: Path) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert str(data_root) not in (tmp_path / "r.html").read_text()
    assert str(tmp_path) not in (tmp_path / "r.html").read_text()


def test_the_interval_of_one_run_is_that_of_its_test_images(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    run = load_run(tmp_path / "run")
    accuracies = run.final["accuracy"].values()
    mean = sum(accuracies) / 3
    half = 1.959964 * sum(p * (1 - p) / 12 for p in accuracies) ** 0.5 / 3  # twelve test images a domain
    interval = mean_interval([RunScores.from_run(run)])
    assert (interval.mean, interval.half_width) == (pytest.approx(mean), pytest.approx(half))


def test_a_bar_of_one_run_has_wilsons_interval_of_its_domains_test_images(
    fedcir: Command, options: list[str], tmp_path: Path
) -> None:
    fedcir("run", *options, "--out", tmp_path / "run")
    fedcir("report", tmp_path / "run", "-o", tmp_path / "r.html", "--samples", 0)
    (bars,) = data_of(tmp_path / "r.html", "Accuracy by domain")["choices"][0]["series"]
    for share, low, high in zip(bars["y"], bars["low"], bars["high"], strict=True):
        p, n, z = share / 100, 12, 1.959964  # twelve test images a domain
        middle, half = p + z**2 / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
        ends = [100 * (middle + sign * half) / (1 + z**2 / n) for sign in (-1, 1)]
        assert [low, high] == pytest.approx(ends, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere", "nowhere holds no run"),
        ("empty", "empty holds no run"),
        ("half", "holds no finished run: resume it to finish it"),
        ("one --target 70", "target must be between 0 and 1 for accuracy, got 70"),
        ("one --samples 3", "samples must be at least 8, or 0 for none, got 3"),
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
    if arguments == "half":
        train(tiny(), tmp_path / "half", until=1)
    elif arguments.startswith("one"):
        train(tiny("fedavg", "server.rounds=1"), tmp_path / "one")
    output = fedcir("report", *arguments.split())
    assert output.code == 2
    assert words in output.err
    assert output.err.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))
