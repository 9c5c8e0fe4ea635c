from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcir.config import DataConfig
from fedcir.data.domains import Domains
from fedcir.data.opening import open_dataset
from fedcir.data.sources.arrays import Arrays
from fedcir.errors import InputError


def images(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def good(**other: Any) -> dict[str, Any]:
    """A domain of 20 training images and 4 test images in two classes, with other arrays in the place of some."""
    return {
        "x_train": images(20, 6, 5, 3),
        "y_train": np.arange(20) % 2,
        "x_test": 255 - images(4, 6, 5, 3),
        "y_test": np.array([0, 1, 0, 1]),
        **other,
    }


def test_files_become_domains_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("sketch", "art", "photo"):
        np.savez(tmp_path / f"{name}.npz", **good())
    domains = Arrays().load_arrays(tmp_path)
    assert domains.names == ("art", "photo", "sketch")
    assert domains.classes == ("0", "1")
    assert domains.image_shape == (6, 5, 3)
    assert np.array_equal(domains["photo"].train.images, good()["x_train"])
    assert domains["photo"].test.labels.tolist() == [0, 1, 0, 1]
    assert list(domains["photo"].test.ids) == [f"photo/test/00000{i}" for i in range(4)]


def test_grey_images_get_their_channel(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **good(x_train=images(20, 6, 5), x_test=images(4, 6, 5)))
    assert Arrays().load_arrays(tmp_path).image_shape == (6, 5, 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_of_any_whole_type_are_taken(dtype: type, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **good(y_train=(np.arange(20) % 2).astype(dtype)))
    assert Arrays().load_arrays(tmp_path)["a"].train.labels.dtype == np.int64


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{tmp_path} holds no <domain>\.npz file"):
        Arrays().load_arrays(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((20, 6, 5, 3), np.int32)}, r"x_train must be uint8 .* got int32\[20, 6, 5, 3\]"),
        ({"x_train": np.zeros((20, 6, 5, 3))}, r"holds other numbers than art.npz, uint8: images or floats in all"),
        (
            {"x_train": np.full((20, 2), np.nan), "x_test": np.zeros((4, 2))},
            "x_train holds numbers that are not finite",
        ),
        ({"x_test": images(4)}, r"x_test must be uint8 of .*, or floats of any shape \(N, ...\), got uint8\[4\]"),
        ({"y_train": np.zeros(19, int)}, r"y_train must be 20 classes .* or masks .*, got int64\[19\]"),
        ({"y_train": np.zeros(20)}, "holds another kind of y than art.npz"),
        ({"y_train": np.zeros((20, 2, 2), int)}, r"y_train must be 20 classes .*, got int64\[20, 2, 2\]"),
        ({"y_test": np.array([0, 1, -1, 0])}, "y_test holds the label -1: number labels from 0"),
        ({"x_test": images(0, 6, 5, 3), "y_test": np.zeros(0, int)}, "x_test holds no image"),
        ({"y_test": np.array([0, 1, None, "x"], object)}, "is not a readable .npz file"),
    ],
)
def test_a_wrong_array_is_named_with_its_file(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "art.npz", **good())
    np.savez(tmp_path / "photo.npz", **good(**change))
    with pytest.raises(InputError, match=rf"photo\.npz:? {message}"):
        Arrays().load_arrays(tmp_path)


def test_a_missing_array_is_named_beside_those_there_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=images(2, 4, 4), labels=np.array([0, 1]))
    with pytest.raises(InputError, match=r"a\.npz has no array 'y_train'; it has labels, x_train"):
        Arrays().load_arrays(tmp_path)


def test_images_of_several_shapes_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **good())
    np.savez(tmp_path / "b.npz", **good(x_train=images(20, 8, 8, 3), x_test=images(4, 8, 8, 3)))
    with pytest.raises(InputError, match=r"b\.npz holds images of the shape \[8, 8, 3\], but a\.npz of \[6, 5, 3\]"):
        Arrays().load_arrays(tmp_path)


