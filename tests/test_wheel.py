"""The package as others install it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_builds_installs_and_runs(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("fedcir-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedcir/py.typed", "fedcir/presets/pacs.toml", "fedcir/algorithms/fedcir.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "results/"))]
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    code = "import sys, fedcir.cli as c; assert 'site' in c.__file__; sys.argv = ['fedcir', 'algorithms']; c.main()"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "fedcir" in shown.stdout
