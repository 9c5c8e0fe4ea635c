"""`fedcir predict`, `evaluate` and `export`: what they print, and how they refuse."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedcir as package
from fedcir import Predictor

Command = Callable[..., Any]


@pytest.fixture
def mixed(pictures: Path, tmp_path: Path) -> Path:
    """A folder with a picture, an empty file and a text that says it is a picture."""
    (tmp_path / "mixed" / "inside").mkdir(parents=True)
    (tmp_path / "mixed" / "good.png").write_bytes((pictures / "day" / "low" / "0.png").read_bytes())
    (tmp_path / "mixed" / "empty.png").touch()
    (tmp_path / "mixed" / "inside" / "text.jpg").write_text("no image")
    return tmp_path / "mixed"


def test_predict_prints_a_line_an_image(fedcir: Command, run: Path, pictures: Path) -> None:
    output = fedcir("predict", run, pictures / "day" / "low", "--device", "cpu")
    header, *lines = output.out.splitlines()
    assert header.split() == ["class", "sure", "novelty", "then", "image"]
    assert len(lines) == 16
    assert lines[0].split()[-1] == str(pictures / "day" / "low" / "0.png")
    assert output.err == ""
    assert output.code == 0
    assert len({line.index(str(pictures)) for line in lines}) == 1  # in columns


def test_predict_says_how_many_images_to_check_by_eye(fedcir: Command, run: Path, pictures: Path) -> None:
    paths = sorted(pictures.rglob("*.png"))
    high = sum(item.novelty >= 0.9 for item in Predictor(run, device="cpu")(paths))
    assert 0 < high < len(paths) / 5
    for form in ([], ["--json"]):
        output = fedcir("predict", run, pictures, *form, "--device", "cpu")
        result = f"{high} of {len(paths)} images have a `novelty` of 0.9 or more"
        assert (output.code, output.err) == (0, f"note: {result}; check them by eye (known images: about 1 in 10)\n")


def test_predict_as_json_is_what_the_contract_says(fedcir: Command, run: Path, pictures: Path) -> None:
    path = pictures / "night" / "high" / "3.png"
    output = fedcir("predict", run, path, "--json", "--top", 2, "--device", "cpu")
    (row,) = json.loads(output.out)
    (expected,) = Predictor(run, device="cpu", top=2)(path)
    assert list(row) == ["path", "class", "probability", "novelty", "unlike", "top"]
    assert row["path"] == str(path)
    assert row["class"] == expected.label
    assert row["probability"] == pytest.approx(expected.probability)
    assert row["novelty"] == row["unlike"] == pytest.approx(expected.novelty)
    assert [name for name, _ in row["top"]] == [name for name, _ in expected.top]
    assert output.code == 0


@pytest.mark.parametrize("form", ["--json", "--csv", ""])
def test_files_that_cannot_be_read_are_named_and_the_rest_is_predicted(
    fedcir: Command, run: Path, mixed: Path, form: str
) -> None:
    output = fedcir("predict", run, mixed, *([form] if form else []), "--device", "cpu")
    assert output.code == 2
    assert output.err.splitlines() == [
        f"fedcir: cannot read {mixed}/empty.png: it is empty",
        f"fedcir: cannot read {mixed}/inside/text.jpg: it is not an image of a known format",
    ]
    if form == "--json":
        rows = json.loads(output.out)
        assert [row.get("error") for row in rows] == ["it is empty", None, "it is not an image of a known format"]
        assert set(rows[0]) == {"path", "error"}
    elif form == "--csv":
        rows = list(csv.DictReader(io.StringIO(output.out)))
        assert [bool(row["error"]) for row in rows] == [True, False, True]
        assert float(rows[1]["probability"]) >= float(rows[1]["probability_2"])
    else:
        assert len(output.out.splitlines()) == 2


def test_a_list_may_come_from_standard_input(
    fedcir: Command, run: Path, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{mixed}/good.png\n\n{mixed}/missing.png\n"))
    output = fedcir("predict", run, "-", "--json", "--device", "cpu")
    assert [row.get("error") for row in json.loads(output.out)] == [None, "there is no such file"]
    assert output.code == 2


def test_an_empty_list_is_an_empty_list(fedcir: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    output = fedcir("predict", run, "-", "--json", "--device", "cpu")
    assert json.loads(output.out) == []
    assert output.code == 0


def test_after_ctrl_c_the_json_can_still_be_parsed(
    fedcir: Command, run: Path, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.StringIO):
        def __next__(self) -> str:
            line = super().readline()
            if not line:
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr("sys.stdin", Interrupted(f"{mixed}/good.png\n" * 130))
    output = fedcir("predict", run, "-", "--json", "--device", "cpu")
    assert output.code == 130
    assert len(json.loads(output.out)) == 64  # the second batch was being read
    assert output.err.splitlines()[-1].startswith("fedcir: interrupted")


def test_a_run_without_images_set_aside_says_what_to_do(fedcir: Command, plain: Path, mixed: Path) -> None:
    output = fedcir("predict", plain, mixed / "good.png", "--device", "cpu")
    (line,) = output.err.splitlines()
    assert "not calibrated" in line
    assert "--set data.val_fraction=0.1" in line
    assert output.code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "nowhere.png"], "there is no file or folder nowhere.png"),
        (["RUN", "PICTURE", "--json", "--csv"], "--json and --csv exclude each other"),
        (["RUN", "PICTURE", "--top", "0"], "top must be at least 1, got 0"),
        (["RUN", "PICTURE", "--device", "abacus"], "'abacus' is not available here"),
        (["nowhere", "PICTURE"], "nowhere is not a run"),
        (["UNFINISHED", "PICTURE"], "holds no finished run: resume it to finish it"),
        (["APART", "PICTURE"], "choose one as site, from day, night"),
        (["RUN"], "is missing: images, tables (.csv) or arrays"),
    ],
)
def test_predict_refuses_in_one_line(
    fedcir: Command, run: Path, apart: Path, unfinished: Path, pictures: Path, arguments: list[str], message: str
) -> None:
    places = {"RUN": run, "APART": apart, "UNFINISHED": unfinished, "PICTURE": pictures / "day" / "low" / "0.png"}
    output = fedcir("predict", *(places.get(argument, argument) for argument in arguments))
    assert output.code == 2
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert message in line


def test_evaluate_prints_a_row_a_domain_and_writes_a_page(fedcir: Command, run: Path, tmp_path: Path) -> None:
    output = fedcir("evaluate", run, "--out", tmp_path / "out", "--device", "cpu")
    assert output.code == 0
    final = package.load_run(run).final
    for domain, accuracy in final["accuracy"].items():
        (row,) = [line for line in output.out.splitlines() if line.split()[:1] == [domain]]
        assert f"{100 * accuracy:.1f} (" in row
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evaluation.html", "evaluation.json"]


def test_evaluate_as_json_is_the_file(fedcir: Command, run: Path) -> None:
    output = fedcir("evaluate", run, "--json", "--adapt", "--device", "cpu")
    assert json.loads(output.out) == json.loads((run / "evaluation" / "evaluation.json").read_text(encoding="utf-8"))
    assert json.loads(output.out)["accuracy_mean_before"] is not None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("evaluate UNFINISHED", "holds no finished run"),
        ("evaluate RUN --split half", "split cannot be 'half'"),
        ("evaluate RUN --data-root nowhere", "nowhere"),
        ("export RUN --out nowhere/model.onnx", "there is no folder nowhere"),
        ("export RUN --out model.xyz --format xyz", "no format 'xyz'"),
        ("export RUN", "--out is missing"),
        ("export UNFINISHED --out model.onnx", "holds no finished run"),
    ],
)
def test_evaluate_and_export_refuse_in_one_line(
    fedcir: Command,
    run: Path,
    unfinished: Path,
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    output = fedcir(*({"RUN": run, "UNFINISHED": unfinished}.get(word, word) for word in command.split()))
    assert output.code == 2
    (line,) = output.err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []
    assert not (unfinished / "evaluation").exists()


def test_export_says_what_it_checked_and_wrote(fedcir: Command, run: Path, tmp_path: Path) -> None:
    output = fedcir("export", run, "--format", "safetensors", "-o", tmp_path / "model.safetensors")
    assert output.code == 0
    first, second = output.out.splitlines()
    assert "test examples of the run: predictions differ by at most" in first
    assert second == f"wrote {tmp_path}/model.safetensors and {tmp_path}/MODEL_CARD.md"
