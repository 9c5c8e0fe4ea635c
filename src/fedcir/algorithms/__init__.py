"""One file a method: `fedprox.py` holds `FedProx`, which is called "fedprox". There is no list to edit."""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Asked, Config, build, merged, nearest
from fedcir.types import InputError

_OWN = "fedcir_file_"
"""Begins the name of the module that a user's file is: never that of another."""


def names() -> list[str]:
    """Every method that comes with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "algorithm")


def algorithm_class(name: str) -> type[Algorithm]:
    """The class of a method by its name, or the one that a file such as ./mine.py defines."""
    if name.endswith(".py"):
        return _only_algorithm(_import_file(Path(name)), name)
    if name not in names():
        raise InputError(f"no algorithm {name!r}; {nearest(name, names())}")
    return _only_algorithm(importlib.import_module(f"{__name__}.{name}"), name)


def named_algorithm(given: Algorithm | type[Algorithm] | str | Path) -> tuple[str, Algorithm]:
    """A method and what its runs call it, from an instance, its class, its name, or its file."""
    if isinstance(given, str | Path):
        return str(given), algorithm_class(str(given))()
    if isinstance(given, type) and issubclass(given, Algorithm):
        given = _with_defaults(given, given.__name__)()
    if not isinstance(given, Algorithm):
        raise InputError(f"algorithm must be an algorithm such as fedcir.FedAvg(), its name or its file, got {given!r}")
    return type(given).__name__.lower(), given


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The configured method, its fields checked."""
    return build(algorithm_class(config.name), config.fields, "algorithm")


def asked_config(asked: Asked, under: Mapping[str, Any] | None = None) -> Config:
    """The settings asked for, over the defaults of the method that they name, which count over a preset.

    `under` lies between those defaults and the file.
    """
    chosen = asked.config(under).algorithm.name
    return asked.config(merged(algorithm_class(chosen).defaults, under or {}))


def own_files() -> list[str]:
    """The files of users' methods that are loaded, as one would name them here."""
    files = [module.__file__ for name, module in sys.modules.items() if name.startswith(_OWN)]
    return [_as_named(file) for file in files if file is not None]


def line_of_own(error: BaseException) -> str | None:
    """Where in a user's file an exception comes from, `./mine.py, line 12, in local_loss`; None if from elsewhere."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_OWN):
            place = f"{_as_named(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"
        elif module == "fedcir.engine.replies":  # a line that takes replies is not where clients went wrong
            place = None
    return place


def _as_named(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else f"./{path}"


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"no algorithm file {path}")
    name = f"{_OWN}{path.stem}"
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


def _only_algorithm(module: ModuleType, name: str) -> type[Algorithm]:
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Algorithm) and member.__module__ == module.__name__
    ]
    if len(found) != 1:
        what = ", ".join(cls.__name__ for cls in found) or "none"
        raise InputError(f"{name} must define one subclass of fedcir.Algorithm, but it defines {what}")
    if vars(found[0]).get("__annotations__") and "__dataclass_params__" not in vars(found[0]):
        raise InputError(f"{name}: put @dataclass(frozen=True) above class {found[0].__name__}")
    return _with_defaults(found[0], name)


def _with_defaults(cls: type[Algorithm], name: str) -> type[Algorithm]:
    """The class, which can be made without an argument."""
    for field in fields(cls):
        if field.init and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{name}: give every field of class {cls.__name__} a default; {field.name} has none")
    return cls
