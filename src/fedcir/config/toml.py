"""Conversion of settings to and from nested tables, TOML files and `section.field=value`.

An unknown key or a value of the wrong type is an error that names the closest valid one.
"""

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedcir.config.schema import DEFAULT_ALGORITHM, HUGGING_FACE, PATH_SETTINGS, SECTIONS, AlgorithmConfig, Config
from fedcir.errors import InputError, suggest_name
from fedcir.files import read_text
from fedcir.validation import build_dataclass, check_type, format_value

MAX_TOML_BYTES = 10_000_000
"""Largest TOML file in bytes."""
MAX_DEPTH = 32
"""Deepest nesting of tables and lists."""


def config_from_tables(tables: Mapping[str, Any]) -> Config:
    """Build a config from nested tables.

    `[algorithms.fedcir]` holds fields that apply if the algorithm is fedcir, so that one file serves several methods.
    """
    _check_plain(tables)
    sections: dict[str, Any] = {}
    for name, values in tables.items():
        if name == "fedcir":  # a run's config.toml says there which fedcir wrote it
            continue
        if name not in SECTIONS and name != "algorithms":
            raise InputError(f"no section [{name}]; {suggest_name(name, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise InputError(f"{name} must be a section [{name}], got {format_value(values)}")
        if name not in ("algorithm", "algorithms"):
            sections[name] = build_dataclass(SECTIONS[name], values, name)
    chosen = dict(tables.get("algorithm", {}))
    algorithm = check_type(chosen.pop("name", DEFAULT_ALGORITHM), str, "algorithm.name")
    method = tables.get("algorithms", {}).get(algorithm, {})
    if not isinstance(method, Mapping):
        section = f"algorithms.{algorithm}"
        raise InputError(f"{section} must be a section [{section}], got {format_value(method)}")
    sections["algorithm"] = AlgorithmConfig(algorithm, {**method, **chosen})
    return Config(**sections)


def config_to_tables(config: Config) -> dict[str, dict[str, Any]]:
    """Convert a config to tables; fields that are None or empty are left out, since TOML has no None."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    tables = {
        name: {key: value for key, value in values.items() if value not in (None, {})}
        for name, values in sections.items()
    }
    tables["algorithm"] = {"name": config.algorithm.name, **config.algorithm.fields}
    return tables


def find_differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return the old and new values of the settings in which two configs differ, by section.field."""
    second, differences = config_to_tables(after), {}
    for section, first in config_to_tables(before).items():
        for name in sorted(first.keys() | second[section].keys(), key=lambda name: (name != "name", name)):
            if (old := first.get(name)) != (new := second[section].get(name)):
                differences[f"{section}.{name}"] = old, new
    return differences


def join_paths(tables: Mapping[str, Any], folder: str | Path = ".") -> dict[str, Any]:
    """Join every relative path among the settings to a folder."""
    resolved = dict(tables)
    for key in PATH_SETTINGS:
        section, name = key.split(".")
        values = resolved.get(section)
        if isinstance(values, Mapping) and isinstance(values.get(name), str):
            path = os.path.normpath(os.path.join(folder, values[name]))
            is_hub_name = key == "data.root" and values.get("name") == "hub" and not os.path.exists(path)
            resolved[section] = values if is_hub_name else {**values, name: path}
    model, prefix = resolved.get("model"), f"{HUGGING_FACE}:"
    if isinstance(model, Mapping) and str(model.get("name")).startswith(prefix):
        path = os.path.normpath(os.path.join(folder, model["name"].removeprefix(prefix)))
        resolved["model"] = {**model, "name": prefix + path}
    return resolved


def make_paths_absolute(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Make the paths among settings absolute, for a file that is read from another working directory."""
    return join_paths(tables, Path.cwd())


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a user's TOML file. Its relative paths are relative to the folder of the file."""
    tables = read_toml(path)
    # Earlier versions wrote paths relative to the working directory into the config.toml of a run.
    return tables if "fedcir" in tables else join_paths(tables, path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file."""
    try:
        tables = tomllib.loads(read_text(path, MAX_TOML_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error
    _check_plain(tables)
    return tables


def list_presets() -> list[str]:
    """List the presets: the paper's settings, one TOML file for each dataset."""
    return sorted(file.stem for file in Path(__file__).with_name("presets").glob("*.toml"))


def read_preset(name: str | None) -> dict[str, Any]:
    """Read the tables of a preset; they are empty without a name."""
    if name is None:
        return {}
    if name not in list_presets():
        raise InputError(f"there is no preset {name!r}; {suggest_name(name, list_presets())}")
    return read_toml(Path(__file__).with_name("presets") / f"{name}.toml")


def _check_plain(tables: Mapping[str, Any]) -> None:
    """Refuse deep nesting, and whole numbers beyond the 64 bits of TOML."""
    nested: list[tuple[str, Any, int]] = [("", tables, 0)]
    while nested:
        name, value, depth = nested.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"settings are nested at most {MAX_DEPTH} deep: write [section] and field = value")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise InputError(f"{name} must be a whole number of at most 19 digits, got {format_value(value)}")
        if isinstance(value, Mapping):
            nested += [(f"{name}.{key}".removeprefix("."), item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            nested += [(name, item, depth + 1) for item in value]


def dump_toml(tables: Mapping[str, Any]) -> str:
    return tomli_w.dumps(dict(tables))


def merge_tables(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables, `overrides` taking precedence. Naming another algorithm drops the fields of the one in `base`."""
    result = {name: dict(values) if isinstance(values, Mapping) else values for name, values in base.items()}
    for name, values in overrides.items():
        if isinstance(values, Mapping) and isinstance(result.get(name), dict):
            old = result[name].get("name", DEFAULT_ALGORITHM)
            another = name == "algorithm" and values.get("name", old) != old
            if name == "model" and str(values.get("name")).startswith(f"{HUGGING_FACE}:"):  # it names the weights
                result[name].pop("weights", None)
            result[name] = dict(values) if another else merge_tables(result[name], values)
        elif isinstance(values, Mapping) and name in result:
            raise InputError(f"{name} must be a section [{name}], got {format_value(result[name])}")
        else:
            result[name] = values
    return result


def parse_assignment(text: str) -> dict[str, Any]:
    """Parse `local.lr=0.1`. The value is read as TOML, or as a plain string if it is not TOML."""
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"set takes section.field=value, got {text!r}")
    return assignment_to_tables(key, parse_toml_value(value.strip()))


def parse_toml_value(text: str) -> Any:
    """Parse a TOML value; return the text itself if it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def assignment_to_tables(key: str, value: Any) -> dict[str, Any]:
    """Convert a setting such as `local.lr` and its value to tables."""
    *sections, name = key.strip().split(".")
    if not (sections and all(sections) and name) or len(sections) > MAX_DEPTH:
        raise InputError(f"set takes section.field=value, got {format_value(f'{key}={value}')}")
    tables: dict[str, Any] = {name: value}
    for section in reversed(sections):
        tables = {section: tables}
    return tables


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings by name, such as {"local.lr": 0.1}, to tables."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        tables = merge_tables(tables, assignment_to_tables(name, value))
    return tables
