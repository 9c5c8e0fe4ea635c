import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.data.decoding import MAX_IN_PROCESS, DecodedFile, Decoding, PixelFile, decode_files, read_image
from fedcir.errors import InputError

HURRY = 300  # seconds until a process that should have ended is given up
LOSSLESS = {"png": {}, "webp": {"lossless": True, "exact": True}, "bmp": {}, "tiff": {}}
COLOURS = np.array([[[255, 0, 0], [0, 200, 0]], [[0, 0, 150], [90, 91, 92]]], np.uint8)  # a b / c d


def encoded(picture: Image.Image, kind: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(content: bytes, size: int) -> np.ndarray:
    return np.asarray(read_image(content, Decoding(size))[0]).astype(int)


def grey(*values: int) -> np.ndarray:
    """Four grey pixels of a square."""
    return np.repeat(values, 3).reshape(2, 2, 3)


def flat(mode: str, *values: Any) -> Image.Image:
    """A square of four pixels."""
    picture = Image.new(mode, (2, 2))
    for path, value in zip([(0, 0), (1, 0), (0, 1), (1, 1)], values, strict=True):
        picture.putpixel(path, value)
    return picture


def palette(*indices: int) -> Image.Image:
    picture = flat("P", *indices)
    picture.putpalette([10, 20, 30, 200, 100, 50])
    return picture


@pytest.mark.parametrize("kind", LOSSLESS)
def test_an_image_of_the_asked_size_keeps_its_pixels(kind: str) -> None:
    assert np.array_equal(pixels(encoded(Image.fromarray(COLOURS), kind, **LOSSLESS[kind]), 2), COLOURS)


def test_a_jpeg_keeps_a_flat_colour() -> None:
    content = encoded(Image.new("RGB", (64, 48), (200, 100, 50)), "jpeg", quality=95)
    assert np.abs(pixels(content, 16) - (200, 100, 50)).max() <= 2


ON_WHITE = [
    (encoded(flat("L", 0, 64, 128, 255)), grey(0, 64, 128, 255)),
    (encoded(flat("1", 0, 1, 1, 0)), grey(0, 255, 255, 0)),
    (encoded(palette(0, 1, 1, 0)), [[[10, 20, 30], [200, 100, 50]], [[200, 100, 50], [10, 20, 30]]]),
    (encoded(palette(0, 1, 1, 0), transparency=0), [[[255] * 3, [200, 100, 50]], [[200, 100, 50], [255] * 3]]),
    # a fifth of the colour and four fifths of white: 10/5 + 204 is 206
    (encoded(palette(0, 1, 1, 0), transparency=bytes([51, 255])), [[[206, 208, 210], [200, 100, 50]],
                                                                   [[200, 100, 50], [206, 208, 210]]]),
    (encoded(flat("RGBA", (9, 8, 7, 255), (9, 8, 7, 0), (100, 50, 0, 51), (0, 0, 0, 128))),
     [[[9, 8, 7], [255] * 3], [[224, 214, 204], [127] * 3]]),
    (encoded(flat("LA", (9, 255), (9, 0), (100, 51), (0, 128))), grey(9, 255, 224, 127)),
    (encoded(Image.fromarray(COLOURS), transparency=(255, 0, 0)), [[[255] * 3, [0, 200, 0]], COLOURS[1].tolist()]),
    (encoded(flat("CMYK", (0, 0, 0, 0), (255, 0, 0, 0), (0, 0, 0, 255), (0, 100, 0, 0)), "tiff"),
     [[[255] * 3, [0, 255, 255]], [[0] * 3, [255, 155, 255]]]),
    (encoded(flat("I;16", 0, 257, 128 * 257, 65535)), grey(0, 1, 128, 255)),
    (encoded(flat("I;16", 0, 257, 128 * 257, 65535), "tiff"), grey(0, 1, 128, 255)),
]  # fmt: skip
MODES = ("grey", "1-bit", "palette", "palette with a transparent colour", "palette with a faint colour", "RGBA", "LA")


@pytest.mark.parametrize(
    ("content", "expected"),
    ON_WHITE,
    ids=[*MODES, "RGB with a transparent colour", "CMYK", "16 bits as PNG", "16 bits as TIFF"],
)
def test_every_mode_becomes_rgb_on_white(content: bytes, expected: Any) -> None:
    assert pixels(content, 2).tolist() == np.asarray(expected).tolist()


def test_a_cmyk_jpeg_reads_as_pillow_converts_it() -> None:
    content = encoded(Image.new("CMYK", (40, 40), (200, 40, 0, 20)), "jpeg", quality=95)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))[0, 0].astype(int)
    assert np.abs(pixels(content, 8) - expected).max() <= 1


