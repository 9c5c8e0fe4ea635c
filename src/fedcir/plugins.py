"""Extensions by name, by file or by entry point: algorithms, datasets, aggregators and models are all found here.

An extension called NAME is, in this order: part of this package; the only suitable object in a file `./mine.py`
(or `./mine.py:attribute`, where a file defines several); or an entry point of the group `fedcir.<kind>s` of any
installed distribution, such as `fedcir.algorithms`.
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcir.errors import InputError, suggest_name

FILE_MODULE = "fedcir_file_"
"""Prefix of the module name of a user's file."""


def find_plugin(
    kind: str, name: str, builtin: Mapping[str, Callable[[], Any]], accepts: Callable[[Any], bool], expected: str
) -> Any:
    """Return the extension of a kind such as "algorithm" that a name, a file or an entry point refers to.

    `builtin` maps the names of this package to functions that load them, `accepts` says which objects are suitable,
    and `expected` describes a suitable object for errors, such as "one subclass of fedcir.Algorithm".
    """
    if (file := find_file(name)) is not None:
        module, attribute = import_file(file, kind), name.partition(".py:")[2]
        return get_attribute(module, attribute, name) if attribute else find_only(module, accepts, name, expected)
    if name in builtin:
        return builtin[name]()
    installed = entry_points(group=f"fedcir.{kind}s", name=name)
    if not installed:
        raise InputError(f"no {kind} {name!r}; {suggest_name(name, [*builtin, *list_entry_points(kind)])}")
    entry = next(iter(installed))
    try:
        plugin = entry.load()
    except Exception as error:
        raise InputError(f"{kind} {name!r} ({entry.value}) cannot be loaded: {error}") from error
    if not accepts(plugin):
        raise InputError(f"{kind} {name!r} ({entry.value}) must be {expected}, but it is {plugin!r}")
    return plugin


def find_file(name: str) -> Path | None:
    """Return the user's file that a name refers to, as ./mine.py and ./mine.py:attribute do; None if it is no file."""
    path, _, attribute = name.partition(".py:")
    return Path(f"{path}.py") if attribute else Path(name) if name.endswith(".py") else None


def is_file_plugin(name: str) -> bool:
    """Check whether a name refers to a user's file."""
    return find_file(name) is not None


def name_plugin(kind: str, plugin: type) -> str | None:
    """Return the name of a class from a user's file, mine.py:attribute, or of an entry point; None for others."""
    if plugin.__module__.startswith(FILE_MODULE):
        return f"{plugin.__module__.removeprefix(FILE_MODULE)}.py:{plugin.__qualname__}"
    value = f"{plugin.__module__}:{plugin.__qualname__}"
    return next((entry.name for entry in entry_points(group=f"fedcir.{kind}s") if entry.value == value), None)


def list_entry_points(kind: str) -> list[str]:
    """Return the names of the extensions of a kind that other installed distributions provide."""
    return sorted(entry_points(group=f"fedcir.{kind}s").names)


def find_only(module: ModuleType, accepts: Callable[[Any], bool], name: str, expected: str) -> Any:
    """Return the only suitable object that a module defines itself."""
    public = {key: value for key, value in vars(module).items() if not key.startswith("_") and accepts(value)}
    own = module.__name__
    suitable = {key: value for key, value in public.items() if getattr(value, "__module__", own) == own}
    if len({id(value) for value in suitable.values()}) != 1:
        raise InputError(f"{name} must define {expected}, but it defines {', '.join(suitable) or 'none'}")
    return next(iter(suitable.values()))


def get_attribute(module: ModuleType, path: str, name: str) -> Any:
    """Return an attribute of a module by its dotted path."""
    value: Any = module
    for part in path.split("."):
        if not hasattr(value, part):
            names = [key for key in dir(value) if not key.startswith("_")]
            hint = suggest_name(part, names) if names else "it is empty"
            raise InputError(f"{name.rpartition(':')[0]} has no {part!r}; {hint}")
        value = getattr(value, part)
    return value


def import_file(path: Path, kind: str) -> ModuleType:
    """Import a user's Python file, which defines an extension of a kind."""
    if not path.is_file():
        raise InputError(f"no {kind} file {path}")
    name = f"{FILE_MODULE}{path.stem}"
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


def list_imported_files() -> list[str]:
    """Return the users' files that were imported, as paths from the working directory."""
    files = [module.__file__ for name, module in sys.modules.items() if name.startswith(FILE_MODULE)]
    return [_shorten_path(file) for file in files if file is not None]


def locate_in_file(error: BaseException) -> str | None:
    """Return the line of a user's file that raised an exception, such as "./mine.py, line 12, in local_loss"."""
    location = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(FILE_MODULE):
            location = f"{_shorten_path(frame.f_code.co_filename)}, line {line}, in {frame.f_code.co_name}"
        elif module == "fedcir.server.replies":  # the user's server_step pulled replies, and a client failed
            location = None
    return location


def _shorten_path(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else f"./{path}"
