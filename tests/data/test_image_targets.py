"""Images with target columns in labels.csv: several findings, a number, or an event and a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir import MultiLabel, Regression, Survival
from fedcir.config import Config, DataConfig, config_from_tables
from fedcir.data.opening import open_dataset, open_site
from fedcir.errors import InputError
from fedcir.inference.predictor import Predictor, TaskPrediction
from fedcir.runs.reader import load_run

HEADER = "path,site,patient,effusion,oedema,age,event,days"
Fedcir = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sites of 40 images: a bright upper half is effusion, a bright left half oedema."""
    rng, lines = np.random.default_rng(0), [HEADER]
    for site in ("north", "south"):
        (tmp_path / "xrays" / site).mkdir(parents=True)
        for number in range(40):
            effusion, oedema, age = number % 2, number // 2 % 2, 20 + number
            pixels = rng.integers(0, 20, (16, 16)) + age
            pixels[:8] += 90 * effusion
            pixels[:, :8] += 60 * oedema
            name = f"{site}/{number}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "xrays" / name)
            lines.append(
                f"{name},{site},p{site}{number // 2},{effusion},{oedema},{age}.5,{number % 3 > 0:d},{1000 - age}"
            )
    (tmp_path / "xrays" / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "xrays"


def make_data(root: Path, target: str | None, **settings: object) -> DataConfig:
    values = {"columns": ("path", "effusion", "site", "patient"), **settings}
    return DataConfig("table", str(root), image_size=16, target=target, **values)  # type: ignore[arg-type]


def find_row(root: Path, name: str) -> list[str]:
    lines = (root / "labels.csv").read_text().splitlines()
    return next(line.split(",") for line in lines if line.startswith(f"{name},"))


def test_several_findings_are_labels_of_each_image(root: Path) -> None:
    domains = open_dataset(make_data(root, "effusion,oedema"), 0)
    assert domains.task == MultiLabel(("effusion", "oedema"))
    assert domains.names == ("north", "south")
    for domain in domains:
        split = domain.train
        for name, targets in zip(split.ids, split.select_targets(np.arange(len(split))), strict=True):
            assert targets.tolist() == [float(cell) for cell in find_row(root, name)[3:5]]
        patients = [{find_row(root, name)[2] for name in part.ids} for part in (domain.train, domain.test)]
        assert not patients[0] & patients[1]


def test_a_column_of_numbers_is_regression_and_a_comparison_makes_classes(root: Path) -> None:
    domains = open_dataset(make_data(root, "age"), 0)
    assert domains.task == Regression(("age",))
    domains = open_dataset(make_data(root, "age>40"), 0)
    assert domains.classes == ("age<=40", "age>40")
    split = domains["north"].train
    for name, label in zip(split.ids, split.labels, strict=True):
        assert (float(find_row(root, name)[5]) > 40) == (label == 1)


def test_event_and_time_are_survival(root: Path) -> None:
    domains = open_dataset(make_data(root, "event,days"), 0, task="survival")
    assert domains.task == Survival(("event", "days"))


def test_other_targets_are_other_data(root: Path) -> None:
    one, two = (open_dataset(make_data(root, target), 0).content for target in ("effusion,oedema", "oedema,effusion"))
    assert one != two


def test_a_site_opens_its_own_rows(root: Path) -> None:
    domains = open_site(root, "south", replace(make_data(root, "effusion,oedema"), name="table"), 0)
    assert domains.names == ("south",)
    assert domains.task == MultiLabel(("effusion", "oedema"))
    assert len(domains["south"].train) + len(domains["south"].test) == 40


@pytest.mark.parametrize(
    ("target", "change", "error"),
    [
        ("effusion,fracture", None, "has no column 'fracture'"),
        ("effusion,oedema", ("pnorth0,0,0", "pnorth0,2,0"), "are not all 0 or 1"),
        ("age", ("20.5", ""), "line 2 has no age: fill it in, or remove the line"),
        ("age", ("20.5", "NaN"), "line 2 has no age"),
    ],
)
def test_wrong_targets_are_refused_in_one_line(
    root: Path, target: str, change: tuple[str, str] | None, error: str, fedcir: Fedcir
) -> None:
    if change:
        table = root / "labels.csv"
        table.write_text(table.read_text().replace(*change, 1))
    settings = ["--set", f"data.target={target}", "--set", "data.columns=path,effusion,site", "--image-size", "16"]
    code, _, err = fedcir("data", "check", "table", "--data-root", root, "--quiet", *settings)
    assert code == 2
    assert error in err
    assert len(err.strip().splitlines()) == 1


def test_a_wanted_task_names_the_line_of_a_wrong_label(root: Path) -> None:
    table = root / "labels.csv"
    table.write_text(table.read_text().replace("pnorth0,0,0", "pnorth0,2,0"))
    with pytest.raises(InputError, match="line 2 gives 2 for the label 'effusion': labels are 0 or 1"):
        open_dataset(make_data(root, "effusion,oedema"), 0, task="multilabel")


def test_folders_take_no_target(root: Path) -> None:
    with pytest.raises(InputError, match=r"data.target is for tables \(csv\) and images with a labels.csv"):
        open_dataset(DataConfig("folders", str(root), target="effusion"), 0)
    with pytest.raises(InputError, match=r"data\.classes selects classes, and multilabel has none"):
        open_dataset(make_data(root, "effusion,oedema", classes=("0",)), 0)


def test_a_model_of_findings_is_trained_evaluated_and_used(
    root: Path, train: Callable[..., Path], fedcir: Fedcir, tmp_path: Path
) -> None:
    tables = {
        "data": {
            "name": "table",
            "root": str(root),
            "target": "effusion,oedema",
            "columns": ["path", "effusion", "site"],
            "image_size": 16,
            "val_fraction": 0.2,
        },
        "model": {"width": 4},
        "local": {"steps": 20, "lr": 0.05},
        "server": {"rounds": 3},
        "algorithm": {"name": "fedavg"},
        "run": {"device": "cpu", "workers": 1},
    }
    config: Config = config_from_tables(tables)
    run = load_run(train(config, tmp_path / "run"))
    assert run.final["auroc_mean"] > 0.9
    code, out, _ = fedcir("evaluate", run.path)
    assert code == 0
    assert "AUROC (%) by name" in out
    answers = Predictor(run)([root / "north" / "3.png", root / "north" / "0.png"])
    assert all(isinstance(answer, TaskPrediction) for answer in answers)
    assert answers[0].values["effusion"] > answers[1].values["effusion"]
    assert answers[0].values["oedema"] > answers[1].values["oedema"]


def test_check_show_init_and_diagnose_speak_of_findings(root: Path, fedcir: Fedcir, tmp_path: Path) -> None:
    settings = ["--set", "data.target=effusion,oedema", "--set", "data.columns=path,effusion,site"]
    code, out, err = fedcir("data", "check", "table", "--data-root", root, *settings, "--quiet")
    assert (code, err) == (0, "")
    assert "effusion (%)" in out
    assert "targets (multilabel)" in out
    code, out, _ = fedcir("data", "show", "table", "--data-root", root, *settings, "--quiet", "-o", tmp_path / "a.png")
    assert code == 0
    assert (tmp_path / "a.png").stat().st_size > 0
    code, out, err = fedcir(
        "diagnose", "--dataset", "table", "--data-root", root, *settings, "--out", tmp_path / "d.png"
    )
    assert code == 0, err
    assert "effusion (%) ranges from 50" in out
    code, out, err = fedcir("init", root, *settings, "--out", tmp_path / "fedcir.toml", "--quiet")
    assert code == 0, err
    text = (tmp_path / "fedcir.toml").read_text(encoding="utf-8")
    assert 'name = "table"' in text
    assert 'target = "effusion,oedema"' in text
    assert 'name = "fedavg"' in text
    code, _, err = fedcir(
        "run", tmp_path / "fedcir.toml", "--rounds", "1", "--local-steps", "1", "--out", tmp_path / "r"
    )
    assert code == 0, err
