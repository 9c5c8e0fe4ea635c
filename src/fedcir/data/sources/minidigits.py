"""Ten digits in four domains, made from data of installed packages: a real feature shift without a download.

Handwriting is the test set of UCI's Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998,
https://doi.org/10.24432/C50P49) and photographs are two, both as scikit-learn ships them; typefaces are matplotlib's.
`photo` follows MNIST-M (Ganin et al., 2016, https://arxiv.org/abs/1505.07818), and has neighbours at its edges and a
camera's blur, as SVHN has.

The images are meant to be as hard as those of real sites: few for training, faint ink, faded copies, weak contrast.
The 13 writers are in training and test, since scikit-learn does not say who wrote what. Domains differ mostly in colour
and polarity, which the invariant norm removes from every image by design.
"""

import hashlib
import io
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from fedcir import rng
from fedcir.data.cache import cache_folder
from fedcir.data.domains import Domain, Domains, Images, Labels, Split
from fedcir.data.sources.source import DatasetSource
from fedcir.files import make_private_folder, write_file
from fedcir.rng import numpy_rng

PARTS = ("train", "test")
CODE = (Path(__file__), Path(rng.__file__))
PACKAGES = ("matplotlib", "numpy", "pillow", "scikit-learn", "scipy")
"""Packages that draw the digits, or hold their originals."""


def cached_minidigits() -> Domains:
    """Return the same as `minidigits()`, bit for bit, from a file in the cache if it exists.

    The name of the file is a hash of all code and packages that the images depend on.
    """
    versions = "".join(f"{name} {version(name)}\n" for name in PACKAGES)
    key = hashlib.blake2b(b"".join(map(Path.read_bytes, CODE)) + versions.encode(), digest_size=16).hexdigest()
    path = cache_folder() / f"made-{key}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # it is missing or damaged
        return _read(path)
    domains = minidigits()
    with suppress(OSError):  # a cache that cannot be written costs only time
        _write(domains, path)
    return domains


def _write(domains: Domains, path: Path) -> None:
    count = sum(len(split) for domain in domains for split in domain.splits)
    about = {"dataset": domains.name, "images": count, "size": domains.image_shape[0]}  # for `fedcir data cache`
    arrays = {**about, "classes": domains.classes, "domains": domains.names}
    for domain in domains:
        for part, split in zip(PARTS, domain.splits, strict=True):
            values = {"images": split.images, "labels": split.labels, "ids": split.ids}
            arrays |= {f"{domain.name}.{part}.{name}": value for name, value in values.items()}
    make_private_folder(path.parent)
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{name: np.array(value) for name, value in arrays.items()})
    write_file(path, content.getvalue())


def _read(path: Path) -> Domains:
    with open(path, "rb") as file, np.load(file) as arrays:  # numpy does not close a file that it cannot read

        def split(domain: str, part: str) -> Split:
            images, labels, ids = (arrays[f"{domain}.{part}.{name}"] for name in ("images", "labels", "ids"))
            return Split(images, labels, ids.tolist())

        domains = (Domain(name, *(split(name, part) for part in PARTS)) for name in arrays["domains"].tolist())
        return Domains("minidigits", tuple(arrays["classes"].tolist()), tuple(domains))


SIDE = 32
FINE = 2  # outlines and type are drawn this many times larger, then averaged down
# All of matplotlib's faces that hold figures, but for the maths font cmmi10, whose 0 and 1 read as o and I.
FACES = {
    "sans": "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSans-BoldOblique cmss10",
    "mono": "DejaVuSansMono DejaVuSansMono-Bold DejaVuSansMono-Oblique DejaVuSansMono-BoldOblique cmtt10",
    "serif": "DejaVuSerif DejaVuSerif-Bold DejaVuSerif-Italic DejaVuSerif-BoldItalic cmr10 cmb10 cmti10",
    "times": "STIXGeneral STIXGeneralBol STIXGeneralItalic STIXGeneralBolIta",
}

Ink = NDArray[np.float32]  # (N, S, S), 0 where there is no ink and 1 where there is


