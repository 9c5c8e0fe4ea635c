"""`camelyon17` and `iwildcam` in the folder layout of WILDS: metadata.csv, and images at the paths its columns tell.

Koh et al., "WILDS: A Benchmark of in-the-Wild Distribution Shifts", https://arxiv.org/abs/2012.07421. Its package is
not needed to read them.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fedcir.config.reading import TABLE, read_text
from fedcir.data.pictures.items import Files, Found, Item
from fedcir.data.readers.named import Published
from fedcir.types import InputError

CAMERAS = 10
ANIMALS = 10
EMPTY = "0"  # the category of images without an animal

CAMELYON17 = Published(
    {"hospital-0": 59436, "hospital-1": 34904, "hospital-2": 85054, "hospital-3": 129838, "hospital-4": 146722},
    ("normal", "tumor"),
)


def camelyon17(root: Path) -> Found:
    """Patches of lymph nodes: five hospitals, with and without a tumour.

    Patches of one patient look alike, so they stay together: models are tested on patients they have not seen.
    """
    items = []
    for line, row in _metadata(root, ("patient", "node", "x_coord", "y_coord", "tumor", "center")):
        slide = f"patient_{row['patient']}_node_{row['node']}"
        name = f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
        label = {"0": "normal", "1": "tumor"}.get(row["tumor"])
        if label is None:
            raise InputError(f"{root / 'metadata.csv'}, line {line}: tumor must be 0 or 1, got {row['tumor']!r}")
        if not row["center"].isdigit():
            raise InputError(f"{root / 'metadata.csv'}, line {line}: center must be a number, got {row['center']!r}")
        items.append(Item(name, f"hospital-{row['center']}", label, group=row["patient"]))
    return Found(Files(root, sorted(items)))


def iwildcam(root: Path) -> Found:
    """Camera traps: the ten cameras with the most animals, and the ten most frequent animals in them.

    Images of one burst show one animal in one place, so they stay together.
    """
    columns = ("location_remapped", "category_id", "filename")
    rows = []
    for line, row in _metadata(root, columns):
        for column in columns[:2]:
            if not row[column].isdigit():
                raise InputError(
                    f"{root / 'metadata.csv'}, line {line}: {column} must be a number, got {row[column]!r}"
                )
        if row["category_id"] != EMPTY:
            rows.append(row)
    cameras = _most(Counter(row["location_remapped"] for row in rows), CAMERAS)
    rows = [row for row in rows if row["location_remapped"] in cameras]
    animals = _most(Counter(row["category_id"] for row in rows), ANIMALS)
    names = _category_names(root)
    items = [
        Item(
            f"train/{row['filename']}",
            f"camera-{int(row['location_remapped']):03d}",
            names.get(row["category_id"], f"category-{int(row['category_id']):03d}"),
            group=row.get("sequence_remapped") or None,
        )
        for row in rows
        if row["category_id"] in animals
    ]
    if not items:
        raise InputError(f"{root / 'metadata.csv'} names no image of an animal")
    return Found(Files(root, sorted(items, key=lambda item: (item.domain, item.name))))


def _metadata(root: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of metadata.csv by line, which may have more columns than these."""
    path = root / "metadata.csv"
    try:
        text = read_text(path, TABLE)
    except FileNotFoundError:
        raise InputError(f"data.root: {root} holds no metadata.csv: give the folder that WILDS unpacks") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable table: {error}") from error
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{path} has no column {missing[0]!r}; it has {', '.join(reader.fieldnames or ())}")
        for row in reader:
            if empty := next((column for column in columns if not row[column]), None):
                raise InputError(f"{path}, line {reader.line_num} has no {empty}")
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"{path} is not a readable table: {error}") from error


def _most(counts: Counter[str], number: int) -> set[str]:
    """The most frequent ones; of equally frequent ones the lower number."""
    return set(sorted(counts, key=lambda each: (-counts[each], int(each)))[:number])


def _category_names(root: Path) -> dict[str, str]:
    """Names of the animals where WILDS' categories.csv is there."""
    path = root / "categories.csv"
    if not path.is_file():
        return {}
    try:
        file = io.StringIO(read_text(path, TABLE), newline="")
        return {row["category_id"]: row["name"] for row in csv.DictReader(file) if row.get("name")}
    except KeyError as error:
        raise InputError(f"{path} has no column {error}") from None
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is not a readable table: {error}") from error
