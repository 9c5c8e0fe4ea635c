"""Three sites with folders of their own, a small frozen encoder of a user's file, and their courier files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.courier import CourierFile, make_courier_file

SITES = ("east", "north", "south")
CLASSES = ("cat", "dog", "fox")
ENCODER = """
import torch
from torch import nn

def small(width=6):
    torch.manual_seed(7)
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())
"""
Write = Callable[..., CourierFile]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of three sites; the third site has none of a dog."""
    root, rng = tmp_path_factory.mktemp("sites"), np.random.default_rng(0)
    for number, site in enumerate(SITES):
        for label, name in enumerate(CLASSES):
            for image in range(0 if (site, name) == ("south", "dog") else 15):
                path = root / site / name / f"{image}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 60 + 30 * number, (16, 16, 3))
                pixels[..., label] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An encoder of a file, as `--encoder` names it."""
    path = tmp_path_factory.mktemp("code") / "mine.py"
    path.write_text(ENCODER, encoding="utf-8")
    return f"{path}:small"


@pytest.fixture(scope="session")
def write(folders: Path, encoder: str) -> Write:
    """Write a site's file: `write("east", folder, seed=1)`."""

    def write_file(folder_name: str, folder: Path, **other: Any) -> CourierFile:
        settings: dict[str, Any] = {
            "federation": "pets", "encoder": encoder, "classes": CLASSES, "image_size": 16,
            "set": ["data.val_fraction=0.2", "run.workers=1"], **other,
        }  # fmt: skip
        return make_courier_file(folders / folder_name, folder / f"{folder_name}.fedcir", **settings)[0]

    return write_file


@pytest.fixture(scope="session")
def sent(write: Write, tmp_path_factory: pytest.TempPathFactory) -> list[CourierFile]:
    """The files of the three sites, which all tests may read."""
    folder = tmp_path_factory.mktemp("sent")
    return [write(site, folder) for site in SITES]
