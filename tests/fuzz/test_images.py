"""Mutated images, folders of images and tables of their labels: checked and opened, or refused in one line."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ended import fault
from mutate import batches, damaged_bytes, damaged_copy, outcomes
from PIL import Image

from fedcir.config import DataConfig
from fedcir.data.decoding import Decoding, decode_files
from fedcir.data.inspection import inspect_dataset
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError

KINDS: dict[str, dict[str, Any]] = {
    "jpg": {}, "png": {}, "webp": {}, "bmp": {}, "tif": {}, "tiff": {"compression": "tiff_lzw"}, "gif": {}, "ppm": {},
}  # fmt: skip
DECODING = Decoding(8, max_bytes=10**6, max_pixels=10**6)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One of each kind, some with a mode of their own, and a DICOM file."""
    root = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    for kind, options in KINDS.items():
        Image.fromarray(noise).save(root / f"x.{kind}", **options)
    Image.fromarray(noise).convert("RGBA").save(root / "alpha.png")
    Image.fromarray(noise[..., 0].astype(np.uint16)).save(root / "deep.png")
    Image.fromarray(noise).convert("P").save(root / "palette.png")
    for dicom in ("CT_small.dcm", "MR_small.dcm"):
        pydicom = pytest.importorskip("pydicom")
        result = Path(pydicom.__file__).parent / "data/test_files" / dicom
        if result.is_file():
            (root / dicom).write_bytes(result.read_bytes())
    return sorted(root.iterdir())


@batches(30)
def test_a_mutated_picture_is_seen_or_named(seeds: range, pictures: list[Path], tmp_path: Path) -> None:
    contents = [path.read_bytes() for path in pictures]
    path = tmp_path / "x.jpg"

    def attempt(rng: random.Random) -> str | None:
        content = rng.choice(contents)
        for _ in range(rng.randint(1, 3)):
            content = damaged_bytes(content, rng)
        path.write_bytes(content)
        results = []
        wrong = fault(lambda: results.extend(decode_files([str(path)], DECODING)))
        return wrong or (None if results[0].error.isprintable() else f"not one line: {results[0].error!r}")

    assert not outcomes(seeds, attempt)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of two classes, and a table of them all."""
    root = tmp_path_factory.mktemp("tree")
    rows = ["path,label,site,group"]
    noise = np.random.default_rng(0).integers(0, 256, (2, 2, 4, 6, 6), dtype=np.uint8)
    for d, domain in enumerate(("ink", "pen")):
        for c, label in enumerate(("cat", "dog")):
            (root / domain / label).mkdir(parents=True)
            for n, image in enumerate(noise[d, c]):
                name = f"{domain}/{label}/{n}.png"
                Image.fromarray(image).save(root / name)
                rows.append(f"{name},{label},{domain},{domain}{n}")
    (root / "labels.csv").write_text("\n".join(rows))
    return root


def stray(root: Path, rng: random.Random) -> None:
    """Put something into the folder that has no place there."""
    folders = [root, *sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]
    folder = rng.choice(folders)
    name = folder / rng.choice(("x.jpg", "x.png", ".x", "x", "train", "test", "a\nb.png", "=1+1.png", "X" * 200))
    kinds: list[Callable[[], Any]] = [
        name.mkdir,
        lambda: name.symlink_to(rng.choice(folders)),
        lambda: name.symlink_to("/dev/zero"),
        lambda: os.mkfifo(name),
        lambda: name.write_bytes(rng.randbytes(99)),
        lambda: (
            folder.rename(folder.with_name(rng.choice(("train", "test", ".hidden", "val")))) if folder != root else 0
        ),
        lambda: os.close(os.open(os.fsencode(folder) + b"/\xff.png", os.O_CREAT)),
    ]
    with suppress(OSError):  # there is something of that name
        rng.choice(kinds)()


@batches(30)
def test_a_mutated_folder_is_checked_and_opened_or_refused_in_one_line(
    seeds: range, tree: Path, tmp_path: Path
) -> None:
    def attempt(rng: random.Random) -> str | None:
        root = tmp_path / "copy"
        what = damaged_copy(tree, root, rng)
        for _ in range(rng.randint(0, 2)):
            stray(root, rng)
        data = DataConfig(rng.choice(("folders", "table")), str(root), image_size=4, max_bytes=10**6, max_pixels=10**6)
        checked, opened = [], []
        wrong = fault(lambda: checked.append(inspect_dataset(data)))
        wrong = wrong or fault(lambda: opened.append(open_dataset(data, seed=0)))
        if wrong is None and checked and bool(opened) == bool(checked[0].obstacle):
            wrong = f"the check says {checked[0].obstacle!r}, but a run opens it: {bool(opened)}"
        return wrong and f"{what}: {wrong}"

    assert not outcomes(seeds, attempt)


def test_what_a_reader_must_not_do_counts_as_a_fault() -> None:
    def refuse(line: str) -> None:
        raise InputError(line)

    assert fault(lambda: refuse("name the value")) is None
    assert fault(lambda: refuse("")) is not None
    assert fault(lambda: {}["x"]) == "KeyError: 'x'"
