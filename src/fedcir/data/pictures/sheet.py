"""A contact sheet: what a dataset looks like, one row a domain."""

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedcir.data.domains import Domain, Domains, Images, Labels
from fedcir.rng import numpy_rng

LARGEST_TILE = 64
GAP = 2
TEXT = 12
MOST = 100
"""Classes that a sheet shows."""


def contact_sheet(domains: Domains, columns: int = 20, most: int = MOST, seed: int = 0) -> Image.Image:
    """Training images by domain (rows) and class (columns).

    Classes that are more than the columns go on below. Of more than `most` some are shown, spread evenly over all.
    """
    for name, value in (("columns", columns), ("most", most)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    height, width, _ = domains.image_shape
    shrink = min(1.0, LARGEST_TILE / max(height, width))
    tile = max(1, round(width * shrink)), max(1, round(height * shrink))
    font = ImageFont.load_default(TEXT)
    margin = max(round(font.getlength(name)) for name in domains.names) + 4 * GAP
    across, down = tile[0] + GAP, max(tile[1], TEXT) + GAP
    header = 2 * TEXT
    bands = _bands(len(domains.classes), columns, most)
    band_height = header + len(domains) * down
    sheet = Image.new("RGB", (margin + max(map(len, bands)) * across, len(bands) * band_height), "white")
    draw = ImageDraw.Draw(sheet)

    for number, shown in enumerate(bands):
        above = number * band_height
        for label in np.unique(shown):
            first, count = int(np.argmax(shown == label)), int(np.sum(shown == label))
            text = _fitted(domains.classes[label], count * across - 2 * GAP, font)
            draw.text((margin + (first + count / 2) * across, above + header / 2), text, "black", font, anchor="mm")
        for row, domain in enumerate(domains):
            top = above + header + row * down
            draw.text((2 * GAP, top + tile[1] / 2), domain.name, "black", font, anchor="lm")
            for column, index in enumerate(_chosen(domain, shown, seed)):
                if index is not None:
                    picture = _picture(domain.train.pixels([index])[0]).resize(tile, Image.Resampling.LANCZOS)
                    sheet.paste(picture, (margin + column * across, top))
    return sheet


def _bands(classes: int, columns: int, most: int) -> list[Labels]:
    """The class of each column, band by band."""
    count = min(classes, most)
    chosen = np.arange(count) * classes // count
    if count > columns:
        return np.array_split(chosen, math.ceil(count / columns))
    return [chosen[np.arange(columns) * count // columns]]


def _chosen(domain: Domain, shown: Labels, seed: int) -> list[int | None]:
    """An image for each column, none twice; None where the domain has no more of that class."""
    shuffled = numpy_rng(seed, "contact_sheet", domain.name).permutation(len(domain.train))
    left = {label: list(shuffled[domain.train.labels[shuffled] == label]) for label in np.unique(shown)}
    return [int(left[label].pop()) if left[label] else None for label in shown]


def _picture(image: Images) -> Image.Image:
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB")


def _fitted(text: str, width: float, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, its end cut off where there is no room."""
    while text and font.getlength(text) > width:
        text = text[:-1]
    return text
