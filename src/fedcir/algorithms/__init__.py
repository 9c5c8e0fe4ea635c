"""One file a method: `fedprox.py` holds `FedProx`, which is called "fedprox". There is no list to edit."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config, ConfigRequest, merge_tables
from fedcir.errors import InputError
from fedcir.plugins import find_only, find_plugin
from fedcir.validation import build_dataclass

PAPER_METHODS = ("centralized", "fedavg", "fedprox", "fedproc", "fedgen", "fedsr", "fedreg", "fedalign", "fedcir")
"""The methods of the paper's Table 1, in its order."""


def list_algorithms() -> list[str]:
    """List the names of the built-in methods."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "algorithm")


def find_algorithm(name: str) -> type[Algorithm]:
    """Find the class of a method by its name, by a file such as ./mine.py, or by entry point."""
    builtin = {method: partial(_import_algorithm, method) for method in list_algorithms()}
    return _check_fields(find_plugin("algorithm", name, builtin, _is_algorithm, EXPECTED), name)


def resolve_algorithm(algorithm: Algorithm | type[Algorithm] | str | Path) -> tuple[str, Algorithm]:
    """Return the name of a method in run folders and an instance, from an instance, a class, a name or a file."""
    if isinstance(algorithm, str | Path):
        return str(algorithm), find_algorithm(str(algorithm))()
    method: Any = algorithm
    if _is_algorithm(method):
        method = _check_fields(method, method.__name__)()
    if not isinstance(method, Algorithm):
        raise InputError(f"algorithm must be a method such as fedcir.FedAvg(), its name or its file, got {method!r}")
    return type(method).__name__.lower(), method


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Build the configured method and check its fields."""
    return build_dataclass(find_algorithm(config.name), config.fields, "algorithm")


def add_new_fields(config: AlgorithmConfig) -> AlgorithmConfig:
    """Give the fields that a method has gained since a run was written their defaults; a user's own method has none."""
    if config.name not in list_algorithms():
        return config
    defaults = {f.name: f.default for f in fields(find_algorithm(config.name)) if f.init}
    return replace(config, fields={**defaults, **config.fields})


def resolve_config(request: ConfigRequest, base: Mapping[str, Any] | None = None) -> Config:
    """Resolve a request with the defaults of its algorithm, which override the preset.

    `base` overrides those defaults, and the file overrides `base`. Tables are encoded by an mlp, or for a one-shot
    method not at all, and images with masks by a unet. A pretrained encoder keeps its norms unless the user replaces
    them: without its statistics it has to learn anew.
    """
    first = request.resolve(base)
    algorithm = find_algorithm(first.algorithm.name)
    defaults = {section: dict(values) for section, values in algorithm.defaults.items()}
    if first.data.name == "csv":
        defaults = merge_tables({"model": {"name": "linear" if algorithm.one_shot else "mlp"}}, defaults)
    if first.data.name == "masks" or first.task.name == "segmentation":
        defaults = merge_tables({"model": {"name": "unet"}}, defaults)
    if first.model.keeps_norm or first.model.pretrained or first.model.partial:
        defaults.get("model", {}).pop("norm", None)
    return limit_rounds(request.resolve(merge_tables(defaults, base or {})), algorithm)


def limit_rounds(config: Config, algorithm: Algorithm | type[Algorithm]) -> Config:
    """One round for a one-shot method, whatever server.rounds says: a file may hold settings of other methods too."""
    return replace(config, server=replace(config.server, rounds=1)) if algorithm.one_shot else config


EXPECTED = "one subclass of fedcir.Algorithm"


def _is_algorithm(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm)


def _import_algorithm(name: str) -> Any:
    return find_only(importlib.import_module(f"{__name__}.{name}"), _is_algorithm, name, EXPECTED)


def _check_fields(cls: type[Algorithm], name: str) -> type[Algorithm]:
    """Check that a class is a dataclass that can be made without an argument."""
    if vars(cls).get("__annotations__") and "__dataclass_params__" not in vars(cls):
        raise InputError(f"{name}: put @dataclass(frozen=True) above class {cls.__name__}")
    for field in fields(cls):
        if field.init and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{name}: give every field of class {cls.__name__} a default; {field.name} has none")
    return cls
