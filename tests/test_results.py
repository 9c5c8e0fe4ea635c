"""The published runs, and what the pages say of them."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "results"))
import published  # noqa: E402 (scripts beside the published runs)
import table  # noqa: E402
from collect import publish  # noqa: E402
from published import Row, common_seeds, difference, gap_closed, run_accuracy  # noqa: E402

import fedcir  # noqa: E402
import tasks  # noqa: E402


def all_runs() -> Iterator[dict]:
    for path in sorted((ROOT / "results").glob("*/*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if "summary" in run:
            yield run


def test_every_published_accuracy_is_a_whole_number_of_the_test_images_that_it_is_said_to_rest_on() -> None:
    for run in all_runs():
        images = run_accuracy(run).images
        for name, accuracy in run["summary"]["final"]["accuracy"].items():
            assert accuracy * images[name] == pytest.approx(round(accuracy * images[name]), abs=1e-6)


def test_seeds_of_pacs_share_their_test_images_and_those_of_office_do_not() -> None:
    sets = {study: {run_accuracy(run).test_set for run in Row(study, "fedavg").runs.values()} for study in table.GAINS}
    assert len(sets["pacs"]) == len(sets["digits"]) == 1
    assert len(sets["office-caltech-10"]) == 3


def test_the_interval_of_a_published_difference_covers_seeds_and_test_images() -> None:
    ours, base = Row("pacs", "fedfa"), Row("pacs", "fedavg")
    counts = np.array([208, 237, 171, 398])
    p = np.array(
        [np.mean([list(r.runs[s]["summary"]["final"]["accuracy"].values()) for s in range(3)], 0) for r in (ours, base)]
    )
    images = 1.959964 * (p * (1 - p) / counts).sum() ** 0.5 / 4
    gains = np.array(ours.finals("accuracy_mean")) - base.finals("accuracy_mean")[:3]
    seeds = 4.302653 * gains.std(ddof=1) / 3**0.5
    result = difference(ours, base)
    assert result is not None
    assert result.half_width == pytest.approx((seeds**2 + images**2) ** 0.5, rel=1e-5)


def test_the_gap_is_closed_on_the_seeds_that_method_fedavg_and_centralized_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs(*means: float) -> dict[int, dict]:
        return {
            seed: {"summary": {"dataset": "pacs", "seed": seed, "final": {"accuracy": {"photo": mean}}}}
            for seed, mean in enumerate(means)
        }

    # On seed 0 the gain is 0.1 of 0.4. Seed 1, where the gain is 0.5, has no ceiling.
    study = {"fedavg": runs(0.4, 0.2), "fedcirplus": runs(0.5, 0.7), "centralized": runs(0.8)}
    monkeypatch.setattr(published, "published", lambda folder: study)
    row = Row("study", "fedcirplus")
    assert common_seeds(row, Row("study", "fedavg")) == [0, 1]
    assert gap_closed(row) == (pytest.approx(0.25), 1)


def test_every_figure_of_a_sentence_about_our_results_that_has_an_interval_is_written_by_the_script() -> None:
    """Intervals outside of tables, code and figures that `make docs` writes are typed by hand."""
    for page in ("README.md", "docs/results.md", "docs/what-helps.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        text = re.sub(r"<!-- (\w+): .*?<!-- /\1 -->", "", text, flags=re.DOTALL)
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert re.findall(r"\d \(-?\d+\.\d to -?\d+\.\d\)", text) == [], page
    assert "whole gap" not in (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs/results.md").read_text(
        encoding="utf-8"
    )


def test_a_published_run_keeps_its_bits(fast_processes: None, tmp_path: Path) -> None:
    fedcir.compare(algorithms=["fedavg"], rounds=1, local_steps=1, out=tmp_path / "runs", report=False, workers=1)
    publish(tmp_path / "runs" / "fedavg-0", tmp_path / "fedavg-0.json")
    run = json.loads((tmp_path / "fedavg-0.json").read_text(encoding="utf-8"))
    score = run_accuracy(run)
    assert {name: hits.mean() for name, hits in score.hits.items()} == pytest.approx(
        run["summary"]["final"]["accuracy"]
    )
    assert score.images == {name: len(hits) for name, hits in score.hits.items()}


@pytest.mark.parametrize("spec", ["mean", "gain pacs fedavg - fedavg", "nothing pacs fedavg/batch"])
def test_a_figure_that_cannot_be_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=f"no figure '{spec}'"):
        table.figure(spec)


def test_the_sites_of_the_diabetes_patients_differ_in_sex_and_weight(tmp_path: Path) -> None:
    tasks.write_patients(tmp_path, tmp_path / "data")
    with open(tmp_path / "data" / "diabetes.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 442
    sites = {site: [row for row in rows if row["site"] == site] for site in sorted({row["site"] for row in rows})}
    assert list(sites) == ["men, high BMI", "men, low BMI", "women, high BMI", "women, low BMI"]
    for site, patients in sites.items():
        assert {float(row["sex"]) for row in patients} == {1.0 if site.startswith("women") else 2.0}
        assert all((float(row["bmi"]) > 25.7) == site.endswith("high BMI") for row in patients)


def test_masks_of_digits_are_their_strokes_and_those_of_mnist_m_are_of_the_digit_in_it(tmp_path: Path) -> None:
    strokes = np.zeros((700, 32, 32), np.uint8)
    for row, stroke in enumerate(strokes):
        stroke[4:28, 3 + row % 20 : 7 + row % 20] = 200
        stroke[:2] = 30  # darker than a stroke
    digits = np.arange(700) % 10
    for domain in ("mnist", "mnist_m", "usps"):
        images = 255 - strokes // 2 if domain == "mnist_m" else strokes  # what is light in MNIST is dark here
        arrays = {name: np.repeat(images[..., None], 3, axis=3) for name in ("x_train", "x_test")}
        np.savez(tmp_path / f"{domain}.npz", **arrays, y_train=digits, y_test=digits)
    tasks.write_masks(tmp_path, tmp_path / "data")
    for domain, first in (("mnist", 0), ("mnist_m", 300), ("usps", 0)):
        for part in ("train", "test"):
            mask = np.asarray(Image.open(tmp_path / "data" / domain / part / "masks" / "0005.png"))
            assert np.array_equal(mask, strokes[first + 5] == 200)
