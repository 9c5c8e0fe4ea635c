"""One encoded image to one square of bytes, whatever its mode, depth and rotation."""

import io
from typing import Any, NamedTuple

from PIL import Image, ImageOps

from fedcir.config import DataConfig

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".dcm")
RGB, GREY = 3, 1
"""Channels of a square."""
MODES = {RGB: "RGB", GREY: "L"}
"""What Pillow calls them."""
PREAMBLE = 128
"""Bytes before a DICOM file says that it is one."""
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""What Pillow may try. It knows others that start programs (EPS) or are rarely looked at by anyone."""


class Limits(NamedTuple):
    """Beyond these a file is not decoded."""

    bytes: int
    pixels: int

    def check(self, width: int, height: int) -> None:
        if width * height > self.pixels:
            raise ValueError(f"it has {width * height:,} pixels, more than data.max_pixels={self.pixels:,}")


LIMITS = Limits(DataConfig.max_bytes, DataConfig.max_pixels)


def read_picture(
    encoded: bytes, size: int, channels: int = RGB, limits: Limits = LIMITS
) -> tuple[Image.Image, tuple[int, int]]:
    """The image as a square of RGB, or of grey, upright, and its width and height as stored.

    Raises nearly anything on a file that is not a whole image.
    """
    if encoded[PREAMBLE : PREAMBLE + 4] == b"DICM":
        from fedcir.data.pictures.dicom import read_dicom  # most datasets have none, and it brings numpy

        shown = read_dicom(encoded, limits)
        return _square(shown, size, MODES[channels]), shown.size
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
        stored = opened.size
        limits.check(*stored)
        return square(opened, size, channels), stored


def square(opened: Image.Image, size: int, channels: int = RGB) -> Image.Image:
    """The same of an image that is opened."""
    mode = MODES[channels]
    opened.draft(mode, (size, size))  # a JPEG much larger than asked for is decoded smaller, and faster
    plain = opened.format == "JPEG" and "exif" not in opened.info  # most are, and looking takes time
    picture: Any = opened if plain else ImageOps.exif_transpose(opened)
    return _square(picture, size, mode)


def _square(picture: Image.Image, size: int, mode: str) -> Image.Image:
    return _in_mode(picture, mode).resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)


def _in_mode(picture: Image.Image, mode: str) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits a pixel; Pillow would cut off everything above 255
        import numpy as np  # brings a tenth of a second, and most datasets have no such image

        values = np.asarray(picture).astype(np.float32)
        return Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8)).convert(mode)
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers: save it with 8 or 16 bits per channel")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        coloured = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert(mode)
    return picture if picture.mode == mode else picture.convert(mode)
