"""Settings to and from nested tables, as TOML has them, and `section.field=value`.

A key that does not exist or a value of the wrong type is an error that names the nearest right one.
"""

import dataclasses
import functools
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

import tomli_w

from fedcir.config.bounds import shown
from fedcir.config.nearest import nearest
from fedcir.config.reading import read_text
from fedcir.config.settings import DEFAULT_ALGORITHM, PATHS, SECTIONS, AlgorithmConfig, Config
from fedcir.types import InputError

T = TypeVar("T")

LONGEST = 10_000_000
"""Bytes of a TOML file."""
DEEPEST = 32
"""Tables in tables, lists in lists."""


def build(cls: type[T], values: Mapping[str, Any], section: str) -> T:
    """A dataclass from a mapping: every key must be a field of the class and every value of its type."""
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            hint = nearest(name, fields) if fields else "it has no fields"
            raise InputError(f"[{section}] has no field {name!r}; {hint}")
    for name, each in fields.items():
        if name not in values and each.default is each.default_factory is dataclasses.MISSING:
            raise InputError(f"{section}.{name} is missing")
    return cls(**{name: typed(value, hints[name], f"{section}.{name}") for name, value in values.items()})


def config_from(tables: Mapping[str, Any]) -> Config:
    """A config from nested tables as TOML gives them.

    `[algorithms.fedcir]` holds fields that count where the algorithm is fedcir: one file serves several methods.
    """
    _check_plain(tables)
    sections: dict[str, Any] = {}
    for name, values in tables.items():
        if name == "fedcir":  # a run's config.toml says there which fedcir wrote it
            continue
        if name not in SECTIONS and name != "algorithms":
            raise InputError(f"no section [{name}]; {nearest(name, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise InputError(f"{name} must be a section [{name}], got {shown(values)}")
        if name not in ("algorithm", "algorithms"):
            sections[name] = build(SECTIONS[name], values, name)
    chosen = dict(tables.get("algorithm", {}))
    algorithm = typed(chosen.pop("name", DEFAULT_ALGORITHM), str, "algorithm.name")
    own = tables.get("algorithms", {}).get(algorithm, {})
    if not isinstance(own, Mapping):
        raise InputError(f"algorithms.{algorithm} must be a section [algorithms.{algorithm}], got {shown(own)}")
    sections["algorithm"] = AlgorithmConfig(algorithm, {**own, **chosen})
    return Config(**sections)


def config_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The inverse of `config_from`; fields that are None or an empty table are left out: TOML has no None."""
    tables = {
        name: {
            key: value for key, value in dataclasses.asdict(getattr(config, name)).items() if value not in (None, {})
        }
        for name in SECTIONS
    }
    tables["algorithm"] = {"name": config.algorithm.name, **config.algorithm.fields}
    return tables


def differing(one: Config, other: Config) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ, by section.field, a section's name first."""
    first, second = config_tables(one), config_tables(other)
    found = {}
    for section in first:
        for name in sorted(first[section].keys() | second[section].keys(), key=lambda name: (name != "name", name)):
            old, new = first[section].get(name), second[section].get(name)
            if old != new:
                found[f"{section}.{name}"] = old, new
    return found


def resolve_paths(tables: Mapping[str, Any], folder: str | Path = ".") -> dict[str, Any]:
    """Join every relative path among the settings to a folder."""
    resolved = dict(tables)
    for key in PATHS:
        section, name = key.split(".")
        values = resolved.get(section)
        if not isinstance(values, Mapping) or not isinstance(values.get(name), str):
            continue
        path = os.path.normpath(os.path.join(folder, values[name]))
        if key == "data.root" and values.get("name") == "hub" and not os.path.exists(path):
            continue  # the name of a dataset on the hub
        resolved[section] = {**values, name: path}
    return resolved


def absolute_paths(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for a file that fedcir writes, which may be read from any working directory."""
    return resolve_paths(tables, Path.cwd())


def read_settings(path: Path) -> dict[str, Any]:
    """The tables of a user's TOML file. Its relative paths are relative to the folder of the file."""
    tables = read_toml(path)
    # Earlier versions wrote paths relative to the working directory into the config.toml of a run.
    return tables if "fedcir" in tables else resolve_paths(tables, path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        tables = tomllib.loads(read_text(path, LONGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error
    _check_plain(tables)
    return tables


def _check_plain(tables: Mapping[str, Any]) -> None:
    """No nesting that Python cannot walk through, and no whole number beyond the 64 bits that TOML has."""
    level: list[tuple[str, Any]] = list(tables.items())
    for _ in range(DEEPEST):
        inside: list[tuple[str, Any]] = []
        for name, value in level:
            if isinstance(value, int) and abs(value) >= 2**63:
                raise InputError(f"{name} must be a whole number of at most 19 digits, got {shown(value)}")
            if isinstance(value, Mapping):
                inside += [(f"{name}.{key}", each) for key, each in value.items()]
            elif isinstance(value, list | tuple):
                inside += [(name, each) for each in value]
        level = inside
        if not level:
            return
    raise InputError(f"settings are nested at most {DEEPEST} deep: write [section] and field = value")


def dump_toml(tables: Mapping[str, Any]) -> str:
    return tomli_w.dumps(dict(tables))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables with the second's values over the first's. Naming another algorithm drops the first's fields."""
    result = {name: dict(values) if isinstance(values, Mapping) else values for name, values in base.items()}
    for name, values in over.items():
        if isinstance(values, Mapping) and isinstance(result.get(name), dict):
            old = result[name].get("name", DEFAULT_ALGORITHM)
            another = name == "algorithm" and values.get("name", old) != old
            result[name] = dict(values) if another else merged(result[name], values)
        elif isinstance(values, Mapping) and name in result:
            raise InputError(f"{name} must be a section [{name}], got {shown(result[name])}")
        else:
            result[name] = values
    return result


def parse_assignment(text: str) -> dict[str, Any]:
    """`local.lr=0.1` as tables. The value is read as TOML, and as a plain string where that fails."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"set takes section.field=value, got {text!r}")
    return assigned(key, toml_value(value.strip()))


def toml_value(text: str) -> Any:
    """A value as TOML reads it, else the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def assigned(key: str, value: Any) -> dict[str, Any]:
    """A setting such as `local.lr` and its value as tables."""
    *sections, name = key.strip().split(".")
    if not (sections and all(sections) and name) or len(sections) > DEEPEST:
        raise InputError(f"set takes section.field=value, got {shown(f'{key}={value}')}")
    tables: dict[str, Any] = {name: value}
    for section in reversed(sections):
        tables = {section: tables}
    return tables


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, such as {"local.lr": 0.1}, as tables."""
    tables: dict[str, Any] = {}
    for place, value in settings.items():
        tables = merged(tables, assigned(place, value))
    return tables


def typed(value: Any, hint: Any, name: str) -> Any:
    """A value read from a file if it is of the type, which may be nested; the error names the part that is not."""
    if type(value) is hint and (hint is not int or abs(value) < 2**63):  # nearly always, and files are read often
        return value
    if isinstance(hint, UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not NoneType)
        return None if value is None and NoneType in get_args(hint) else typed(value, inner, name)
    if dataclasses.is_dataclass(hint):
        return build(hint, typed(value, dict, name), name)  # type: ignore[arg-type]
    if is_typeddict(hint):
        hints = _hints(hint)
        if missing := sorted(hint.__required_keys__ - typed(value, dict, name).keys()):
            raise InputError(f"{name}.{missing[0]} is missing")
        return {key: typed(each, hints.get(key, object), f"{name}.{key}") for key, each in value.items()}
    return _several(value, hint, name) if get_origin(hint) in (dict, list, tuple) else _single(value, hint, name)


def _several(value: Any, hint: Any, name: str) -> Any:
    inner = get_args(hint)[-1 if get_origin(hint) is dict else 0]  # dict[str, X], list[X], tuple[X, ...]
    if get_origin(hint) is dict:
        return {key: typed(each, inner, f"{name}.{key}") for key, each in typed(value, dict, name).items()}
    if get_origin(hint) is list:
        return [typed(each, inner, f"{name}[{place}]") for place, each in enumerate(typed(value, list, name))]
    if isinstance(value, str):  # --set data.classes=cat,dog
        value = [each.strip() for each in value.split(",") if each.strip()]
    if not isinstance(value, list | tuple):
        raise InputError(f"{name} must be a list, got {shown(value)}")
    if inner is str and (number := next((each for each in value if not isinstance(each, str)), None)) is not None:
        said = shown(number)
        raise InputError(f'{name} must be a list of names, got {said}; write each in quotes, ["{said}", ...]')
    return tuple(typed(each, inner, name) for each in value)


def _single(value: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise InputError(f"{name} cannot be {shown(value)}; {nearest(shown(value).strip(_QUOTES), get_args(hint))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1023 else math.copysign(math.inf, value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint not in (bool, object)):
        quote = f'; write it in quotes, "{shown(value)}"' if hint is str and isinstance(value, int | float) else ""
        raise InputError(f"{name} must be {_WORDS.get(hint, hint)}, got {shown(value)}{quote}")
    if hint is int:  # and more than anything counts
        raise InputError(f"{name} must be a whole number of at most 19 digits, got {shown(value)}")
    return value


_QUOTES = "'\""
_hints = functools.cache(get_type_hints)

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