def minidigits(seed: int = 0) -> Domains:
    """Domains handwritten, printed, photo and outlined with 200 training and 399 test images each, 32x32 RGB."""
    from sklearn.datasets import load_digits, load_sample_images  # slow to import, and not needed with a cache

    writing, photos = load_digits(), load_sample_images().images
    dealt, faces = _deal_originals(writing.target, seed), _divide_faces(seed)

    def split(domain: str, part: str) -> Split:
        rng = numpy_rng(seed, "minidigits", domain, part)
        if domain == "printed":
            return _print_digits(faces[part], len(dealt["handwritten", part]), rng)
        chosen = dealt[domain, part]
        ink = _load_handwriting(writing.images[chosen], SIDE * FINE if domain == "outlined" else SIDE, rng)
        if domain == "handwritten":
            images = _scan_digits(ink, rng)
        elif domain == "photo":
            images = _blend_photos(ink, _draw_strips(photos, part), rng)
        else:
            images = _outline_digits(ink, rng)
        return Split(images, writing.target[chosen].astype(np.int64), [f"{domain}/{i:04}" for i in chosen])

    names = ("handwritten", "printed", "photo", "outlined")
    domains = (Domain(name, split(name, "train"), split(name, "test")) for name in names)
    return Domains("minidigits", tuple("0123456789"), tuple(domains))


def _deal_originals(labels: Labels, seed: int) -> dict[tuple[str, str], NDArray[np.int64]]:
    """Assign each original to one domain and one split, every class in equal shares."""
    shuffled = numpy_rng(seed, "minidigits", "deal").permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    ninths = [by_class[k::9] for k in range(9)]  # dealt like cards: six of 200 and three of 199
    dealt = {}
    for k, domain in enumerate(("handwritten", "photo", "outlined")):
        dealt[domain, "train"] = np.sort(ninths[k])
        dealt[domain, "test"] = np.sort(np.concatenate([ninths[3 + k], ninths[6 + k]]))
    return dealt


def _divide_faces(seed: int) -> dict[str, list[str]]:
    """Divide the faces, a third of each style for testing, so that no face is in both splits."""
    divided: dict[str, list[str]] = {"train": [], "test": []}
    for style, names in FACES.items():
        faces = numpy_rng(seed, "minidigits", "faces", style).permutation(names.split()).tolist()
        held_out = round(len(faces) / 3)
        divided["test"] += faces[:held_out]
        divided["train"] += faces[held_out:]
    return divided


def _load_handwriting(originals: NDArray[np.float64], side: int, rng: np.random.Generator) -> Ink:
    """Draw the 8x8 originals smoothly at this size, each a little scaled, slanted and moved."""
    ink = np.empty((len(originals), side, side), np.float32)
    for i, original in enumerate(originals):
        padded = Image.fromarray(np.pad(original * (255 / 16), 2).astype(np.uint8))  # (12, 12)
        step = 8 / (side * rng.uniform(0.72, 0.9))  # pixels of the original for each one drawn
        slant, (x, y) = rng.uniform(-0.15, 0.15), 6 + rng.uniform(-0.5, 0.5, 2)  # (x, y) comes to the middle
        affine = (step, slant * step, x - step * (1 + slant) * side / 2, 0, step, y - step * side / 2)
        stroke = padded.transform((side, side), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC)
        ink[i] = np.asarray(stroke) / 255
    return (ink - 0.25).clip(0, 0.5) * 2  # enlarging blurs the edges of strokes: steepen them again


