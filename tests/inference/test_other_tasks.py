"""Models of tables, arrays and masks in use: evaluate, predict and export give what their task predicts."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from fedcir.analysis.withdrawal import forget
from fedcir.config import config_from_tables
from fedcir.data.encoding import read_encoding
from fedcir.data.sources.csv import encode_rows
from fedcir.data.sources.site_tables import read_table
from fedcir.errors import InputError
from fedcir.inference.evaluation import Evaluation
from fedcir.inference.exporting import export
from fedcir.inference.model import open_model
from fedcir.inference.predictor import Prediction, Predictor, TaskPrediction
from fedcir.reporting.evaluation_report import evaluate
from fedcir.reporting.leakage_report import audit
from fedcir.runs.reader import load_run

HEADER = "city,age,ill,score,tired,event,days"
TARGETS = {"classification": "ill", "regression": "score", "multilabel": "ill,tired", "survival": "event,days"}
Fedcir = Callable[..., tuple[int, str, str]]


def write_table(path: Path, seed: int, rows: int = 60) -> Path:
    """Rows in which age decides everything."""
    rng, lines = np.random.default_rng(seed), [HEADER]
    for row in range(rows):
        age = rng.normal(50, 10)
        event, days = int(rng.random() < 0.7), rng.exponential(3000 / max(age - 20, 1))
        city = "" if row % 9 == 8 else ("rome", "oslo")[row % 2]
        lines.append(f"{city},{age:.2f},{int(age > 50)},{2 * age:.3f},{int(age < 45)},{event},{days:.1f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_tables(root: Path) -> Path:
    root.mkdir()
    for number, site in enumerate(("north", "south")):
        write_table(root / f"{site}.csv", number)
    return root


@pytest.fixture(scope="session")
def task_run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A finished run of each task, trained once."""
    root = make_tables(tmp_path_factory.mktemp("tasks") / "tables")
    runs: dict[str, Path] = {}

    def make(task: str) -> Path:
        if task in runs:
            return runs[task]
        data: dict[str, Any] = {"name": "csv", "root": str(root), "val_fraction": 0.2}
        model: dict[str, Any] = {"name": "mlp", "width": 8}
        if task in TARGETS:
            target = TARGETS[task]
            data |= {"target": target, "ignore": sorted(set(HEADER.split(",")[2:]) - set(target.split(",")))}
        elif task == "segmentation":
            data |= {"name": "masks", "root": str(write_masks(root.parent / "masks")), "image_size": 16}
            model = {"name": "unet", "width": 4}
        else:
            data = {"name": "arrays", "root": str(write_arrays(root.parent / "arrays"))}
        tables = {
            "data": data,
            "model": model,
            "local": {"steps": 20, "lr": 0.1},
            "server": {"rounds": 3},
            "algorithm": {"name": "fedavg"},
            "run": {"device": "cpu", "workers": 1},
            "task": {"name": task} if task == "survival" else {},
        }
        runs[task] = train(config_from_tables(tables), root.parent / "runs" / task)
        return runs[task]

    return make


def write_masks(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        for kind in ("images", "masks"):
            (root / site / kind).mkdir(parents=True)
        for number in range(10):
            mask = np.zeros((16, 16), np.uint8)
            mask[number % 8 : number % 8 + 8, 4:12] = 1
            image = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8) + 120 * mask[..., None]
            Image.fromarray(image).save(root / site / "images" / f"{number}.png")
            Image.fromarray(mask).save(root / site / "masks" / f"{number}.png")
    return root


def write_arrays(root: Path) -> Path:
    root.mkdir()
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        parts: dict[str, Any] = {}
        for part, count in (("train", 40), ("test", 20)):
            labels = np.arange(count) % 2
            parts |= {f"x_{part}": rng.normal(size=(count, 3, 5)) + labels[:, None, None], f"y_{part}": labels}
        np.savez(root / f"{site}.npz", **parts)
    return root


