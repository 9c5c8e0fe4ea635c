"""A contact sheet: what a dataset looks like, one row a domain."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from fedcir.data.domains import Domain, Domains, Images, Labels
from fedcir.rng import numpy_rng

LARGEST_TILE = 64
GAP = 2
TEXT = 12


def contact_sheet(domains: Domains, columns: int = 20, seed: int = 0) -> Image.Image:
    """Training images by domain (rows) and class (columns, spread evenly over the classes)."""
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    height, width, _ = domains.image_shape
    shrink = min(1.0, LARGEST_TILE / max(height, width))
    tile = max(1, round(width * shrink)), max(1, round(height * shrink))
    font = ImageFont.load_default(TEXT)
    margin = max(round(font.getlength(name)) for name in domains.names) + 4 * GAP
    across, down = tile[0] + GAP, max(tile[1], TEXT) + GAP
    header = 2 * TEXT
    sheet = Image.new("RGB", (margin + columns * across, header + len(domains) * down), "white")
    draw = ImageDraw.Draw(sheet)

    shown = np.arange(columns) * len(domains.classes) // columns  # class of each column
    for label in np.unique(shown):
        first, count = int(np.argmax(shown == label)), int(np.sum(shown == label))
        text = _fitted(domains.classes[label], count * across - 2 * GAP, font)
        draw.text((margin + (first + count / 2) * across, header / 2), text, "black", font, anchor="mm")
    for row, domain in enumerate(domains):
        top = header + row * down
        draw.text((2 * GAP, top + tile[1] / 2), domain.name, "black", font, anchor="lm")
        for column, index in enumerate(_chosen(domain, shown, seed)):
            if index is not None:
                picture = _picture(domain.train.pixels([index])[0]).resize(tile, Image.Resampling.LANCZOS)
                sheet.paste(picture, (margin + column * across, top))
    return sheet


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
