"""The package as others install it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


UNDECLARED = {"click", "umap-learn"}
"""Typer's own, named in annotations only; and what a user is told to install for one picture."""


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {*project["dependencies"], *(item for some in project["optional-dependencies"].values() for item in some)}
    declared = {re.split(r"[^\w-]", item)[0].lower() for item in needed} | UNDECLARED
    modules = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(str(node.module).split(".")[0])
    known = {"umap": ["umap-learn"], **packages_distributions()}
    for module in sorted(modules - sys.stdlib_module_names - {"fedcir"}):
        names = {name.lower().replace("_", "-") for name in known[module]}
        assert names & declared, f"{module} is of {names}: declare it in pyproject.toml"


@pytest.mark.slow
def test_the_wheel_builds_installs_and_runs(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("fedcir-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedcir/py.typed", "fedcir/config/presets/pacs.toml", "fedcir/algorithms/fedcir.py"} <= set(names)
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


@pytest.mark.slow
def test_the_template_of_a_weights_wheel_is_a_model_by_its_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("setuptools")
    source = shutil.copytree(ROOT / "examples" / "weights_wheel", tmp_path / "source")
    config = transformers.ViTConfig(num_hidden_layers=1, hidden_size=12, num_attention_heads=2, image_size=16)
    transformers.ViTModel(config).save_pretrained(source / "fedcir_dinov2_small" / "weights")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source], check=True)
    wheel = tmp_path / "fedcir_dinov2_small-1.0-py3-none-any.whl"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel], check=True)
    settings = ["model.freeze=true", "model.native_size=true", "data.train_per_domain=20"]
    command = ["run", "--model", "dinov2-small", "--algorithm", "fedcirone", *(f"--set={text}" for text in settings)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path / 'site'}"}
    subprocess.run(
        [sys.executable, "-m", "fedcir", *command, "--out", tmp_path / "run"], env=environment, check=True, timeout=600
    )
    assert b'"name": "hf"' in (tmp_path / "run" / "model.safetensors").read_bytes().replace(b"\\", b"")
