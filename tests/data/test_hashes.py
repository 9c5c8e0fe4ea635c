"""Copies of one image, found by content: in no dataset is a test image also a training image."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import DataConfig, config_from_tables
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.federation import open_federation, partition_dataset
from fedcir.data.opening import open_dataset
from fedcir.data.partition import ClientPartition
from fedcir.data.splits import drop_copies, hash_arrays, hash_images_in_use, hash_samples
from fedcir.errors import InputError


def split(values: list[int], name: str = "") -> Split:
    """Images of one value each."""
    images = np.array(values, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 1), dtype=np.uint8)
    return Split(images, np.arange(len(values)) % 2, [f"{name}{number}" for number in range(len(values))])


def values_of(part: Split | None) -> list[int]:
    assert part is not None
    return part.pixels(np.arange(len(part)))[:, 0, 0, 0].tolist()


def test_a_hash_of_pixels_is_the_first_of_blake2b_and_follows_the_rows() -> None:
    part = hash_arrays(Domains("d", ("0", "1"), (Domain("a", split([5, 6, 5]), split([9])),)))["a"].train
    five, six = (int.from_bytes(hashlib.blake2b(bytes([n] * 4), digest_size=8).digest(), "little") for n in (5, 6))
    assert hash_samples(part, "pixels").tolist() == [five, six, five]  # type: ignore[union-attr]
    assert hash_samples(part.take([1]), "pixels").tolist() == [six]  # type: ignore[union-attr]
    assert hash_samples(split([6]), "pixels").tolist() == [six]  # type: ignore[union-attr]
    assert hash_samples(part, "file") is None


def test_test_images_that_are_training_images_of_any_domain_are_left_out() -> None:
    first = Domain("a", split([1, 2]), split([3, 1, 4]))  # 1 is its own training image, 4 is that of the other
    second = Domain("b", split([4, 4]), split([5, 2, 6]))
    dropped = drop_copies(hash_arrays(Domains("d", ("0", "1"), (first, second))), "test")
    assert values_of(dropped["a"].test) == [3]
    assert values_of(dropped["b"].test) == [5, 6]
    assert values_of(dropped["b"].train) == [4, 4]  # copies within the training images stay
    assert dropped.notes == ("3 test images are also training images and are left out of the test set",)


def test_a_domain_whose_test_images_are_all_training_images_is_refused() -> None:
    domains = Domains("d", ("0", "1"), (Domain("a", split([1, 2]), split([2, 1])),))
    with pytest.raises(InputError, match="every test image of domain 'a' is also a training image: add others"):
        drop_copies(hash_arrays(domains), "test")


def test_only_images_that_clients_hold_count_as_trained_on() -> None:
    domains = hash_arrays(Domains("d", ("0", "1"), (Domain("a", split([1, 2, 3]), split([4]), split([5])),)))
    hashes = hash_images_in_use(domains, [ClientPartition("a", {"a": np.array([2, 0])})])
    trained, chosen = hashes.find(split([1, 2, 3, 4, 5]))  # type: ignore[misc]
    assert trained.tolist() == [True, False, True, False, False]
    assert chosen.tolist() == [False, False, False, False, True]


def write_arrays(root: Path) -> Path:
    """Two domains of ten images of two classes; of four test images each, one is also a training image."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (28, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(10) % 2
    root.mkdir()
    np.savez(root / "a.npz", x_train=images[:10], y_train=labels, x_test=images[20:24], y_test=labels[:4])
    test = np.concatenate([images[24:27], images[3:4]])  # under another domain's name, with another label
    np.savez(root / "b.npz", x_train=images[10:20], y_train=labels, x_test=test, y_test=labels[:4])
    return root


def test_a_run_on_arrays_does_not_test_on_its_training_images(tmp_path: Path) -> None:
    data = {"name": "arrays", "root": str(write_arrays(tmp_path / "data"))}
    federation = open_federation(config_from_tables({"data": data, "model": {"width": 2}, "run": {"device": "cpu"}}))
    assert [len(client.test or ()) for client in federation.clients] == [4, 3]
    assert "1 test image is also a training image and is left out of the test set" in federation.notes
    assert list(federation.manifest["test"]["b"]) == ["b/test/000000", "b/test/000001", "b/test/000002"]


@pytest.mark.parametrize("seed", range(3))
def test_no_validation_image_of_arrays_is_also_a_training_image(tmp_path: Path, seed: int) -> None:
    """Each image is there twice, so that a draw by name would tear copies apart."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
    twice, labels = np.concatenate([images[:20], images[:20]]), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=twice, y_train=labels, x_test=images[20:], y_test=labels[:4])
    domain = open_dataset(DataConfig("arrays", str(tmp_path), val_fraction=0.5), seed)["a"]
    assert domain.validation is not None
    train, aside = (
        {image.tobytes() for image in part.pixels(np.arange(len(part)))} for part in (domain.train, domain.validation)
    )
    assert aside
    assert not train & aside


@pytest.mark.parametrize("seed", range(3))
def test_copies_in_folders_of_several_domains_and_classes_are_never_trained_and_tested_on(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(0)
    for number in range(12):
        for label in ("x", "y"):
            path = tmp_path / "a" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # every image again, under another domain's name
    for number in range(12, 24):
        for label in ("x", "y"):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
                tmp_path / "b" / label / f"{number}.png"
            )
    shutil.copyfile(tmp_path / "a" / "x" / "0.png", tmp_path / "b" / "y" / "other.png")
    data = {"name": "folders", "root": str(tmp_path), "image_size": 8, "val_fraction": 0.25}
    domains, shares = partition_dataset(config_from_tables({"data": data, "run": {"seed": seed}}))
    hashes = hash_images_in_use(domains, shares)
    assert hashes.kind == "file"
    for domain in domains:
        trained, chosen = hashes.find(domain.test)  # type: ignore[misc]
        assert not trained.any()
        assert not chosen.any()
    assert not np.isin(hashes.validation, hashes.train).any()
    assert sum(len(d.train) + len(d.test) + len(d.validation or ()) for d in domains) == 48
