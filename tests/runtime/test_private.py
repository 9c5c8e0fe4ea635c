"""Who may read what a run leaves: its owner alone, unless a folder was opened to others before."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedcir.config import Config, DataConfig
from fedcir.data.opening import open_dataset
from fedcir.files import write_file


@pytest.fixture(params=[0o000, 0o022], ids=["umask 000", "umask 022"], autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, set[int]]:
    """Those of all folders and of all files in it, itself included."""
    result: dict[str, set[int]] = {"folders": set(), "files": set()}
    for path in (folder, *folder.rglob("*")):
        result["folders" if path.is_dir() else "files"].add(stat.S_IMODE(path.stat().st_mode))
    return result


def test_a_run_is_its_owners_alone(tiny: Callable[..., Config], train: Callable[..., Path], tmp_path: Path) -> None:
    few = ("server.rounds=1", "local.steps=1", "run.workers=1", "data.val_fraction=0.2")
    run = train(tiny("fedbn", *few), tmp_path / "runs" / "mine")
    assert modes(run) == {"folders": {0o700}, "files": {0o600}}


@pytest.fixture
def images(tmp_path: Path) -> DataConfig:
    for number, folder in enumerate((d, c, f"{n}.png") for d in "ab" for c in "xy" for n in range(4)):
        path = tmp_path.joinpath("data", *folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(path)
    return DataConfig("folders", str(tmp_path / "data"), image_size=8)


def test_decoded_images_are_their_owners_alone(
    images: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    open_dataset(images, 0)
    assert modes(tmp_path / "cache") == {"folders": {0o700}, "files": {0o600}}


def test_a_cache_that_a_team_shares_stays_shared(
    images: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o755)
    monkeypatch.setenv("FEDCIR_CACHE", str(tmp_path / "cache"))
    open_dataset(images, 0)
    assert modes(tmp_path / "cache") == {"folders": {0o755}, "files": {0o644}}


def test_a_file_elsewhere_is_as_open_as_its_folder(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site").chmod(0o755)
    write_file(tmp_path / "site" / "report.html", "page")
    assert modes(tmp_path / "site") == {"folders": {0o755}, "files": {0o644}}


def test_the_unit_in_the_docs_is_the_one_that_is_shipped_and_keeps_files_private() -> None:
    root = Path(__file__).parents[2]
    unit = (root / "deploy" / "fedcir-site.service").read_text()
    assert f"```ini\n{unit}```" in (root / "docs" / "deploy-site.md").read_text()
    lines = unit.splitlines()
    assert {"UMask=0077", "NoNewPrivileges=true", "ProtectHome=true", "ProtectSystem=strict"} <= set(lines)
    assert any(line.startswith("MemoryMax=") for line in lines)