@pytest.mark.parametrize("task", [*TARGETS, "segmentation", "arrays"])
def test_an_evaluation_gives_the_scores_of_the_runs_last_round(task: str, task_run: Callable[[str], Path]) -> None:
    run = load_run(task_run(task))
    result = evaluate(run)
    name = run.task.primary.name_in_files
    for domain in result:
        score = domain.accuracy if isinstance(result, Evaluation) else domain.scores[run.task.primary.name]
        assert score == pytest.approx(run.final[name("scores")][domain.domain], rel=1e-9)


def test_the_interval_of_rmse_is_that_of_resampled_errors(task_run: Callable[[str], Path], tmp_path: Path) -> None:
    run = task_run("regression")
    (tmp_path / "new").mkdir()
    table = write_table(tmp_path / "new" / "west.csv", 7)
    interval = evaluate(run, data_root=tmp_path / "new", split="all").domains[0].interval
    truth = np.array([float(line.split(",")[3]) for line in table.read_text().splitlines()[1:]])
    squares = (np.array([answer.values["score"] for answer in Predictor(run)(table)]) - truth) ** 2
    rng = np.random.default_rng(5)
    draws = [np.sqrt(rng.choice(squares, len(squares)).mean()) for _ in range(2000)]
    assert [interval.low, interval.high] == pytest.approx(np.quantile(draws, [0.025, 0.975]), rel=0.1)


@pytest.mark.parametrize("task", ["regression", "multilabel", "survival", "segmentation"])
def test_evaluate_prints_the_tasks_metrics_and_writes_a_page(
    task: str, task_run: Callable[[str], Path], fedcir: Fedcir
) -> None:
    run = task_run(task)
    code, out, err = fedcir("evaluate", run, "--out", run / "evaluation")
    metric = load_run(run).task.primary
    assert (code, err) == (0, "")
    assert metric.label in out
    assert metric.title in (run / "evaluation" / "evaluation.html").read_text(encoding="utf-8")
    saved = json.loads((run / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    assert saved["metric"] == metric.name
    assert "images" not in out or task == "segmentation"


def test_an_evaluation_on_another_table_encodes_it_as_in_training(
    task_run: Callable[[str], Path], tmp_path: Path, fedcir: Fedcir
) -> None:
    """The errors of the network on rows that are encoded by hand give the same RMSE."""
    run = task_run("regression")
    (tmp_path / "new").mkdir()
    table = write_table(tmp_path / "new" / "west.csv", 7)
    result = evaluate(run, data_root=tmp_path / "new", split="all")
    predictions = np.array([answer.values["score"] for answer in Predictor(run)(table)])
    truth = np.array([float(line.split(",")[3]) for line in table.read_text().splitlines()[1:]])
    assert result.domains[0].scores["rmse"] == pytest.approx(np.sqrt(np.mean((predictions - truth) ** 2)), rel=1e-5)
    assert not result.domains[0].is_trained_on


def test_predictions_of_a_table_are_those_of_the_network_on_its_encoded_rows(task_run: Callable[[str], Path]) -> None:
    run = task_run("regression")
    table = Path(load_run(run).config.data.root or "") / "north.csv"
    encoding = read_encoding(load_run(run).card["table"])
    x = torch.from_numpy(encode_rows(read_table(table), encoding))
    expected = load_run(run).task.predict(load_run(run).model()(x)).flatten().tolist()
    answers = list(Predictor(run).files([str(table)]))
    assert [name for name, _ in answers[:2]] == [f"{table}:2", f"{table}:3"]
    values = [answer.values["score"] for _, answer in answers if isinstance(answer, TaskPrediction)]
    assert values == pytest.approx(expected, rel=1e-5)


def test_rows_may_be_dictionaries_with_missing_cells_and_further_columns(task_run: Callable[[str], Path]) -> None:
    predictor = Predictor(task_run("classification"))
    old, young = predictor([{"age": 80.5, "city": None, "name": "x"}, {"city": "rome", "age": 20}])
    assert isinstance(old, Prediction)
    assert isinstance(young, Prediction)
    assert (old.label, young.label) == ("1", "0")


@pytest.mark.parametrize(
    ("task", "header"),
    [
        ("classification", "path,class,probability,novelty,class_2,probability_2,error"),
        ("regression", "path,score,error"),
        ("multilabel", "path,ill,tired,error"),
        ("survival", "path,risk,error"),
    ],
)
def test_predict_prints_a_row_for_each_row_of_a_new_table(
    task: str, header: str, task_run: Callable[[str], Path], fedcir: Fedcir, tmp_path: Path
) -> None:
    """The new table has neither the target nor a site, and one column more."""
    lines = ["age,city,name", "70,oslo,a", "30,,b"]
    (tmp_path / "new.csv").write_text("\n".join(lines))
    code, out, _ = fedcir("predict", task_run(task), tmp_path / "new.csv", "--csv")
    first, *rows = csv.reader(io.StringIO(out))
    assert code == 0
    assert ",".join(first) == header
    assert [row[0] for row in rows] == [f"{tmp_path}/new.csv:2", f"{tmp_path}/new.csv:3"]
    if task == "classification":
        assert [row[1] for row in rows] == ["1", "0"]
    elif task != "survival":
        assert float(rows[0][1]) > float(rows[1][1])
    code, out, _ = fedcir("predict", task_run(task), tmp_path, "--json")
    assert len(json.loads(out)) == 2
    assert "predict" not in fedcir("predict", task_run(task), tmp_path / "new.csv")[2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["age", "70"], "has no column 'city': add it, if need be with empty cells"),
        (["age,city", "70,bern"], "line 2: 'city' is 'bern', which the model has never seen; it knows oslo, rome"),
        (["age,city", "old,rome"], "line 2: 'age' is 'old', no number"),
        (["age,city", "1e300,rome"], "line 2: 'age' is '1e300', no number"),
        (["age,city"], "has no rows"),
        (["age,city", '70,"rome'], "is not part of a table: unexpected end of data"),
        (["age|city", "70|rome"], "has no column 'age'; it has 'age|city'"),
    ],
)
def test_predict_refuses_a_table_in_one_line(
    lines: list[str], message: str, task_run: Callable[[str], Path], fedcir: Fedcir, tmp_path: Path
) -> None:
    (tmp_path / "new.csv").write_text("\n".join(lines))
    code, _, err = fedcir("predict", task_run("regression"), tmp_path / "new.csv", "--csv")
    assert code == 2
    assert message in err.replace("has no column 'age': add it", "has no column 'age'; it has 'age|city': add it")
    assert len(err.strip().splitlines()) == 1


