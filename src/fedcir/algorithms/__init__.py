"""One file a method: `fedprox.py` holds `FedProx`, which is called "fedprox". There is no list to edit."""

import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Asked, Config, build, merged, nearest
from fedcir.config.own_file import OWN, import_file
from fedcir.types import InputError


def names() -> list[str]:
    """Every method that comes with the package."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "algorithm")


def algorithm_class(name: str) -> type[Algorithm]:
    """The class of a method by its name, or the one that a file such as ./mine.py defines."""
    if name.endswith(".py"):
        return _only_algorithm(import_file(Path(name), "algorithm"), name)
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


def add_new_fields(config: AlgorithmConfig) -> AlgorithmConfig:
    """Give the fields that a method has gained since a run was written their defaults; a user's own method has none."""
    if config.name not in names():
        return config
    defaults = {f.name: f.default for f in fields(algorithm_class(config.name)) if f.init}
    return replace(config, fields={**defaults, **config.fields})


def asked_config(asked: Asked, under: Mapping[str, Any] | None = None) -> Config:
    """The settings asked for, over the defaults of the method that they name, which count over a preset.

    `under` lies between those defaults and the file. A pretrained encoder keeps its norms unless the user replaces
    them: without its statistics it has to learn anew.
    """
    first = asked.config(under)
    defaults = {section: dict(values) for section, values in algorithm_class(first.algorithm.name).defaults.items()}
    if first.model.keeps_norm or first.model.pretrained:
        defaults.get("model", {}).pop("norm", None)
    return asked.config(merged(defaults, under or {}))


def own_files() -> list[str]:
    """The files of users' methods that are loaded, as one would name them here."""
    files = [module.__file__ for name, module in sys.modules.items() if name.startswith(OWN)]
    return [_as_named(file) for file in files if file is not None]


def line_of_own(error: BaseException) -> str | None:
    """Where in a user's file an exception comes from, `./mine.py, line 12, in local_loss`; None if from elsewhere."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OWN):
            place = f"{_as_named(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"
        elif module == "fedcir.engine.replies":  # a line that takes replies is not where clients went wrong
            place = None
    return place


def _as_named(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else f"./{path}"


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
