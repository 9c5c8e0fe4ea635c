"""Camelyon17 and iWildCam as WILDS lays them out: metadata.csv, and images whose paths its columns tell.

Koh et al., "WILDS: A Benchmark of in-the-Wild Distribution Shifts", https://arxiv.org/abs/2012.07421. Its package is
not needed to read them.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fedcir.data.folders import ImageFile
from fedcir.types import InputError

CAMERAS = 10
ANIMALS = 10
EMPTY = "0"  # the category of images without an animal


def camelyon17(root: Path) -> list[ImageFile]:
    """Patches of lymph nodes: five hospitals, with and without a tumour."""
    files = []
    for row in _metadata(root, ("patient", "node", "x_coord", "y_coord", "tumor", "center")):
        slide = f"patient_{row['patient']}_node_{row['node']}"
        name = f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
        label = {"0": "normal", "1": "tumor"}.get(row["tumor"])
        if label is None:
            raise InputError(f"{root / 'metadata.csv'}: the column tumor is 0 or 1, got {row['tumor']!r}")
        files.append(ImageFile(name, f"hospital-{row['center']}", label))
    return files


def iwildcam(root: Path) -> list[ImageFile]:
    """Camera traps: the ten cameras with the most animals, and the ten most frequent animals in them."""
    columns = ("location_remapped", "category_id", "filename")
    rows = [row for row in _metadata(root, columns) if row["category_id"] != EMPTY]
    cameras = _most(Counter(row["location_remapped"] for row in rows), CAMERAS)
    rows = [row for row in rows if row["location_remapped"] in cameras]
    animals = _most(Counter(row["category_id"] for row in rows), ANIMALS)
    names = _category_names(root)
    return [
        ImageFile(
            f"train/{row['filename']}",
            f"camera-{int(row['location_remapped']):03d}",
            names.get(row["category_id"], f"category-{int(row['category_id']):03d}"),
        )
        for row in rows
        if row["category_id"] in animals
    ]


def _metadata(root: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Rows of metadata.csv, which may have more columns than these."""
    path = root / "metadata.csv"
    if not path.is_file():
        raise InputError(f"data.root: {root} holds no metadata.csv")
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = set(columns) - set(reader.fieldnames or ())
        if missing:
            raise InputError(f"{path} has no column {min(missing)!r}")
        yield from reader


def _most(counts: Counter[str], number: int) -> set[str]:
    """The most frequent ones; of equally frequent ones the lower number."""
    return set(sorted(counts, key=lambda each: (-counts[each], int(each)))[:number])


def _category_names(root: Path) -> dict[str, str]:
    """Names of the animals where WILDS' categories.csv is there."""
    path = root / "categories.csv"
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        return {row["category_id"]: row["name"] for row in csv.DictReader(file) if "name" in row}
