"""data.channels: images of one channel, from the file to the report."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.cache import cache_entries
from fedcir.data.decoding import GREY, RGB, Decoding, read_image
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError
from fedcir.runs.reader import load_run

Fedcir = Callable[..., Any]


def encoded(picture: Image.Image, kind: str = "png") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_grey_image_has_the_same_values_as_in_three_channels(kind: str) -> None:
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8))
    one, three = (np.asarray(read_image(encoded(stored, kind), Decoding(8, channels))[0]) for channels in (GREY, RGB))
    assert one.shape == (8, 8)
    assert np.array_equal(np.stack([one] * 3, axis=-1), three)


def test_colours_become_their_brightness() -> None:
    """0.299 R + 0.587 G + 0.114 B, as in ITU-R 601."""
    for kind in ("png", "jpeg"):
        picture, _ = read_image(encoded(Image.new("RGB", (16, 16), (200, 100, 50)), kind), Decoding(4, GREY))
        assert np.abs(np.asarray(picture).astype(float) - (0.299 * 200 + 0.587 * 100 + 0.114 * 50)).max() <= 1.5


def test_sixteen_bits_and_transparency_become_grey_too() -> None:
    deep = Image.fromarray(np.full((4, 4), 257 * 90, np.uint16))
    assert np.asarray(read_image(encoded(deep), Decoding(2, GREY))[0]).tolist() == [[90, 90], [90, 90]]
    glass = Image.new("LA", (4, 4), (0, 0))
    assert np.asarray(read_image(encoded(glass), Decoding(2, GREY))[0]).tolist() == [[255, 255], [255, 255]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites, in which the upper or the lower half of an image is brighter."""
    root, rng = tmp_path_factory.mktemp("grey"), np.random.default_rng(0)
    for site in "ab":
        for label, half in (("ill", slice(0, 4)), ("well", slice(4, 8))):
            (root / site / label).mkdir(parents=True)
            for number in range(24):
                image = rng.integers(0, 90 if site == "a" else 130, (8, 8)).astype(np.uint8)
                image[half] += 120
                Image.fromarray(image).save(root / site / label / f"{number:02}.png")
    return root


def test_grey_and_rgb_are_two_entries_of_the_cache(root: Path, fedcir: Fedcir) -> None:
    one = open_dataset(DataConfig("folders", str(root), image_size=8, channels=1), seed=0)
    three = open_dataset(DataConfig("folders", str(root), image_size=8), seed=0)
    assert (one.image_shape, three.image_shape) == ((8, 8, 1), (8, 8, 3))
    assert np.array_equal(np.repeat(one["a"].train.images, 3, axis=-1), three["a"].train.images)
    assert one["a"].train.ids == three["a"].train.ids
    assert {entry.channels for entry in cache_entries() if entry.root == str(root)} == {1, 3}
    assert "8x8 grey" in fedcir("data", "cache").out


def test_a_run_of_two_classes_stays_grey_and_its_report_tells_more_than_accuracy(
    root: Path, tmp_path: Path, fedcir: Fedcir
) -> None:
    text = "--dataset folders --image-size 8 --rounds 2 --local-steps 2 --batch-size 8 --device cpu"
    text += " --algorithm fedcir --set data.channels=1 --set model.width=2 --set algorithm.hidden=8"
    text += " --set local.augment=colour,crop"
    output = fedcir("run", *text.split(), "--data-root", root, "-o", tmp_path / "run")
    assert output.code == 0, output.err
    with torch.inference_mode():
        assert load_run(tmp_path / "run").model()(torch.zeros(2, 1, 8, 8)).shape == (2, 2)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "well counts as positive" in page
    for name in ("AUC", "F1", "sensitivity", "specificity"):
        assert f">{name}<" in page
    sheet = tmp_path / "sheet.png"
    given = ["--data-root", root, "--image-size", 8, "--set", "data.channels=1", "-o", sheet]
    assert "2 classes, 8x8 pixels, grey" in fedcir("data", "show", "folders", *given).out


def test_channels_that_cannot_be_are_refused(data_root: Path) -> None:
    with pytest.raises(InputError, match=r"data\.channels must be 1 for grey or 3 for RGB, got 2"):
        DataConfig(channels=2)
    with pytest.raises(InputError, match=r"data\.channels is 1, but the arrays of arrays have 3"):
        open_dataset(DataConfig("arrays", str(data_root), channels=1), seed=0)