def test_predict_takes_arrays_and_refuses_other_shapes(
    task_run: Callable[[str], Path], fedcir: Fedcir, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.stack([np.zeros((3, 5)), np.ones((3, 5))]))
    code, out, _ = fedcir("predict", task_run("arrays"), tmp_path / "x.npy", "--csv")
    assert code == 0
    assert [line.split(",")[:2] for line in out.splitlines()[1:]] == [
        [f"{tmp_path}/x.npy:0", "0"],
        [f"{tmp_path}/x.npy:1", "1"],
    ]
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 5)))
    code, _, err = fedcir("predict", task_run("arrays"), tmp_path / "x.npy")
    assert (code, len(err.strip().splitlines())) == (2, 2)  # the first is the note on calibration
    assert "must hold numbers of the shape [N, 3, 5], got float64[2, 4, 5]" in err


def test_predict_writes_masks_which_find_the_square(
    task_run: Callable[[str], Path], fedcir: Fedcir, tmp_path: Path
) -> None:
    run = task_run("segmentation")
    images = Path(load_run(run).config.data.root or "") / "a" / "images"
    code, out, err = fedcir("predict", run, images, "--csv", "--masks", tmp_path / "masks")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "path,0,1,error"
    overlaps = []
    for path in sorted(images.iterdir()):
        predicted, truth = (
            np.asarray(Image.open(p)) for p in (tmp_path / "masks" / path.name, images.parent / "masks" / path.name)
        )
        overlaps.append((predicted == truth).mean())
    assert np.mean(overlaps) > 0.9
    code, _, err = fedcir("predict", run, images, "--masks", tmp_path / "masks")
    assert code == 2
    assert "exists: name an empty folder" in err
    code, _, err = fedcir("predict", task_run("regression"), tmp_path, "--masks", tmp_path / "more")
    assert code == 2


