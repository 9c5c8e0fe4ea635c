"""What experiments make of runs, worked out by hand on runs that are numbers only."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fedcir.algorithms import PAPER_METHODS
from fedcir.client.prediction import DomainHits, Hits
from fedcir.config import Config
from fedcir.errors import InputError
from fedcir.experiments.experiment import Case, Point, Results
from fedcir.experiments.paper import EXPERIMENTS, PAPER_DATASETS, published_accuracy
from fedcir.experiments.reproduction import find_dataset_folders, find_experiment
from fedcir.reporting.charts import Lines
from fedcir.runs.reader import Run
from fedcir.types import RoundRecord


def run(path: Path, accuracies: Sequence[float]) -> Run:
    """A finished run of two clients: each round moves 3 GB and takes 4 TFLOPs."""
    records = [
        RoundRecord(i, {"ce": 1 / i}, None, a, a, a, 2 * 10**9, 10**9, 4 * 10**12, {}, {}, risk={"a": 1.0, "b": 2.0})
        for i, a in enumerate(accuracies, start=1)
    ]
    last = accuracies[-1]
    names = ("accuracy_mean", "accuracy_weighted", "accuracy_worst")
    final = {"round": len(accuracies), **dict.fromkeys(names, last), "accuracy": {"one": last}}
    about = {"algorithm": "any", "dataset": "any", "seed": 0, "rounds": len(accuracies)}
    summary = {**about, "final": final, "best": final, "cost": {"peak_memory": 5 * 10**8}}
    clients = [{"id": 0, "domain": "a", "train": ["x"]}, {"id": 1, "domain": "b", "train": ["y"]}]
    return Run(path, Config(), {"clients": clients, "hash": ""}, tuple(records), summary)


def results(
    tmp_path: Path,
    accuracies: dict[tuple[str, str, int], Sequence[float]],
    points: Sequence[Point] = (Point(),),
    dataset: str = "pacs",
    target: float | None = None,
) -> Results:
    """By method, point and seed."""
    by_name = {point.name: point for point in points}
    made = [(Case(dataset, by_name[point], name, seed), v) for (name, point, seed), v in accuracies.items()]
    runs = {case.name: run(tmp_path / case.name, values) for case, values in made if values}
    return Results([case for case, _ in made], runs, target)


def test_every_table_and_figure_of_the_paper_is_there() -> None:
    figures = ["clients", "convergence", "divergence", "heterogeneity", "local-steps", "risk"]
    assert list(EXPERIMENTS) == [*(f"fig-{name}" for name in figures), "table1", "table2", "table3"]


def test_methods_at_chance_level_are_said_to_be(tmp_path: Path) -> None:
    result = results(tmp_path, {("fedavg", "", 0): [0.55], ("fedcir", "", 0): [0.8]})
    for item in result.by_name.values():
        accuracy = (item.summary or {})["final"]["accuracy_mean"]
        hits = Hits(1, {"one": DomainHits(np.arange(100) < 100 * accuracy, (50, 50))})
        object.__setattr__(item, "hits", hits)  # 0.55 - 1.96 * sqrt(0.55 * 0.45 / 100) is 0.45
    same = "what the same answer to every test image reaches"
    assert result.chance_notes() == [f"fedavg is at chance level (50.0 %, {same}): nothing can be read from that."]


def test_an_id_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(InputError, match="no table or figure 'tabel1'; did you mean 'table1'"):
        find_experiment("tabel1")


def test_table1_has_ours_and_the_papers(tmp_path: Path) -> None:
    accuracies = {("fedavg", "", 0): [0.5], ("fedavg", "", 1): [0.52], ("fedcir", "", 0): [0.6], ("fedcir", "", 1): []}
    outcome = find_experiment("table1").outcome(results(tmp_path, accuracies))
    assert outcome.rows == [
        ["method", "pacs", "pacs, paper"],
        ["fedavg", "51.00 ± 1.41", "52.61 ± 1.82"],  # (1 + 1) / 1 = 2, its root 1.41
        ["fedcir", "60.00", "58.81 ± 1.48"],
    ]
    first, second = csv.DictReader(",".join(row) for row in outcome.numbers)
    assert (first["accuracy"], first["seeds"], first["paper"]) == ("51", "2", "52.61")
    assert (second["std"], second["seeds"]) == ("", "1")


def test_a_run_that_failed_leaves_a_dash(tmp_path: Path) -> None:
    rows = find_experiment("table1").outcome(results(tmp_path, {("fedavg", "", 0): [0.5], ("fedcir", "", 0): []})).rows
    assert rows[2][1] == "–"


def test_the_papers_numbers_are_those_it_prints() -> None:
    assert published_accuracy("fedcir", "domainnet") == (65.18, 1.12)
    assert published_accuracy("centralized", "iwildcam") == (87.59, 0.51)
    assert published_accuracy("fedavg", "minidigits") is None
    assert [published_accuracy(name, "office-caltech-10") for name in PAPER_METHODS][1] == (62.73, 0.32)


def test_a_sweep_has_a_column_and_a_place_for_each_value(tmp_path: Path) -> None:
    points = find_experiment("fig-local-steps").points("smoke")
    accuracies = {("fedavg", points[0].name, 0): [0.3], ("fedavg", points[1].name, 0): [0.4]}
    outcome = find_experiment("fig-local-steps").outcome(results(tmp_path, accuracies, points))
    assert outcome.rows == [["method", "E 1", "E 4"], ["fedavg", "30.00", "40.00"]]
    (panel,) = outcome.panels
    assert isinstance(panel, Lines)
    assert panel.ticks == ("E 1", "E 4")
    assert (panel.series[0].x, panel.series[0].y) == ((0.0, 1.0), (30.0, 40.0))


def test_table2_goes_over_each_weight_with_the_other_at_the_papers() -> None:
    pairs = [tuple(p.settings["algorithm"].values()) for p in find_experiment("table2").points("paper")]
    assert len(pairs) == 9  # five and five, of which one is the same
    assert (0.1, 5e-6) in pairs
    assert (0.5, 5e-5) in pairs
    assert {p.settings["local"]["steps"] for p in find_experiment("table2").points("paper")} == {100}


def test_table3_is_what_a_client_spent_until_the_target(tmp_path: Path) -> None:
    accuracies = {
        ("fedavg", "", 0): [0.4, 0.61, 0.7],
        ("fedavg", "", 1): [0.6, 0.65, 0.7],
        ("fedcir", "", 0): [0.1, 0.2, 0.59],
        ("fedcir", "", 1): [0.1, 0.2, 0.3],
    }
    outcome = find_experiment("table3").outcome(results(tmp_path, accuracies, dataset="domainnet"))
    # Rounds 2 and 1: the middle of 8 and 4 TFLOPs, and of 6 and 3 GB, over two clients.
    assert outcome.rows[1] == ["domainnet", "60.0 %", "fedavg", "1.5", "3", "2.25", "0.5", "84.08", "5.30", "7.71"]
    assert outcome.rows[2][3:7] == ["not reached"] * 4
    assert outcome.numbers[2][3:] == ["2", "0", "", "", "", ""]


def test_table3_counts_a_seed_that_never_gets_there_as_later_than_all(tmp_path: Path) -> None:
    accuracies = {
        ("fedavg", "", 0): [0.4, 0.5],
        ("fedavg", "", 1): [0.4, 0.4],
        ("fedcir", "", 0): [0.5, 0.5],
        ("fedcir", "", 1): [0.4, 0.5],
        ("fedcir", "", 2): [0.4, 0.4],
    }
    outcome = find_experiment("table3").outcome(results(tmp_path, accuracies, target=0.45))
    assert outcome.rows[0] == ["dataset", "target", "method", "rounds", "TFLOPs", "GB moved", "GB of memory"]
    assert outcome.rows[1] == ["pacs", "45.0 %", "fedavg", "1 of 2 seeds", "", "", ""]
    # The middle of rounds 1, 2 and never: two rounds of 4 TFLOPs and 3 GB, over two clients.
    assert outcome.rows[2] == ["pacs", "45.0 %", "fedcir", "2 (2 of 3 seeds)", "4", "3", "0.5"]


def test_fig_risk_shows_the_models_risk_and_the_training_loss(tmp_path: Path) -> None:
    outcome = find_experiment("fig-risk").outcome(results(tmp_path, {("fedavg", "", 0): [0.1, 0.2]}))
    tested, trained = outcome.panels
    assert isinstance(tested, Lines)
    assert isinstance(trained, Lines)
    assert tested.series[0].y == (1.5, 1.5)
    assert trained.series[0].y == (1.0, 0.5)
    assert outcome.rows[1] == ["pacs", "fedavg", "1.5000", "0.5000"]


def test_fig_convergence_looks_at_the_curves_at_shares_of_the_rounds(tmp_path: Path) -> None:
    outcome = find_experiment("fig-convergence").outcome(results(tmp_path, {("fedavg", "", 0): [0.1, 0.2, 0.3, 0.4]}))
    assert outcome.rows[1] == ["pacs", "fedavg", "10.00", "10.00", "20.00", "30.00", "40.00"]


def planned(id: str, scale: str, **given: dict[str, object]) -> list[Case]:
    return find_experiment(id).cases(scale, ["pacs"], ["fedavg"], [0], given)


def test_a_setting_that_is_varied_picks_its_points() -> None:
    assert len(planned("fig-clients", "paper")) == 16
    assert len(planned("fig-clients", "paper", partition={"beta": 0.5})) == 4
    assert [case.point.name for case in planned("fig-local-steps", "paper", local={"steps": 50})] == ["E 50"]
    with pytest.raises(InputError, match=r"local.steps=7 is not one of its points: E 5; E 20"):
        planned("fig-local-steps", "paper", local={"steps": 7})


def test_a_setting_that_is_the_same_at_every_point_can_be_given() -> None:
    assert len(planned("fig-heterogeneity", "paper", partition={"clients": 12})) == 4


def test_names_of_runs_are_names_of_folders_and_all_different() -> None:
    for id in list(EXPERIMENTS):
        for scale in ("paper", "small", "smoke"):
            made = find_experiment(id).cases(scale, ["pacs", "domainnet"], None, None, {})
            names = [case.name for case in made]
            assert len(set(names)) == len(names)
            assert all(name.replace("-", "").replace(".", "").replace("_", "").isalnum() for name in names), names


def test_table2_is_of_fedcir_only() -> None:
    with pytest.raises(InputError, match="takes only fedcir, not 'fedavg'"):
        planned("table2", "small")


def test_datasets_are_found_by_their_names_however_they_are_written(tmp_path: Path) -> None:
    for name in ("office_caltech10", "PACS", "other"):
        (tmp_path / name).mkdir()
    result = find_dataset_folders(PAPER_DATASETS, tmp_path)
    assert result == {"pacs": tmp_path / "PACS", "office-caltech-10": tmp_path / "office_caltech10"}
    with pytest.raises(InputError, match="holds no folder domainnet"):
        find_dataset_folders(["domainnet"], tmp_path)
