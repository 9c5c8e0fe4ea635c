"""`masks`: images with the class of each pixel, and what is wrong with them in one line."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedcir import Segmentation
from fedcir.config import Config, DataConfig, LocalConfig, ModelConfig
from fedcir.data.federation import open_federation
from fedcir.data.opening import open_dataset, open_site
from fedcir.errors import InputError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sites of ten images, each with a square whose place its mask has."""
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        for kind in ("images", "masks"):
            (tmp_path / "data" / site / kind).mkdir(parents=True)
        for number in range(10):
            x, y = rng.integers(0, 8, 2)
            mask = np.zeros((16, 16), np.uint8)
            mask[y : y + 8, x : x + 8] = 1 + number % 2
            image = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8) + 90 * mask[..., None]
            Image.fromarray(image).save(tmp_path / "data" / site / "images" / f"{number}.png")
            Image.fromarray(mask).save(tmp_path / "data" / site / "masks" / f"{number}.png")
    return tmp_path / "data"


def make_data(root: Path, **settings: object) -> DataConfig:
    return DataConfig("masks", str(root), **{"image_size": 16, **settings})  # type: ignore[arg-type]


def read_mask(root: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(root / name.replace("/images/", "/masks/")))


def test_images_come_with_their_masks(root: Path) -> None:
    domains = open_dataset(make_data(root), 0)
    assert domains.task == Segmentation(("0", "1", "2"))
    assert [len(domain.train) for domain in domains] == [8, 8]
    split = domains["b"].test
    for name, mask in zip(split.ids, split.select_targets(np.arange(2)), strict=True):
        assert np.array_equal(mask, read_mask(root, name))


def test_masks_are_resized_to_the_nearest_class(root: Path) -> None:
    split = open_dataset(make_data(root, image_size=8), 0)["a"].train
    for name, mask in zip(split.ids, split.select_targets(np.arange(8)), strict=True):
        assert np.array_equal(mask, read_mask(root, name)[1::2, 1::2])


def test_batches_hold_class_numbers(root: Path) -> None:
    client = open_federation(Config(make_data(root), model=ModelConfig("unet", width=4))).clients[0]
    assert client.train is not None
    x, y = client.train.batch(np.arange(3), torch.device("cpu"), torch.channels_last)
    assert (x.shape, y.shape, y.dtype) == ((3, 3, 16, 16), (3, 16, 16), torch.int64)


def test_folders_train_and_test_are_the_split(root: Path) -> None:
    for part, numbers in (("train", range(7)), ("test", range(7, 10))):
        for kind in ("images", "masks"):
            (root / "a" / part / kind).mkdir(parents=True)
            for number in numbers:
                (root / "a" / kind / f"{number}.png").rename(root / "a" / part / kind / f"{number}.png")
    for kind in ("images", "masks"):
        (root / "a" / kind).rmdir()
    domains = open_dataset(make_data(root), 0)
    assert domains["a"].test.ids == [f"a/test/images/{number}.png" for number in range(7, 10)]


def test_a_site_opens_its_own_images_like_a_domain(root: Path) -> None:
    (alone,) = open_site(root / "b", "b", make_data(root), 0)
    other = open_dataset(make_data(root), 0)["b"]
    assert alone.train.ids == other.train.ids
    assert np.array_equal(alone.test.select_targets(np.arange(2)), other.test.select_targets(np.arange(2)))


def test_another_mask_is_another_dataset(root: Path) -> None:
    before = open_dataset(make_data(root), 0).content
    mask = np.array(read_mask(root, "a/images/0.png"))
    mask[0, 0] ^= 1
    Image.fromarray(mask).save(root / "a" / "masks" / "0.png")
    assert open_dataset(make_data(root), 0).content != before


def test_classes_can_have_names(root: Path) -> None:
    names = ("background", "even", "odd")
    assert open_dataset(make_data(root, classes=names), 0).task == Segmentation(names)
    with pytest.raises(InputError, match=r"masks/1\.png holds the class 2, but data.classes names 2"):
        open_dataset(make_data(root, classes=("background", "even")), 0)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, r"a/images/3\.png has no mask: add a/masks/3\.png, or remove the image"),
        (np.zeros((8, 16), np.uint8), r"a/masks/3\.png has 16x8 pixels, but its image 16x16: make them equal"),
        (np.full((16, 16), 255, np.uint8), r"a/masks/3\.png: no mask has a pixel of class 3, but one has class 255"),
        (np.full((16, 16), 300, np.uint16), r"a/masks/3\.png is not a readable image: it holds the class 300"),
        (np.zeros((16, 16, 3), np.uint8), r"it has the mode RGB, but a mask is one number a pixel"),
    ],
)
def test_a_faulty_mask_is_named(root: Path, mask: np.ndarray | None, message: str) -> None:
    path = root / "a" / "masks" / "3.png"
    path.unlink()
    if mask is not None:
        Image.fromarray(mask).save(path)
    with pytest.raises(InputError, match=message):
        open_dataset(make_data(root), 0)


def test_folders_of_classes_are_no_masks(root: Path) -> None:
    for site in "ab":
        (root / site / "images").rename(root / site / "cats")
    with pytest.raises(InputError, match=r"holds no images with masks: put them into DIR/<domain>/images/"):
        open_dataset(make_data(root), 0)


def test_changes_that_move_pixels_are_refused(root: Path) -> None:
    config = Config(make_data(root), model=ModelConfig("unet"), local=LocalConfig(augment=("flip", "colour")))
    with pytest.raises(InputError, match=r"local.augment=flip would move pixels away from their masks"):
        open_federation(config)


def test_masks_are_no_classes_of_images(root: Path) -> None:
    with pytest.raises(InputError, match=r"task.name=multilabel does not fit masks: its task is segmentation"):
        open_dataset(make_data(root), 0, task="multilabel")
