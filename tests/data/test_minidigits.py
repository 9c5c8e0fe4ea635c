from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedcir.data.domains import Domains, Split
from fedcir.data.sources.minidigits import FACES, minidigits

WRITTEN = ("handwritten", "photo", "outlined")


@pytest.fixture(scope="module")
def other() -> Domains:
    return minidigits(1)


def splits(domains: Domains) -> list[Split]:
    return [split for domain in domains for split in (domain.train, domain.test)]


def originals(split: Split) -> set[int]:
    return {int(name.split("/")[1]) for name in split.ids}


def faces(split: Split) -> set[str]:
    return {name.split("/")[1] for name in split.ids}


def test_four_domains_of_200_training_and_399_test_images(digits: Domains) -> None:
    assert digits.names == ("handwritten", "printed", "photo", "outlined")
    assert digits.classes == tuple("0123456789")
    assert digits.image_shape == (32, 32, 3)
    for domain in digits:
        assert domain.train.images.shape == (200, 32, 32, 3)
        assert domain.test.images.shape == (399, 32, 32, 3)
    for split in splits(digits):
        assert split.images.dtype == np.uint8
        assert split.labels.dtype == np.int64


def test_every_split_holds_every_class_in_nearly_equal_shares(digits: Domains) -> None:
    for split in splits(digits):
        shares = np.bincount(split.labels, minlength=10) / len(split)
        assert shares == pytest.approx(0.1, abs=0.01)


def test_the_same_seed_gives_the_same_bytes(digits: Domains) -> None:
    for one, other in zip(splits(digits), splits(minidigits(0)), strict=True):
        assert one.images.tobytes() == other.images.tobytes()
        assert one.labels.tolist() == other.labels.tolist()
        assert one.ids == other.ids


def test_another_seed_gives_other_images_from_other_originals_and_faces(digits: Domains, other: Domains) -> None:
    for ours, theirs in zip(splits(digits), splits(other), strict=True):
        assert not np.array_equal(ours.images, theirs.images)
        assert ours.ids != theirs.ids
    assert faces(digits["printed"].test) != faces(other["printed"].test)


def test_each_original_is_in_one_split_of_one_domain(digits: Domains) -> None:
    used = [originals(split) for name in WRITTEN for split in (digits[name].train, digits[name].test)]
    assert all(one.isdisjoint(other) for one, other in combinations(used, 2))
    assert set().union(*used) == set(range(1797))


def test_no_two_originals_are_the_same_picture() -> None:
    assert len(np.unique(load_digits().data, axis=0)) == 1797


def enlarged(original: np.ndarray) -> np.ndarray:
    """An original at its usual size, in the middle of 32x32 pixels."""
    return np.pad(np.asarray(Image.fromarray((original * 15).astype(np.uint8)).resize((26, 26))), 3).ravel()


def test_an_id_names_the_original_that_was_drawn(digits: Domains) -> None:
    source = load_digits()
    for name in WRITTEN:
        for split in (digits[name].train, digits[name].test):
            index = [int(image_id.split("/")[1]) for image_id in split.ids]
            assert split.labels.tolist() == source.target[index].tolist()
    # A scan is slanted and moved, yet of all 1,797 originals it is often most like its own.
    scans = digits["handwritten"].test
    likeness = np.corrcoef([enlarged(i) for i in source.images], scans.images[..., 0].reshape(399, -1))[:1797, 1797:]
    results = [image_id == f"handwritten/{i:04}" for image_id, i in zip(scans.ids, likeness.argmax(0), strict=True)]
    assert np.mean(results) > 0.2


def test_ids_are_unique(digits: Domains) -> None:
    ids = [image_id for split in splits(digits) for image_id in split.ids]
    assert len(set(ids)) == len(ids)


def test_no_face_is_in_both_splits_and_every_style_is(digits: Domains, other: Domains) -> None:
    for printed in (digits["printed"], other["printed"]):
        train, test = faces(printed.train), faces(printed.test)
        assert train.isdisjoint(test)
        for names in FACES.values():
            assert train & set(names.split())
            assert test & set(names.split())
        assert train | test == set(" ".join(FACES.values()).split())


def test_no_two_images_are_equal(digits: Domains) -> None:
    images = [image.tobytes() for split in splits(digits) for image in split.images]
    assert len(set(images)) == len(images) == 4 * 599


def test_scans_are_light_on_dark_and_print_is_dark_on_light(digits: Domains) -> None:
    edge = [(slice(None), row) for row in (0, -1)]
    for name, sign in (("handwritten", 1), ("printed", -1)):
        images = digits[name].train.images.astype(float)
        background = np.mean([images[rows].mean((1, 2)) for rows in edge], axis=0)
        centre = images[:, 6:-6, 8:-8].reshape(200, -1)
        ink = np.quantile(centre, 0.95 if sign == 1 else 0.05, axis=1)
        assert np.all(sign * (ink - background) > 50)
