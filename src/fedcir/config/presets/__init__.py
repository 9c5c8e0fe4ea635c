"""The settings of the paper, one TOML file a dataset: what all methods share, and each method's own fields."""

import tomllib
from importlib.resources import files
from typing import Any

from fedcir.errors import InputError, suggest_name


def names() -> list[str]:
    return sorted(file.name.removesuffix(".toml") for file in files(__name__).iterdir() if file.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """A preset's tables, to be laid under the user's own."""
    if name not in names():
        raise InputError(f"there is no preset {name!r}; {suggest_name(name, names())}")
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))