def test_an_image_of_fractions_is_refused_with_the_cure(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 0.5], [0.5, 1]], np.float32)).save(tmp_path / "a.tiff")
    [look] = decode_files([str(tmp_path / "a.tiff")], Decoding(2))
    assert look.error == "its pixels are floating-point numbers: save it with 8 or 16 bits per channel"


@pytest.mark.parametrize("kind", ["png", "webp", "tiff", "jpeg"])
@pytest.mark.parametrize(
    ("orientation", "upright"),
    list(enumerate(["ab cd", "ba dc", "dc ba", "cd ab", "ac bd", "ca db", "db ca", "bd ac"], start=1)),
)
def test_a_rotated_image_is_turned_upright(orientation: int, upright: str, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    large = COLOURS.repeat(8, 0).repeat(8, 1)  # a JPEG has blocks of 8
    options = {"quality": 100, "subsampling": 0} if kind == "jpeg" else LOSSLESS[kind]
    colours = dict(zip("abcd", COLOURS.reshape(4, 3).tolist(), strict=True))
    expected = [[colours[letter] for letter in row] for row in upright.split()]
    for stored in (COLOURS, large) if kind != "jpeg" else (large,):
        got = pixels(encoded(Image.fromarray(stored), kind, exif=exif.tobytes(), **options), len(stored))
        step = len(stored) // 2
        assert np.abs(got[step // 2 :: step, step // 2 :: step] - expected).max() <= (3 if kind == "jpeg" else 0)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_no_rotation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(pixels(encoded(Image.fromarray(COLOURS), exif=exif.tobytes()), 2), COLOURS)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_the_size_is_told_as_stored(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(encoded(Image.new("RGB", (300, 500)), kind, exif=exif.tobytes()), Decoding(8))[1] == (300, 500)


def test_one_pixel_fills_the_square() -> None:
    assert (pixels(encoded(Image.new("RGB", (1, 1), (7, 8, 9))), 5) == (7, 8, 9)).all()


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_panorama_of_ten_thousand_pixels_is_squeezed(kind: str) -> None:
    stored = np.zeros((20, 10_000, 3), np.uint8)
    stored[:, 5000:] = 255
    picture, size = read_image(encoded(Image.fromarray(stored), kind), Decoding(8))
    assert size == (10_000, 20)
    got = np.asarray(picture)
    assert (got[:, :3] <= 2).all()
    assert (got[:, 5:] >= 253).all()


def test_a_large_jpeg_decoded_small_is_nearly_the_one_decoded_whole() -> None:
    """Waves of several lengths and a sharp disc, at a size where the decoder skips three quarters of the pixels."""
    y, x = np.mgrid[:1200, :1600]
    waves = np.stack([127 + 60 * np.sin(x / f) + 60 * np.cos(y / (f + 7)) for f in (90, 41, 23)], axis=-1)
    waves[(x - 700) ** 2 + (y - 500) ** 2 < 300**2] = (250, 10, 120)
    content = encoded(Image.fromarray(waves.clip(0, 255).astype(np.uint8)), "jpeg", quality=90)
    whole = Image.open(io.BytesIO(content)).resize((128, 128), Image.Resampling.BILINEAR)
    off = np.abs(pixels(content, 128) - np.asarray(whole).astype(int))
    assert off.mean() < 1
    assert np.quantile(off, 0.99) <= 4


def write_many(folder: Path, count: int) -> list[str]:
    """Files of noise of several kinds and sizes, every fiftieth of them damaged."""
    rng = np.random.default_rng(0)
    for number in range(count):
        noise = rng.integers(0, 256, (5 + number % 7, 9, 3), dtype=np.uint8)
        content = encoded(Image.fromarray(noise), ("png", "jpeg", "bmp")[number % 3])
        (folder / f"{number:03} ü.jpg").write_bytes(content[:40] if number % 50 == 7 else content)
    return [str(path) for path in sorted(folder.iterdir())]


def decoded(paths: list[str], images: Path) -> tuple[list[DecodedFile], bytes, list[tuple[int, int]]]:
    images.write_bytes(bytes(5 + len(paths) * 4 * 4 * 3))
    messages: list[tuple[int, int]] = []
    looks = decode_files(
        paths, Decoding(4), PixelFile(str(images), offset=5), lambda *progress: messages.append(progress)
    )
    return looks, images.read_bytes()[5:], messages


def test_processes_see_and_write_the_same_as_one_process_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    paths = write_many(tmp_path / "in", MAX_IN_PROCESS + 30)
    looks, content, message = decoded(paths, tmp_path / "all")
    parts = [decoded(paths[:100], tmp_path / "a"), decoded(paths[100:], tmp_path / "b")]
    assert looks == parts[0][0] + parts[1][0]
    assert content == parts[0][1] + parts[1][1]
    assert [number for number, look in enumerate(looks) if look.error] == [7, 57, 107, 157, 207, 257]
    assert len({look.digest for look in looks}) == MAX_IN_PROCESS + 30 - 6 + 1  # the empty one of the damaged
    for progress, total in ((message, MAX_IN_PROCESS + 30), (parts[0][2], 100)):
        assert [done for done, _ in progress] == sorted({done for done, _ in progress})
        assert progress[-1] == (total, total)
        assert {of for _, of in progress} == {total}


def truncated(path: Path) -> None:
    path.write_bytes(encoded(Image.new("RGB", (400, 400), "red"), "jpeg")[:-300])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, "truncated"),
    "text": (lambda path: path.write_text("not an image"), "it is not an image of a known format"),
    "empty": (lambda path: path.touch(), "it is not an image of a known format"),
    "missing": (lambda path: None, "No such file"),
    "dangling": (lambda path: path.symlink_to("nowhere.jpg"), "No such file"),
    "folder": (lambda path: path.mkdir(), "it is a folder"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_damaged_file_is_a_look_with_an_error(damage: str, tmp_path: Path) -> None:
    make, message = BROKEN[damage]
    make(tmp_path / "a.jpg")
    [look] = decode_files([str(tmp_path / "a.jpg")], Decoding(4))
    assert message in look.error
    assert "\n" not in look.error
    assert look[:3] == ("", 0, 0)


def children() -> list[int]:
    """The decoding processes of this one."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "fedcir.data.decoding"]
    return [int(line) for line in subprocess.run(command, check=False, capture_output=True).stdout.split()]


@pytest.fixture
def endless(tmp_path: Path) -> list[str]:
    """Files of which one, a pipe that nobody writes into, keeps a process waiting for as long as it lives."""
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    return [*write_many(tmp_path / "in", MAX_IN_PROCESS + 30), str(tmp_path / "pipe.jpg")]


def test_a_killed_process_is_an_error_that_says_so(endless: list[str]) -> None:
    def kill(done: int, total: int) -> None:
        for child in children():
            os.kill(child, signal.SIGKILL)

    with pytest.raises(
        (OSError, InputError), match="a process that decodes images ended with code -9: check memory and disk"
    ):
        decode_files(endless, Decoding(4), on_file=kill)
    assert children() == []


def test_an_error_of_the_caller_ends_the_processes(endless: list[str]) -> None:
    def stop(done: int, total: int) -> None:
        assert children()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_files(endless, Decoding(4), on_file=stop)
    assert children() == []


def test_a_process_that_dies_in_the_middle_of_a_line_is_not_waited_for(tmp_path: Path) -> None:
    dying = 'import os, sys\nif "fedcir.data.decoding" in sys.orig_argv:\n    os.write(1, b"[[0, [");os._exit(3)\n'
    (tmp_path / "sitecustomize.py").write_text(dying)
    script = "from fedcir.data.decoding import Decoding, decode_files\n"
    script += f"decode_files(['no.jpg'] * {MAX_IN_PROCESS + 1}, Decoding(4))"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        check=False,
        capture_output=True,
        text=True,
        timeout=HURRY,
    )
    assert "a process that decodes images ended with code 3" in ended.stderr


def test_a_process_that_decodes_imports_no_torch() -> None:
    script = "import sys, fedcir.data.decoding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
