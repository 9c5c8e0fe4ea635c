"""A federation of tables from `init` to `predict`, and what is wrong with tables and tasks, in one line each."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.runs.reader import load_run

HEART = Path(__file__).parents[3] / "shared" / "data" / "heart"
HEADER = "age,city,num,event,days"
Fedcir = Callable[..., tuple[int, str, str]]


def write_tables(root: Path) -> Path:
    """Two sites of 60 rows, the second of which is older."""
    root.mkdir(parents=True)
    for number, site in enumerate(("north", "south")):
        rng, lines = np.random.default_rng(number), [HEADER]
        for row in range(60):
            age = rng.normal(50 + 20 * number, 9)
            city = ("rome", "oslo")[row % 2]
            lines.append(f"{age:.1f},{city},{int(age > 50 + 20 * number)},{row % 3 > 0:d},{rng.exponential(200):.1f}")
        (root / f"{site}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_tables(tmp_path / "tables")


@pytest.mark.parametrize("data", ["made", "heart"])
def test_a_federation_of_tables_goes_from_init_to_predict(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedcir: Fedcir
) -> None:
    if data == "heart" and not HEART.is_dir():
        pytest.skip(f"{HEART} is not there")
    monkeypatch.chdir(tmp_path)
    root = write_tables(tmp_path / "tables") if data == "made" else HEART
    target = ("--set", "data.target=num>0")

    def call(*words: object) -> str:
        code, out, err = fedcir(*words)
        assert code == 0, f"{words}: {err}"
        return out

    code, _, err = fedcir("init", root)
    assert code == 2
    assert "name the one to predict, as in data.target=" in err
    assert "Columns in which a site differs most" in call("init", root, *target)
    assert "largest distance" in call("data", "check", "csv", "--data-root", root, *target)
    call("data", "show", "csv", "--data-root", root, *target, "-o", "sheet.png")
    out = call("diagnose", "--dataset", "csv", "--data-root", root, *target)
    assert "Feature shift is" in out
    assert "brightness" not in out
    assert "image" not in out.replace("images.png", "")
    call("run", "fedcir.toml", "--rounds", 3, "--workers", 1, "--out", "runs/a", "--quiet")
    sites = {path.stem for path in root.glob("*.csv")}
    assert set(load_run("runs/a").final["accuracy"]) == sites
    out = call("evaluate", "runs/a")
    assert all(site in out for site in sites)
    assert "rows" in out
    lines = next(iter(sorted(root.glob("*.csv")))).read_text(encoding="utf-8").splitlines()
    Path("new.csv").write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(call("predict", "runs/a", "new.csv", "--csv"))))
    assert [row["path"] for row in rows] == ["new.csv:2", "new.csv:3", "new.csv:4"]
    assert {row["class"] for row in rows} <= {"num>0", "num<=0"}
    call("export", "runs/a", "-o", "model.onnx")
    assert Path("MODEL_CARD.md").is_file()


def change(path: Path, *pair: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert pair[0] in text
    path.write_text(text.replace(*pair, 1), encoding="utf-8")


def drop_column(tables: Path) -> None:
    lines = (tables / "south.csv").read_text().splitlines()
    (tables / "south.csv").write_text("\n".join(line.partition(",")[2] for line in lines))


def keep_one_row(tables: Path) -> None:
    (tables / "south.csv").write_text("\n".join((tables / "south.csv").read_text().splitlines()[:2]))


def use_bars(tables: Path) -> None:
    for path in tables.iterdir():
        path.write_text(path.read_text().replace(",", "|"))


def add_to_second_line(name: str, position: int, cell: str) -> Callable[[Path], None]:
    def write(tables: Path) -> None:
        lines = (tables / f"{name}.csv").read_text().splitlines()
        cells = lines[1].split(",")
        cells[position] = cell
        lines[1] = ",".join(cells)
        (tables / f"{name}.csv").write_text("\n".join(lines))

    return write


def leave(tables: Path) -> None:
    pass


SURVIVAL = ("data.target=event,days", "task.name=survival", "data.ignore=num")


@pytest.mark.parametrize("command", ["run", "data check", "init", "diagnose"])
@pytest.mark.parametrize(
    ("spoil", "settings", "error"),
    [
        (drop_column, ("data.target=num",), "site 'south' has no column 'age', which site 'north' has: add it"),
        (leave, ("data.target=ill",), "has no column 'ill'; it has age, city, num, event, days"),
        (add_to_second_line("south", 2, "NaN"), ("data.target=num",), "south.csv, line 2 has no num: fill it in"),
        (add_to_second_line("south", 4, "-3"), SURVIVAL, "south.csv, line 2 gives the time -3: times are 0 or more"),
        (add_to_second_line("south", 3, "2"), SURVIVAL, "south.csv, line 2 gives the event 2: events are 1, or 0"),
        (use_bars, ("data.target=num",), "has no column 'num'"),
        (add_to_second_line("south", 1, '"rome'), ("data.target=num",), "is not part of a table"),
        (add_to_second_line("south", 0, "1e999"), ("data.target=num",), "'age' is '1e999', but a number in other rows"),
        (add_to_second_line("south", 0, "9" * 60), ("data.target=num",), f"'age' is '{'9' * 60}', but a number"),
        (add_to_second_line("south", 0, "old"), ("data.target=num",), "'age' is 'old', but a number in other rows"),
        (lambda tables: (tables / "south.csv").write_text(HEADER), ("data.target=num",), "south.csv has no rows"),
        (lambda tables: (tables / "south.csv").write_text(""), ("data.target=num",), "south.csv has no rows"),
        (keep_one_row, ("data.target=num",), "domain 'south' has 1 row, too few to train and to test on"),
        (leave, ("data.target=num", "task.name=segmentation"), "takes masks of images, not columns"),
        (leave, ("data.target=days", "task.name=classification"), "takes classes, but days holds numbers"),
        (leave, ("data.target=num", "task.name=survival"), "needs two target columns, as in data.target=event,time"),
        (leave, ("data.target=age,num",), "that are not all 0 or 1, which may be several tasks"),
        (leave, ("data.target=num", "task.name=sorting"), "sorting"),
    ],
)
def test_bad_tables_and_targets_are_refused_in_one_line(
    command: str, spoil: Callable[[Path], None], settings: tuple[str, ...], error: str, tables: Path, fedcir: Fedcir
) -> None:
    spoil(tables)
    words: list[object] = ["init", tables, "--dataset", "csv"]
    if command == "data check":
        words = ["data", "check", "csv", "--data-root", tables]
    elif command != "init":
        words = [command, "--dataset", "csv", "--data-root", tables]
    if command == "run":
        words += ["--algorithm", "fedavg", "--rounds", 1, "--out", "runs/a"]
    for setting in settings:
        words += ["--set", setting]
    code, _, err = fedcir(*words)
    assert code == 2
    assert error in err
    assert len(err.strip().splitlines()) == 1, err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--set", "local.optimizer=adamm"), "adamm"),
        (("--set", "model.train=layer9"), "model.train"),
        (("--set", "model.adapter=lora", "--set", "model.adapter_rank=0"), "model.adapter_rank"),
        (("--model", "linear", "--set", "model.adapter=lora"), "model.adapter"),
        (("--model", "hf:weights"), "safetensors"),
        (
            ("--set", "data.target=days", "--algorithm", "fedcir"),
            "fedcir computes with classes, which regression has not",
        ),
        (("--set", "data.target=days", "--algorithm", "fedproto"), "computes with classes, which regression has not"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(
    options: tuple[str, ...], error: str, tables: Path, fedcir: Fedcir
) -> None:
    (tables.parent / "weights").mkdir()
    (tables.parent / "weights" / "config.json").write_text(json.dumps({"model_type": "vit"}))
    (tables.parent / "weights" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    words = ["run", "--dataset", "csv", "--data-root", tables, "--rounds", 1, "--set", "data.target=num"]
    words += ["--algorithm", "fedavg", "--set", "data.ignore=days"] if "--algorithm" not in options else []
    if "hf:weights" in options:
        words = ["run", "--dataset", "minidigits", "--rounds", 1, "--algorithm", "fedavg"]
    code, _, err = fedcir(*words, *options, "--out", "runs/a")
    assert code == 2
    assert error in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_category_that_training_has_never_seen_is_refused(tables: Path, fedcir: Fedcir, tmp_path: Path) -> None:
    settings = ["--dataset", "csv", "--data-root", tables, "--set", "data.target=num", "--algorithm", "fedavg"]
    code, _, err = fedcir("run", *settings, "--rounds", 1, "--quiet", "--out", "runs/a")
    assert code == 0, err
    other = write_tables(tmp_path / "other")
    change(other / "south.csv", "rome", "bern")
    code, _, err = fedcir("evaluate", "runs/a", "--data-root", other, "--quiet")
    assert code == 2
    assert "column 'city' of site 'south' has the category 'bern', which the model has never seen" in err
    change(other / "south.csv", "bern", "3")
    code, _, err = fedcir("predict", "runs/a", other / "south.csv", "--csv")
    assert code == 2
    assert "south.csv, line 2: 'city' is '3', which the model has never seen; it knows oslo, rome" in err


def test_a_held_out_site_may_have_categories_of_its_own(tables: Path, fedcir: Fedcir) -> None:
    change(tables / "south.csv", "rome", "bern")
    settings = ["--dataset", "csv", "--data-root", tables, "--set", "data.target=num", "--algorithm", "fedavg"]
    code, _, err = fedcir("run", *settings, "--rounds", 1, "--quiet", "--hold-out", "south", "--out", "runs/a")
    assert code == 0, err
    assert load_run("runs/a").final["unseen"] == ["south"]


@pytest.fixture
def masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        for kind in ("images", "masks"):
            (tmp_path / "scans" / site / kind).mkdir(parents=True)
        for number in range(20):
            mask = np.zeros((16, 16), np.uint8)
            mask[4:12, number % 8 : number % 8 + 8] = 1
            image = rng.integers(0, 99, (16, 16), dtype=np.uint8) + 100 * mask
            Image.fromarray(image).save(tmp_path / "scans" / site / "images" / f"{number}.png")
            Image.fromarray(mask).save(tmp_path / "scans" / site / "masks" / f"{number}.png")
    return tmp_path / "scans"


def test_check_show_diagnose_and_init_speak_of_masks(masks: Path, fedcir: Fedcir) -> None:
    code, out, err = fedcir("data", "check", "masks", "--data-root", masks, "--quiet")
    assert (code, err) == (0, "")
    assert "targets (segmentation)" in out
    assert "1 (%)" in out
    assert "verdict: ready" in out
    code, out, err = fedcir("data", "show", "masks", "--data-root", masks, "--quiet", "--image-size", 16)
    assert (code, err) == (0, "")
    assert "segmentation, 16x16 pixels" in out
    code, out, err = fedcir("diagnose", "--dataset", "masks", "--data-root", masks)
    assert code == 0, err
    code, out, err = fedcir("init", masks)
    assert code == 0, err
    text = Path("fedcir.toml").read_text(encoding="utf-8")
    assert 'name = "masks"' in text
    assert 'name = "unet"' in text
    code, _, err = fedcir("run", "fedcir.toml", "--rounds", 1, "--local-steps", 1, "--quiet", "--out", "runs/a")
    assert code == 0, err


def test_a_mask_of_another_size_is_refused_in_one_line(masks: Path, fedcir: Fedcir) -> None:
    Image.fromarray(np.ones((8, 16), np.uint8)).save(masks / "b" / "masks" / "3.png")
    for words in (["run", "--dataset", "masks", "--algorithm", "fedavg"], ["data", "check", "masks", "--quiet"]):
        code, _, err = fedcir(*words, "--data-root", masks)
        assert code == 2
        assert "b/masks/3.png has 16x8 pixels, but its image 16x16: make them equal" in err
        assert len(err.strip().splitlines()) == 1


def test_check_show_diagnose_and_init_speak_of_arrays(
    tmp_path: Path, fedcir: Fedcir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arrays").mkdir()
    rng = np.random.default_rng(0)
    for number, site in enumerate(("a", "b")):
        labels = np.arange(40) % 2
        parts = {part: rng.normal(size=(40, 3, 5)) + number for part in ("x_train", "x_test")}
        np.savez(tmp_path / "arrays" / f"{site}.npz", **parts, y_train=labels, y_test=labels)
    code, out, err = fedcir("data", "check", "arrays", "--data-root", "arrays", "--quiet")
    assert (code, err) == (0, "")
    assert "floats of the shape [3, 5]" in out
    code, out, err = fedcir("data", "show", "arrays", "--data-root", "arrays", "--quiet")
    assert (code, err) == (0, "")
    code, out, err = fedcir("diagnose", "--dataset", "arrays", "--data-root", "arrays")
    assert code == 0, err
    assert "Feature shift is" in out
    code, out, err = fedcir("init", "arrays")
    assert code == 0, err
    assert 'name = "arrays"' in Path("fedcir.toml").read_text(encoding="utf-8")
    code, _, err = fedcir("run", "fedcir.toml", "--rounds", 1, "--local-steps", 1, "--quiet", "--out", "runs/a")
    assert code == 0, err