def _paint_digits(ink: Ink, colour: NDArray[np.int64], ground: NDArray[np.int64], rng: np.random.Generator) -> Images:
    """Paint ink of one colour per image, (N, 3), on ground of another, with a little grain."""
    mix = ink.reshape(len(ink), SIDE, ink.shape[1] // SIDE, SIDE, ink.shape[1] // SIDE, 1).mean((2, 4))  # (N, H, W, 1)
    grain = rng.integers(-5, 6, mix.shape)
    return _to_bytes(mix * colour[:, None, None] + (1 - mix) * ground[:, None, None] + grain)


def _to_bytes(values: NDArray[np.floating]) -> Images:
    return values.round().clip(0, 255).astype(np.uint8)


def _scan_digits(ink: Ink, rng: np.random.Generator) -> Images:
    """Paint light ink on dark ground, in shades of grey, strong or faint."""
    light, dark = rng.integers(100, 256, (len(ink), 1)), rng.integers(0, 40, (len(ink), 1))
    return _paint_digits(ink, light.repeat(3, 1), dark.repeat(3, 1), rng)


def _outline_digits(ink: Ink, rng: np.random.Generator) -> Images:
    """Draw a line around the strokes, light on dark or dark on light, in any two colours."""
    from scipy.ndimage import maximum_filter, minimum_filter

    hard = (2 * ink - 0.5).clip(0, 1)  # not quite a threshold, which would be jagged
    line = maximum_filter(hard, (1, 3, 3)) - minimum_filter(hard, (1, 3, 3))
    dark, light = rng.integers(0, 120, (len(ink), 3)), rng.integers(150, 256, (len(ink), 3))
    swap = rng.integers(0, 2, (len(ink), 1)) == 1
    return _paint_digits(line, np.where(swap, light, dark), np.where(swap, dark, light), rng)


def _draw_strips(photos: Sequence[Images], part: str) -> list[Image.Image]:
    """Cut the photographs into upright strips, in turn for training and for testing."""
    first = 0 if part == "train" else 1
    return [Image.fromarray(strip) for photo in photos for strip in np.split(photo, 5, axis=1)[first::2]]


def _blend_photos(ink: Ink, strips: Sequence[Image.Image], rng: np.random.Generator) -> Images:
    """Invert the colours where the ink is, more or less, and where parts of two other figures are."""
    from scipy.ndimage import gaussian_filter

    images = np.empty((*ink.shape, 3), np.uint8)
    for image, stroke in zip(images, ink, strict=True):
        neighbours = ink[rng.integers(len(ink), size=2)]
        gap, line = int(rng.integers(SIDE * 5 // 8, SIDE * 7 // 8)), stroke.copy()
        line[:, gap:] = np.maximum(line[:, gap:], neighbours[0][:, :-gap])
        line[:, :-gap] = np.maximum(line[:, :-gap], neighbours[1][:, gap:])
        contrast = texture = 0.0
        while contrast < 50 or texture < 40:  # inverted mid-grey is mid-grey, and bare sky is no scene
            strip, side = strips[int(rng.integers(len(strips)))], int(rng.integers(SIDE, 3 * SIDE))
            x, y = (int(rng.integers(length - side)) for length in strip.size)
            patch = np.asarray(strip.resize((SIDE, SIDE), Image.Resampling.BOX, (x, y, x + side, y + side)))
            grey, strength = patch.sum(2) / 3, rng.uniform(0.5, 1)
            contrast = strength * abs(255 - 2 * grey[stroke > 0.5].mean())
            texture = np.ptp(np.sort(grey, axis=None)[100:-100])
        blended = patch + strength * line[..., None] * (255.0 - 2.0 * patch)
        image[:] = _to_bytes(gaussian_filter(blended, (blur := rng.uniform(0, 1), blur, 0)))
    return images


def _print_digits(faces: Sequence[str], count: int, rng: np.random.Generator) -> Split:
    """Print figures dark on light paper, faded and speckled like copies; each class goes round all faces."""
    import matplotlib

    side, folder = SIDE * FINE, Path(matplotlib.get_data_path(), "fonts", "ttf")
    ink, labels, ids = np.empty((count, side, side), np.float32), np.arange(count) % 10, []
    for i in range(count):
        copy, digit = divmod(i, 10)
        face, size = faces[(copy + digit) % len(faces)], int(rng.integers(24, 37)) * FINE
        # The basic layout is in every build of Pillow, the other is not.
        font = ImageFont.truetype(folder / f"{face}.ttf", size, layout_engine=ImageFont.Layout.BASIC)
        left, top, right, bottom = font.getbbox(str(digit))
        x, y = side / 2 + rng.uniform(-2, 2, 2) * FINE
        page = Image.new("L", (side, side))
        ImageDraw.Draw(page).text((x - (left + right) / 2, y - (top + bottom) / 2), str(digit), 255, font)
        ink[i] = np.asarray(page.rotate(rng.uniform(-8, 8), Image.Resampling.BICUBIC)) / 255
        ids.append(f"printed/{face}/{digit}/{copy:03}")
    paper = rng.integers(205, 245, (count, 1)) + rng.integers(-20, 12, (count, 3))  # a brightness and a tint
    black = rng.integers(15, 120, (count, 1)) + rng.integers(-15, 50, (count, 3))
    ink = np.maximum(ink, rng.random(ink.shape, np.float32) < 0.02)
    return Split(_paint_digits(ink, black, paper, rng), labels, ids)


class MiniDigits(DatasetSource):
    about = "Digits in four styles: handwritten, printed, over photographs, outlined."
    licence = "BSD and font licences of the packages that it comes from"
    size = "2,396 images"
    where = "comes with fedcir"
    root = "nothing"

    def load_arrays(self, root: Path) -> Domains:
        return cached_minidigits()
