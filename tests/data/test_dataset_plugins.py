"""Datasets by file: the example of docs/add-a-dataset.md works, and mistakes are named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcir.conformance import check_dataset
from fedcir.data.opening import SOURCES, get_source
from fedcir.errors import InputError

PAGE = Path(__file__).parents[2] / "docs" / "add-a-dataset.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example of the page, and images for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    Path("scanners.py").write_text(example[1], encoding="utf-8")
    Path("images").mkdir()
    rng = np.random.default_rng(0)
    for scanner in ("ge", "philips"):
        for label in ("normal", "tumour"):
            for number in range(5):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(f"images/{scanner}_{label}_{number}.png")
    return tmp_path


def test_the_dataset_of_the_page_conforms_and_trains(folder: Path, fedcir: Callable[..., Any]) -> None:
    check_dataset("./scanners.py", root="images", image_size=8)
    assert "ready for training" in fedcir("data", "check", "./scanners.py", "--data-root", "images").out
    options = ["--image-size", 16, "--rounds", 1, "--local-steps", 1, "--device", "cpu", "--quiet", "--out", "run"]
    fedcir("run", "--dataset", "./scanners.py", "--data-root", "images", *options)
    assert Path("run/summary.json").is_file()


def test_a_file_without_a_dataset_is_refused(folder: Path) -> None:
    Path("empty.py").write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"empty\.py must define one subclass of .*DatasetSource, but it defines none"):
        get_source("./empty.py")
    with pytest.raises(InputError, match="no dataset 'pasc'; did you mean 'pacs'"):
        get_source("pasc")


def test_every_dataset_lists_images_loads_arrays_or_is_a_table() -> None:
    for name in SOURCES:
        source = get_source(name)
        assert [source.has_image_files, "load_arrays" in vars(type(source)), source.is_table].count(True) == 1, name


def test_minidigits_conforms() -> None:
    check_dataset("minidigits")
