"""The study of real hospitals: its splits, its scaling, its scores, and the page that shows it."""

import re
import shlex
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from fedcir import load_run
from fedcir.cli import app

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "results"))
import hospitals  # noqa: E402 (a script beside the published runs)
from hospitals import HEART, TCGA, Patients  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")


def make_patients(count: int = 40) -> Patients:
    """Patients of two sites, every second of whom dies; those with the larger first covariate earlier."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 2))
    y = np.stack([np.arange(count) % 2, np.exp(3 - x[:, 0])], axis=1)
    site = np.array(["north", "south"])[np.arange(count) // 2 % 2]
    patients = Patients(("a", "b"), x, y, site, np.zeros(count, bool))
    return replace(patients, test=hospitals.split_tcga(patients, 0))


def test_the_page_shows_the_tables_of_the_measured_runs() -> None:
    text = (ROOT / "docs" / "hospitals.md").read_text(encoding="utf-8")
    tables = re.findall(r"<!-- hospitals: ([\w ]+) -->\n(.*?)<!-- /hospitals -->", text, re.DOTALL)
    assert [name for name, _ in tables] == ["heart", "heart sure", "tcga", "tcga choice", "tcga sure"]
    for name, shown in tables:
        assert hospitals.table(name) == shown, "run `make docs`"


def read_commands() -> list[str]:
    """Commands of the page, in one line each: that of heart disease, and that of TCGA-BRCA."""
    text = (ROOT / "docs" / "hospitals.md").read_text(encoding="utf-8")
    shown = re.findall(r"```bash\nfedcir (.*?)\n```", text, re.DOTALL)
    return [" ".join(command.replace("\\\n", " ").split()) for command in shown]


def test_the_command_of_the_page_has_the_settings_that_cross_validation_chose() -> None:
    row = hospitals.CHOICES[hospitals.find_best(hospitals.load_results()["tcga"]["choice"])]
    assert read_commands()[1].endswith(f"--set data.scale={row.scale} {' '.join(row.options)}")


@needs_data
def test_the_command_of_the_page_trains_on_the_files_of_the_hospitals(tmp_path: Path) -> None:
    words = shlex.split(read_commands()[0].replace("HEART_DIR", str(DATA / "heart")))
    get_command(app)([*words, "--no-report", "--quiet", "--out", str(tmp_path / "run")], standalone_mode=False)
    manifest = load_run(tmp_path / "run").manifest
    assert {client["domain"] for client in manifest["clients"]} == {"cleveland", "hungarian", "switzerland", "va"}


def test_figures_of_flamby_have_the_means_that_it_publishes() -> None:
    means = {
        (study.task, row): round(statistics.fmean(values), 3)
        for study in (HEART, TCGA)
        for row, values in study.published.items()
    }
    assert means == {
        **{("multilabel", row): 0.748 for row in ("FedAvg", "FedProx", "SCAFFOLD")},
        ("multilabel", "FedAdam"): 0.779,
        ("multilabel", "pooled"): 0.795,
        ("multilabel", "local"): 0.784,
        ("survival", "FedAvg"): 0.735,
        ("survival", "FedProx"): 0.717,
        ("survival", "SCAFFOLD"): 0.699,
        ("survival", "FedAdam"): 0.842,
        ("survival", "pooled"): 0.704,
        ("survival", "local"): 0.728,
    }


def test_covariates_are_scaled_by_training_rows_of_a_site_or_of_all() -> None:
    x, site = np.array([[0.0], [2.0], [9.0], [4.0], [8.0], [4.0]]), np.array([*"aaabbb"])
    patients = Patients(("x",), x, np.zeros((6, 1)), site, np.array([False, False, True, False, False, True]))
    assert patients.standardise("client")[:, 0].tolist() == [-1, 1, 8, -1, 1, -1]  # means 1 and 6, spreads 1 and 2
    spread = 8.75**0.5  # of 0, 2, 4 and 8, whose mean is 3.5
    assert patients.standardise("federation")[:, 0].tolist() == pytest.approx([(v - 3.5) / spread for v in x[:, 0]])
    assert patients.standardise("none").tolist() == x.tolist()


def test_folds_divide_the_events_of_each_site_evenly() -> None:
    patients = make_patients(80)
    folds = hospitals.fold_tcga(patients, seed=1)
    for site in patients.sites:
        for event in (0, 1):
            assert np.bincount(folds[(patients.site == site) & (patients.y[:, 0] == event)]).tolist() == [4] * 5


def test_the_best_local_model_is_that_of_the_site_with_the_highest_mean_over_seeds() -> None:
    scores = [{"pooled": {"a": 0.9, "b": 0.7}}, {"pooled": {"a": 0.5, "b": 0.8}}]
    assert hospitals.best_pooled(scores) == [0.7, 0.8]


def test_a_difference_has_the_interval_of_students_t() -> None:
    # Differences 0, 1 and 1: mean 2/3, standard deviation 0.577, of which t = 4.303 standard errors.
    assert hospitals.show_difference([1, 2, 3], [1, 1, 2], paired=True) == "+0.667 (-0.768 to +2.101)"


def test_a_row_is_trained_by_the_command_and_scored_on_all_sites_as_one_set() -> None:
    patients = make_patients()
    row = hospitals.make_row("--algorithm fedavg --rounds 5 --local-steps 10 --lr 0.5 --batch-size 8", "federation")
    scores, outputs = hospitals.train_row(TCGA, row, patients, seed=0)  # checks the metric of each site itself
    y = patients.y[patients.test]
    pairs = [(i, j) for i in range(len(y)) for j in range(len(y)) if y[i, 0] and y[i, 1] < y[j, 1]]
    share = sum(outputs[i] > outputs[j] for i, j in pairs) / len(pairs)
    assert scores["pooled"]["all"] == pytest.approx(share, abs=1e-4)
    assert share > 0.9
    assert scores["sites"].keys() == {"north", "south"}


@needs_data
def test_the_splits_are_those_of_flamby() -> None:
    heart, tcga = hospitals.read_heart(DATA / "heart"), hospitals.read_tcga(DATA / "tcga_brca")
    for patients, columns, sizes in (
        (heart, 13, [(199, 104), (172, 89), (30, 16), (85, 45)]),
        (tcga, 39, [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]),
    ):
        found = [(patients.site == site, patients.test) for site in patients.sites]
        assert [((of & ~test).sum(), (of & test).sum()) for of, test in found] == sizes
        assert patients.x.shape[1] == len(patients.names) == columns
    assert tcga.y[tcga.test, 0].sum() == 32
    assert heart.y[heart.site == "switzerland", 0].sum() == 45
