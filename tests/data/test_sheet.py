import numpy as np
import pytest
from PIL import Image

from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.inspection import draw_contact_sheet

WHITE = (255, 255, 255)


def flat_domains(
    *, classes: int = 4, height: int = 16, width: int = 16, channels: int = 3, missing: int | None = None
) -> Domains:
    """Six images a class in which every pixel is 20 times the label, and no training image of the missing class."""

    def split(labels: np.ndarray) -> Split:
        images = np.broadcast_to(labels[:, None, None, None] * 20, (len(labels), height, width, channels))
        return Split(images.astype(np.uint8), labels, [str(i) for i in range(len(labels))])

    labels = np.arange(classes).repeat(6)
    made = [Domain(f"domain{d}", split(labels[labels != missing]), split(labels)) for d in range(2)]
    return Domains("flat", tuple(f"class{c}" for c in range(classes)), tuple(made))


def tiles(sheet: Image.Image, domains: int, columns: int, height: int, width: int) -> np.ndarray:
    """The tiles, which fill the sheet's lower right but for a gap of two."""
    pixels = np.asarray(sheet)[-domains * (height + 2) :, -columns * (width + 2) :]
    return pixels.reshape(domains, height + 2, columns, width + 2, 3)[:, :-2, :, :-2].transpose(0, 2, 1, 3, 4)


def test_columns_go_evenly_through_the_classes_and_agree_in_all_rows() -> None:
    shown = tiles(draw_contact_sheet(flat_domains(), columns=8), 2, 8, 16, 16)
    expected = np.array([0, 0, 20, 20, 40, 40, 60, 60])
    assert np.array_equal(shown, np.broadcast_to(expected[:, None, None, None], shown.shape))


def test_classes_that_do_not_fit_side_by_side_go_on_below() -> None:
    sheet = draw_contact_sheet(flat_domains(classes=7), columns=3)  # three, two and two
    assert sheet.height == 3 * draw_contact_sheet(flat_domains(classes=3), columns=3).height
    heights = [sheet.height * (band + 1) // 3 for band in range(3)]
    bands = [tiles(sheet.crop((0, 0, sheet.width, height)), 2, 3, 16, 16)[..., 0, 0, 0] for height in heights]
    assert [band.tolist() for band in bands] == [[[0, 20, 40]] * 2, [[60, 80, 255]] * 2, [[100, 120, 255]] * 2]


def test_of_very_many_classes_some_are_shown_spread_over_all() -> None:
    shown = tiles(draw_contact_sheet(flat_domains(classes=6), columns=3, most=3), 2, 3, 16, 16)
    assert shown[:, :, 0, 0, 0].tolist() == [[0, 40, 80]] * 2


def test_one_channel_is_shown_as_grey() -> None:
    sheet = draw_contact_sheet(flat_domains(channels=1), columns=4)
    assert sheet.mode == "RGB"
    assert tiles(sheet, 2, 4, 16, 16)[1, 3, 5, 5].tolist() == [60, 60, 60]


@pytest.mark.parametrize(("height", "width", "tile"), [(256, 256, (64, 64)), (100, 200, (32, 64)), (65, 20, (64, 20))])
def test_large_images_are_shrunk_to_64_pixels_in_their_proportions(
    height: int, width: int, tile: tuple[int, int]
) -> None:
    shown = tiles(draw_contact_sheet(flat_domains(height=height, width=width), columns=4), 2, 4, *tile)
    assert np.array_equal(shown[..., 0], np.broadcast_to(np.arange(4)[:, None, None] * 20, shown.shape[:-1]))


def test_a_class_that_a_domain_lacks_stays_white() -> None:
    shown = tiles(draw_contact_sheet(flat_domains(missing=2), columns=4), 2, 4, 16, 16)
    assert [tuple(shown[0, c, 8, 8].tolist()) for c in range(4)] == [(0, 0, 0), (20, 20, 20), WHITE, (60, 60, 60)]


def test_no_image_is_shown_twice() -> None:
    shown = tiles(draw_contact_sheet(flat_domains(classes=1), columns=8), 2, 8, 16, 16)
    assert shown[0, :, 8, 8, 0].tolist() == [0] * 6 + [255] * 2


def test_names_of_domains_and_classes_are_written() -> None:
    pixels = np.asarray(draw_contact_sheet(flat_domains(height=40, width=40), columns=4))
    left, top = pixels.shape[1] - 4 * 42, pixels.shape[0] - 2 * 42
    assert pixels[top : top + 40, :left].min() < 100
    assert pixels[top + 42 :, :left].min() < 100
    assert all(pixels[:top, left + 42 * c : left + 42 * (c + 1)].min() < 100 for c in range(4))


def test_the_same_seed_gives_the_same_sheet_and_another_a_different_one() -> None:
    rng = np.random.default_rng(0)
    noise = Split(rng.integers(0, 256, (50, 8, 8, 3), np.uint8), np.zeros(50, np.int64), [""] * 50)
    domains = Domains("noise", ("only",), (Domain("a", noise, noise),))
    assert draw_contact_sheet(domains).tobytes() == draw_contact_sheet(domains).tobytes()
    assert draw_contact_sheet(domains).tobytes() != draw_contact_sheet(domains, seed=1).tobytes()


def test_a_sheet_needs_a_column() -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0 and"):
        draw_contact_sheet(flat_domains(), columns=0)
    with pytest.raises(ValueError, match=r"must be at least 1, got .* and 0"):
        draw_contact_sheet(flat_domains(), most=0)
