"""A user's own Python file, such as ./mine.py, as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fedcir.types import InputError

OWN = "fedcir_file_"
"""Begins the name of the module that a user's file is: never that of another."""


def import_file(path: Path, what: str) -> ModuleType:
    """Run the file, which holds `what`."""
    if not path.is_file():
        raise InputError(f"no {what} file {path}")
    name = f"{OWN}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
