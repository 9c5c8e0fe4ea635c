"""A run's model on pictures from anywhere."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import fedcir
from fedcir import InputError, Predictor
from fedcir.config import Config
from fedcir.data.federation import partition_dataset
from fedcir.inference.model import open_model
from fedcir.inference.predictor import files_in
from fedcir.runtime.run_folder import RunFolder

Settings = Callable[..., Config]


@pytest.fixture(scope="module")
def predictor(run: Path) -> Predictor:
    return Predictor(run, device="cpu", batch_size=5)


def test_a_file_is_seen_as_the_dataset_saw_it(run: Path, pictures: Path, settings: Settings) -> None:
    test = partition_dataset(settings())[0]["night"].test
    names = [str(pictures / name) for name in test.ids]
    trained = open_model(run, device="cpu")
    expected, novelty = trained.predict(test.pixels(np.arange(len(test))))
    results = list(Predictor(run, device="cpu", top=1).files(names))
    assert [path for path, _ in results] == names
    for (_, item), row, share in zip(results, expected, novelty, strict=True):
        assert isinstance(item, fedcir.Prediction)
        assert item.label == trained.classes[int(row.argmax())]
        assert item.probability == pytest.approx(float(row.max()), rel=1e-5)
        assert item.novelty == pytest.approx(float(share), rel=1e-4)
        assert item.top == ((item.label, item.probability),)


def test_the_last_rounds_accuracy_comes_out_again(run: Path, pictures: Path, settings: Settings) -> None:
    predictor = Predictor(run, device="cpu")
    for domain in partition_dataset(settings())[0]:
        message = predictor([pictures / name for name in domain.test.ids])
        right = [item.label == name.split("/")[1] for item, name in zip(message, domain.test.ids, strict=True)]
        assert np.mean(right) == pytest.approx(fedcir.load_run(run).final["accuracy"][domain.name])


def test_paths_images_arrays_and_batches_are_one(predictor: Predictor, pictures: Path) -> None:
    paths = sorted((pictures / "day" / "low").iterdir())[:7]
    first = predictor(paths)
    arrays = [np.asarray(Image.open(path)) for path in paths]
    assert predictor([Image.open(path) for path in paths]) == first
    assert predictor(arrays) == first
    assert predictor(np.stack(arrays)) == first
    assert predictor(paths[0]) == predictor(arrays[0])
    assert predictor(paths[0])[0].label == first[0].label
    assert [len(item.top) for item in first] == [3] * 7
    assert sum(share for _, share in first[0].top) == pytest.approx(1)


def test_a_large_jpeg_turned_by_its_camera_is_seen_alike_from_file_and_opened(
    predictor: Predictor, tmp_path: Path
) -> None:
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[:100] = 200
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=exif)
    Image.fromarray(pixels[::-1, ::-1].copy()).save(tmp_path / "upright.png")
    with Image.open(tmp_path / "turned.jpg") as opened:
        assert predictor(opened) == predictor(tmp_path / "turned.jpg")
    turned, upright = predictor([tmp_path / "turned.jpg", tmp_path / "upright.png"])
    assert turned.label == upright.label
    assert turned.probability == pytest.approx(upright.probability, abs=0.05)


def test_files_that_cannot_be_read_do_not_keep_others_from_it(
    predictor: Predictor, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image")
    good = str(pictures / "day" / "low" / "0.png")
    paths = [good, str(tmp_path / "empty.png"), *[good] * 6, str(tmp_path / "text.png"), str(tmp_path / "no.png"), good]
    results = list(predictor.files(paths))
    assert [path for path, _ in results] == paths
    wrong = [answer for _, answer in results if isinstance(answer, str)]
    assert wrong == ["it is empty", "it is not an image of a known format", "there is no such file"]
    assert {answer.label for _, answer in results if not isinstance(answer, str)} == {predictor(good)[0].label}


def test_probabilities_are_those_of_the_temperature(run: Path, pictures: Path) -> None:
    trained = open_model(run, device="cpu")
    assert trained.calibrated
    assert trained.calibration == RunFolder(run).calibration()
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    with torch.inference_mode():
        logits = trained.network(trained.inputs(pixels)).double()
    expected = (logits / trained.calibration.temperature).softmax(-1)
    assert np.allclose(trained.predict(pixels)[0], expected, rtol=1e-6)


def test_without_images_set_aside_probabilities_are_the_networks_own(plain: Path) -> None:
    predictor = Predictor(plain, device="cpu")
    assert not predictor.calibrated
    assert predictor.trained.calibration.temperature == 1.0


def test_a_model_of_grey_images_takes_colours(
    write_domain: Callable[..., Path], train: Callable[..., Path], tiny: Settings, tmp_path: Path
) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    for name in ("ink", "pen"):
        (tmp_path / "data").mkdir(exist_ok=True)
        labels = np.arange(12) % 3
        np.savez(tmp_path / "data" / name, x_train=grey, y_train=labels, x_test=255 - grey, y_test=labels)
    out = train(tiny("fedavg", f"data.root={tmp_path / 'data'}", "server.rounds=1"), tmp_path / "run")
    coloured = np.repeat(grey[0][..., None], 3, axis=-1)
    predictor = Predictor(out, device="cpu")
    assert predictor(coloured)[0].probability == pytest.approx(predictor(grey[0])[0].probability, abs=1e-3)


def test_where_clients_have_parts_of_their_own_a_site_is_asked_for(apart: Path, pictures: Path) -> None:
    with pytest.raises(InputError, match=r"with fedbn .* choose one as site, from day, night"):
        Predictor(apart)
    with pytest.raises(InputError, match="no domain 'dusk'"):
        Predictor(apart, site="dusk")
    path = pictures / "day" / "low" / "0.png"
    day, night = (Predictor(apart, site=site, device="cpu")(path)[0].probability for site in ("day", "night"))
    assert day != night


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), r"uint8 of \(H, W, 3\) or \(H, W\), got float32\[8, 8, 3\]"),
        (np.zeros((8, 8, 5), np.uint8), r"got uint8\[8, 8, 5\]"),
        ([3], "a PIL image, an array or a path, got int"),
        ("nowhere.png", "cannot read nowhere.png: there is no such file"),
    ],
)
def test_what_is_no_picture_is_named(predictor: Predictor, given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        predictor(given)


def test_runs_that_have_no_model_are_refused(unfinished: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished run: resume it to finish it"):
        Predictor(unfinished)
    with pytest.raises(InputError, match="is not a run"):
        Predictor(tmp_path)
    for file in run.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"cannot read .*model.safetensors: No such file"):
        Predictor(tmp_path)


def test_a_run_of_ones_own_datasets_says_what_to_use(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    options = {"num_classes": 2, "algorithm": "fedavg", "rounds": 1, "local_steps": 1, "batch_size": 4}
    fedcir.train([(data, data)], encoder=nn.Identity(), out=tmp_path / "run", **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"trained by fedcir.train .*model\(encoder=...\)"):
        Predictor(tmp_path / "run")


def test_folders_are_searched_to_the_bottom_and_in_order(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in ("b/c/2.PNG", "b/1.jpg", "a.tif", "notes.txt", ".hidden/3.png", ".4.png"):
        (tmp_path / name).touch()
    results = [str(Path(path).relative_to(tmp_path)) for path in files_in([tmp_path])]
    assert results == ["a.tif", "b/1.jpg", "b/c/2.PNG"]
    assert files_in([tmp_path / "notes.txt"]) == [str(tmp_path / "notes.txt")]
    with pytest.raises(InputError, match="there is no file or folder"):
        files_in([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no images"):
        files_in([_empty(tmp_path)])


def _empty(place: Path) -> Path:
    (place / "empty").mkdir()
    return place / "empty"


def test_a_run_of_an_algorithm_of_ones_own_needs_its_file(
    settings: Settings, train: Callable[..., Path], pictures: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import fedcir\n\n\nclass Mine(fedcir.FedAvg):\n    '''Nobody.'''\n", encoding="utf-8")
    out = train(settings(str(mine), "server.rounds=1"), tmp_path / "run")
    with pytest.raises(InputError, match=r"was trained by .*mine.py, which is not part of fedcir: pass it"):
        Predictor(out)
    (message,) = Predictor(out, algorithm=mine, device="cpu")(pictures / "day" / "low" / "0.png")
    assert message.label in ("high", "low", "middle")
