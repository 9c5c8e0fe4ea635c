"""One image file to one square of bytes, whatever its mode, depth and rotation."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedcir.data.domains import Images

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})


def read_picture(path: Path, size: int) -> Images:
    """The image as RGB of (size, size, 3), upright. Raises OSError or ValueError on a file that is not whole."""
    with Image.open(path) as opened:
        opened.draft("RGB", (size, size))  # a JPEG much larger than asked for is decoded smaller, and faster
        picture = ImageOps.exif_transpose(opened)
        return np.asarray(_to_rgb(picture).resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0))


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height as stored, after reading the whole file to see that it is one."""
    with Image.open(path) as opened:
        opened.load()
        return opened.size


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):  # 16 bits a pixel; Pillow would cut off everything above 255
        values = np.asarray(picture).astype(np.float32)
        return Image.fromarray((values / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        coloured = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    return picture.convert("RGB")
