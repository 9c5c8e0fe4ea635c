from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.data.domains import Domain, Domains, Split
from fedcir.reporting.drawing import MAX_CLASSES, arrange_images, draw_contact_sheet


def flat_domains(*, classes: int = 4, channels: int = 3, missing: int | None = None) -> Domains:
    """Six images a class in which every pixel is 20 times the label, and no training image of the missing class."""

    def split(labels: np.ndarray) -> Split:
        images = np.broadcast_to(labels[:, None, None, None] * 20, (len(labels), 8, 5, channels))
        return Split(images.astype(np.uint8), labels, [str(i) for i in range(len(labels))])

    labels = np.arange(classes).repeat(6)
    made = [Domain(f"domain{d}", split(labels[labels != missing]), split(labels)) for d in range(2)]
    return Domains("flat", tuple(f"class{c}" for c in range(classes)), tuple(made))


def tiles(domains: Domains, labels: list[int], repeats: int = 1) -> list[list[int]]:
    """The first byte of every tile, all of whose bytes are equal."""
    picture = arrange_images(domains, np.array(labels), repeats, seed=0).reshape(2, 8, -1, 5, 3)
    assert (picture == picture[:, :1, :, :1, :1]).all()
    values: list[list[int]] = picture[:, 0, :, 0, 0].tolist()
    return values


def test_rows_are_domains_and_columns_go_evenly_through_the_classes() -> None:
    assert tiles(flat_domains(), [0, 1, 2, 3], repeats=2) == [[0, 0, 20, 20, 40, 40, 60, 60]] * 2
    assert tiles(flat_domains(), [1, 3]) == [[20, 60]] * 2


def test_one_channel_is_shown_as_grey() -> None:
    assert tiles(flat_domains(channels=1), [3, 0]) == [[60, 0]] * 2


def test_a_class_that_a_domain_lacks_stays_white() -> None:
    assert tiles(flat_domains(missing=2), [0, 1, 2, 3]) == [[0, 20, 255, 60]] * 2


def test_no_image_is_shown_twice() -> None:
    assert tiles(flat_domains(classes=1), [0], repeats=8) == [[0] * 6 + [255] * 2] * 2


def test_the_same_seed_gives_the_same_images_and_another_different_ones() -> None:
    rng = np.random.default_rng(0)
    noise = Split(rng.integers(0, 256, (50, 8, 8, 3), np.uint8), np.zeros(50, np.int64), [""] * 50)
    domains, label = Domains("noise", ("only",), (Domain("a", noise, noise),)), np.zeros(1, np.int64)
    first, again, other = (arrange_images(domains, label, 20, seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("classes", [1, 3, 21, MAX_CLASSES + 1])
def test_a_sheet_is_drawn_for_any_number_of_classes(classes: int, tmp_path: Path) -> None:
    draw_contact_sheet(flat_domains(classes=classes), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert min(sheet.size) > 100
