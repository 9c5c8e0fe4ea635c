"""The public names of fedcir: every method, for callers and for editors."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedcir
from fedcir.algorithms import find_algorithm, list_algorithms

SOURCE = Path(fedcir.__file__).parents[1]
METHODS = {find_algorithm(name).__name__ for name in list_algorithms()}


def in_a_process_of_its_own(code: str, source: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout


def test_dir_lists_every_method_and_imports_no_torch() -> None:
    code = "import sys, fedcir; print(*dir(fedcir)); assert 'torch' not in sys.modules"
    listed = in_a_process_of_its_own(code, SOURCE).split()
    assert set(listed) >= METHODS
    assert listed == sorted(fedcir.__all__)


@pytest.mark.slow
def test_a_new_file_in_algorithms_is_exported_by_itself(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "fedcir", tmp_path / "fedcir", ignore=shutil.ignore_patterns("__pycache__"))
    method = 'from fedcir.algorithms.algorithm import Algorithm\n\n\nclass FedNew(Algorithm):\n    """New."""\n'
    (tmp_path / "fedcir" / "algorithms" / "fednew.py").write_text(method, encoding="utf-8")
    code = "import fedcir; assert 'FedNew' in dir(fedcir); from fedcir import *; print(FedNew.__module__)"
    assert in_a_process_of_its_own(code, tmp_path) == "fedcir.algorithms.fednew\n"


def test_what_editors_are_told_is_what_is_exported() -> None:
    tree = ast.parse((SOURCE / "fedcir" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {name: getattr(importlib.import_module(str(module)), str(name)) for name, module in declared.items()} == {
        name: getattr(fedcir, str(name)) for name in declared
    }
    assert METHODS <= declared.keys() <= set(fedcir.__all__)
