"""What make installs for what, told by make itself."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("Makefile", "pyproject.toml", "constraints.txt")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def installed(target: str, clone: Path) -> list[str]:
    """What pip would be asked for."""
    message = subprocess.run(["make", "-n", target], cwd=clone, check=True, capture_output=True, text=True).stdout
    return re.findall(r"pip install .*--editable '?([^'\s]+)", message)


def test_make_run_installs_no_extras_and_make_test_adds_them(clone: Path) -> None:
    assert installed("run", clone) == ["."]
    assert installed("test", clone) == [".", ".[dev]"]


def test_make_installs_nothing_twice(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".run-ready").touch()
    assert installed("run", clone) == []
    assert installed("check", clone) == [".[dev]"]
    (clone / ".venv" / ".ready").touch()
    assert installed("run", clone) + installed("check", clone) == []