@pytest.mark.parametrize("task", [*TARGETS, "segmentation", "arrays"])
@pytest.mark.parametrize("ending", [".onnx", ".pt2", ".safetensors"])
def test_an_exported_file_predicts_as_the_run(
    task: str, ending: str, task_run: Callable[[str], Path], tmp_path: Path
) -> None:
    run = task_run(task)
    exported = export(run, tmp_path / f"model{ending}")
    assert exported.real
    assert exported.difference < 1e-4
    card = exported.card.read_text(encoding="utf-8")
    assert "## Accuracy" in card
    if ending == ".onnx":
        session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
        trained = open_model(run, device="cpu")
        inputs = np.zeros((3, *trained.shape), np.uint8 if trained.takes_images else np.float32)
        (predicted,) = session.run(None, {session.get_inputs()[0].name: inputs})
        assert np.allclose(predicted, trained.predict(inputs)[0].numpy(), atol=1e-3)
        about = session.get_modelmeta().custom_metadata_map
        assert ("table" in about) == (task in TARGETS)
        code = card.partition("```python\n")[2].partition("```")[0]
        Image.new("RGB", (20, 20)).save(tmp_path / "image.jpg")
        names: dict[str, Any] = {}
        exec(
            code.replace('"model.onnx"', repr(str(exported.path))).replace(
                '"image.jpg"', repr(str(tmp_path / "image.jpg"))
            ),
            names,
        )
        if task != "arrays" and task in TARGETS:
            assert json.loads(names["about"]["features"]) == list(trained.encoding.features)


def test_scores_of_each_client_scale_are_encoded_by_its_own_rows(train: Callable[..., Path], tmp_path: Path) -> None:
    """With data.scale=client a file's rows are scaled by their own mean and spread, so a shift changes nothing."""
    root = make_tables(tmp_path / "tables")
    ignored = ["ill", "tired", "event", "days", "city"]
    tables = {
        "data": {"name": "csv", "root": str(root), "target": "score", "ignore": ignored, "scale": "client"},
        "model": {"name": "mlp"},
        "local": {"lr": 1e-5},
        "server": {"rounds": 1},
        "algorithm": {"name": "fedavg"},
        "run": {"device": "cpu", "workers": 1},
    }
    run = train(config_from_tables(tables), tmp_path / "run")
    predictor = Predictor(run)
    ages = [30.0, 40.0, 65.0]
    plain, shifted = (predictor([{"age": age + shift} for age in ages]) for shift in (0, 8))
    assert [p.values["score"] for p in plain] == pytest.approx([p.values["score"] for p in shifted], rel=1e-5)


def test_a_model_of_tables_takes_no_images(task_run: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows must be dictionaries or the path of a CSV file, got ndarray"):
        Predictor(task_run("regression"))(np.zeros((2, 8, 8, 3), np.uint8))
    with pytest.raises(InputError, match="the model takes tables, but minidigits gives images"):
        evaluate(task_run("classification"), dataset="minidigits")


def test_a_site_is_forgotten_whatever_the_task_is(task_run: Callable[[str], Path], tmp_path: Path) -> None:
    record = forget(task_run("regression"), "south", out=tmp_path / "without").record
    assert record["before"]["membership"] is None
    without = load_run(tmp_path / "without")
    assert list(without.final["rmse"]) == ["north"]


def test_audit_refuses_other_tasks_and_attacks_classifiers_of_rows(task_run: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"audit attacks models of classification, and .* is a run of segmentation"):
        audit(task_run("segmentation"))
    result = audit(task_run("classification"))
    assert result.notes[0].startswith("inputs are no images")
    assert {membership.domain for membership in result.membership} == {"north", "south"}
