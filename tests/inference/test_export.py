"""A run's model as a file for other programs."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedcir
from fedcir import InputError, RunError
from fedcir.config import Config
from fedcir.data.federation import partition_dataset
from fedcir.inference import exporting
from fedcir.inference.exporting import export
from fedcir.inference.model import open_model
from fedcir.inference.model_card import CARD
from fedcir.models.classifier import Classifier
from fedcir.runs.evaluation_data import open_run_data
from fedcir.runs.reader import Run

Settings = Callable[..., Config]


@pytest.fixture(scope="module")
def onnx_file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    return export(run, tmp_path_factory.mktemp("onnx") / "model.onnx").path


def probabilities(file: Path, images: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], {"images": images})[0]


@pytest.mark.parametrize("batch", [1, 7])
def test_onnx_agrees_on_every_test_image(onnx_file: Path, run: Path, settings: Settings, batch: int) -> None:
    test = partition_dataset(settings())[0]["day"].test
    images = test.pixels(np.arange(len(test)))
    expected = open_model(run, device="cpu").predict(images)[0].numpy()
    for start in range(0, len(images), batch):
        result = probabilities(onnx_file, images[start : start + batch])
        assert np.abs(result - expected[start : start + batch]).max() < 1e-4


def test_onnx_tells_what_a_program_must_know(onnx_file: Path, run: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx_file, providers=["CPUExecutionProvider"])
    (given,), (gives,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [8, 8, 3])
    assert isinstance(given.shape[0], str)  # any number
    assert (gives.name, gives.shape[1]) == ("probabilities", 3)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["high", "low", "middle"]
    assert about["image_size"] == "8"
    assert json.loads(about["mean"]) == fedcir.load_run(run).card["mean"]
    assert about["algorithm"] == "fedavg"
    assert float(about["temperature"]) == open_model(run).calibration.temperature


def test_a_torch_program_agrees_and_takes_any_number_of_images(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "model.pt2")
    about = {"fedcir.json": ""}
    model = torch.export.load(io.BytesIO((tmp_path / "model.pt2").read_bytes()), extra_files=about).module()
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    assert np.allclose(model(torch.from_numpy(images)), open_model(run).predict(images)[0], atol=1e-5)
    assert json.loads(json.loads(about["fedcir.json"])["classes"]) == ["high", "low", "middle"]


def test_safetensors_holds_the_weights_and_the_card(run: Path, tmp_path: Path) -> None:
    made = export(run, tmp_path / "model.safetensors", format="safetensors")
    assert made.real
    assert made.difference < 1e-6
    with safe_open(made.path, framework="pt") as file:
        about = json.loads(file.metadata()["fedcir"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["classes"] == ["high", "low", "middle"]
    assert about["temperature"] == open_model(run).calibration.temperature
    own = fedcir.load_run(run).weights()
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], own[name]) for name in own)


def test_a_sites_own_model_is_exported_by_name(apart: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose one as site"):
        export(apart, tmp_path / "model.safetensors", format="safetensors")
    export(apart, tmp_path / "model.safetensors", format="safetensors", site="night")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        bias = file.get_tensor("encoder.norms.0.bias")
    assert torch.equal(bias, fedcir.load_run(apart).model(domain="night").state_dict()["encoder.norms.0.bias"])


def test_without_the_runs_data_random_images_are_checked_on(run: Path, pictures: Path, tmp_path: Path) -> None:
    away = pictures.with_name("away")
    pictures.rename(away)
    try:
        assert not export(run, tmp_path / "a.safetensors", format="safetensors").real
        with pytest.raises(InputError, match="nowhere"):
            export(run, tmp_path / "b.safetensors", format="safetensors", data_root="nowhere")
        assert not (tmp_path / "b.safetensors").exists()
        assert export(run, tmp_path / "c.safetensors", format="safetensors", data_root=away).real
    finally:
        away.rename(pictures)


def test_a_disagreement_is_an_error_and_nothing_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = exporting.ExportedModule.forward
    monkeypatch.setattr(exporting.ExportedModule, "forward", lambda self, images: forward(self, images) * 0.999)
    with pytest.raises(RunError, match="nothing was written: the exported model's predictions differ"):
        export(run, tmp_path / "model.pt2", format="torch")
    assert list(tmp_path.iterdir()) == []


def test_the_card_says_what_a_stranger_must_know(run: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    text = export(run, tmp_path / "model.safetensors", format="safetensors").card.read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "unknown"
    assert front["library_name"] == "fedcir"
    assert front["pipeline_tag"] == "image-classification"
    final = fedcir.load_run(run).final
    results = front["model-index"][0]["results"]
    assert {result["task"]["type"] for result in results} == {"image-classification"}
    values = [result["metrics"][0]["value"] for result in results]
    assert values == pytest.approx([final["accuracy_mean"], *final["accuracy"].values()], abs=1e-4)
    for section in ("Training data", "Method", "Accuracy", "Calibration", "Limits", "How to use it"):
        assert f"## {section}\n" in text
    assert "fitted on" in text
    assert str(run.parent) not in text


def test_a_card_that_is_there_already_is_kept(plain: Path, tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("license: mit")
    made = export(plain, tmp_path / "model.safetensors", format="safetensors")
    assert not made.new_card
    assert (tmp_path / CARD).read_text() == "license: mit"


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("model.onnx", {"format": "onx"}, "no format 'onx'; did you mean 'onnx'"),
        (".", {}, "is a folder: name a file"),
        ("model.bin", {}, "does not say which format to write: name it model.onnx"),
        ("model.pt2", {"format": "onnx"}, "a file of format torch, and the format asked for is onnx"),
        ("nowhere/model.onnx", {}, "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_named_before_the_work(
    run: Path, tmp_path: Path, out: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export(run, tmp_path / out, **options)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group", "invariant", "standardised"])
@pytest.mark.parametrize(("model", "size"), [("cnn", 18), ("resnet18", 32)])
def test_onnx_agrees_for_every_network_and_norm(
    settings: Settings, train: Callable[..., Path], tmp_path: Path, model: str, size: int, norm: str
) -> None:
    options = [f"model.name={model}", f"model.norm={norm}", f"data.image_size={size}", "server.rounds=1"]
    made = export(train(settings("fedcir", *options), tmp_path / "run"), tmp_path / "model.onnx")
    assert made.real
    assert made.difference < 1e-4


def test_the_parts_of_a_network_are_where_the_score_looks(run: Path) -> None:
    assert isinstance(open_model(run).network, Classifier)


@pytest.mark.parametrize("ending", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_file_of_fedproto_predicts_by_the_prototypes(
    method_run: Callable[[str], Run], tmp_path: Path, ending: str
) -> None:
    if ending == "onnx":
        pytest.importorskip("onnxscript")
    run = method_run("fedproto")
    made = export(run, tmp_path / f"model.{ending}", site="two")
    assert made.note == ""
    text = made.card.read_text(encoding="utf-8")
    assert f"| two | {100 * run.final['accuracy']['two']:.1f} |" in text
    assert "measured with this file" in text  # the other domain was tested with another model in the run


@pytest.mark.parametrize(("name", "ending"), [("fedproto", "safetensors"), ("fedcir-sampling", "pt2")])
def test_a_file_that_cannot_carry_the_methods_prediction_is_measured_and_says_so(
    method_run: Callable[[str], Run], tmp_path: Path, name: str, ending: str
) -> None:
    run = method_run(name)
    site = "two" if name == "fedproto" else None
    made = export(run, tmp_path / f"model.{ending}", site=site)
    assert "predicts in a way of its own" in made.note
    network, domains = run.model(domain=site), open_run_data(run)[1]
    text = made.card.read_text(encoding="utf-8")
    for domain in domains:
        inputs = open_model(run, site=site, device="cpu").inputs(domain.test.pixels(np.arange(len(domain.test))))
        with torch.inference_mode():
            hits = (network(inputs).argmax(-1).numpy() == domain.test.labels).mean()
        assert f"| {domain.name} | {100 * hits:.1f} |" in text
    assert "measured with this file" in text
    assert "The run's own scores do not hold for it" in text
    assert "Probabilities are not calibrated: the run's temperature is that of its own predictions" in text


def test_without_data_the_card_of_such_a_file_gives_no_accuracy(
    method_run: Callable[[str], Run], tmp_path: Path
) -> None:
    run = method_run("fedproto")
    gone = replace(run, config=replace(run.config, data=replace(run.config.data, root=str(tmp_path / "gone"))))
    made = export(gone, tmp_path / "model.safetensors", site="two")
    assert "Its accuracy was not measured" in made.card.read_text(encoding="utf-8")