def truncated(path: Path) -> None:
    np.savez(path, **good())
    path.write_bytes(path.read_bytes()[:500])


def damaged(path: Path) -> None:
    np.savez_compressed(path, **good())
    content = bytearray(path.read_bytes())
    content[60:75] = b"\xff" * 15
    path.write_bytes(content)


def single_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("not an archive"),
        truncated,
        lambda path: path.write_bytes(b""),
        single_array,
        damaged,
    ],
    ids=["text", "truncated", "empty", "npy", "damaged"],
)
def test_a_file_that_does_not_read_is_named(write: Callable[[Path], object], tmp_path: Path) -> None:
    write(tmp_path / "photo.npz")
    with pytest.raises(InputError, match=r"photo\.npz is not a readable \.npz file"):
        Arrays().load_arrays(tmp_path)


def capped(root: Path, cap: int, seed: int = 0) -> Domains:
    return open_dataset(DataConfig("arrays", str(root), train_per_domain=cap), seed)


@pytest.fixture
def unbalanced(tmp_path: Path) -> Path:
    """60, 30 and 10 training images of three classes."""
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [60, 30, 10]))
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", **good(x_train=images(100, 6, 5, 3), y_train=labels))
    return tmp_path


@pytest.mark.parametrize(("cap", "counts"), [(10, [6, 3, 1]), (50, [30, 15, 5]), (11, [7, 3, 1]), (500, [60, 30, 10])])
def test_a_cap_keeps_the_shares_of_the_classes(cap: int, counts: list[int], unbalanced: Path) -> None:
    domains = capped(unbalanced, cap)
    for domain in domains:
        assert np.bincount(domain.train.labels).tolist() == counts
        assert len(domain.test) == 4  # the test set is never capped


def test_a_cap_keeps_each_image_with_its_label_and_name(unbalanced: Path) -> None:
    whole, part = Arrays().load_arrays(unbalanced)["a"].train, capped(unbalanced, 10)["a"].train
    rows = [list(whole.ids).index(name) for name in part.ids]
    assert np.array_equal(part.pixels(np.arange(10)), whole.images[rows])
    assert np.array_equal(part.labels, whole.labels[rows])
    assert len(set(rows)) == 10


def test_a_cap_is_drawn_by_the_seed_and_by_the_domain(unbalanced: Path) -> None:
    def rows(seed: int, domain: str) -> list[str]:
        return [name.split("/")[-1] for name in capped(unbalanced, 10, seed)[domain].train.ids]

    assert rows(0, "a") == rows(0, "a")
    assert rows(0, "a") != rows(1, "a")
    assert rows(0, "a") != rows(0, "b")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig("minidigit"), "no dataset 'minidigit'; did you mean 'minidigits'"),
        (DataConfig("imagenet"), "no dataset 'imagenet'; choose from arrays, camelyon17"),
        (DataConfig("arrays"), "dataset 'arrays' needs data.root"),
        (DataConfig("arrays", "/no/where"), "data.root: there is no folder /no/where"),
    ],
)
def test_a_dataset_that_is_not_there_is_said(data: DataConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_dataset(data, seed=0)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"y_test": np.array([0, 1, 0, 2])}, "class '2' has no training image in any domain"),
        ({"y_train": np.arange(20) % 2 * 2}, None),  # class 1 is in the other domain
        ({"y_train": np.ones(20, int)}, "domain 'b' holds only the class '1'"),
    ],
)
def test_classes_must_be_there_to_learn(second: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **good())
    np.savez(tmp_path / "b.npz", **good(**second))
    data = DataConfig("arrays", str(tmp_path))
    if message is None:
        assert len(open_dataset(data, 0).classes) == 3
    else:
        with pytest.raises(InputError, match=message):
            open_dataset(data, seed=0)


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **good(y_train=np.zeros(20, int), y_test=np.zeros(4, int)))
    with pytest.raises(InputError, match="only one class, '0': a classifier needs two"):
        open_dataset(DataConfig("arrays", str(tmp_path)), seed=0)
