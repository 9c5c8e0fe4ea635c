"""Code that a run folder names: a file of its author's, or a callable of any package with arguments of its choice.

Whoever opens the run of another must not run it unasked. Where the user trusts it, a file is the copy in the folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcir.config import Config, ModelConfig
from fedcir.types import InputError


def trusted(config: Config, folder: Path, trust_code: bool) -> Config:
    """The settings of a run, to build its algorithm and model by; refused if they name code that is not trusted."""
    algorithm = replace(config.algorithm, name=trusted_algorithm(config.algorithm.name, folder, trust_code))
    return replace(config, algorithm=algorithm, model=trusted_model(config.model, folder, trust_code))


def trusted_algorithm(name: str, folder: Path, trust_code: bool) -> str:
    if not name.endswith(".py"):
        return name
    _require(trust_code, folder, "algorithm", name)
    return str(folder / Path(name).name)


def trusted_model(model: ModelConfig, folder: Path, trust_code: bool) -> ModelConfig:
    if not model.foreign:
        return model
    _require(trust_code, folder, "model", model.name)
    return model if model.file is None else replace(model, name=str(folder / Path(model.name).name))


def resumed(saved: Config, given: Mapping[str, Any], folder: Path, trust_code: bool) -> Config:
    """The settings of a run to continue, where `given` tables override them. Code that the user names is his own."""
    if not given.get("algorithm", {}).get("name"):
        name = trusted_algorithm(saved.algorithm.name, folder, trust_code)
        saved = replace(saved, algorithm=replace(saved.algorithm, name=name))
    if not given.get("model", {}).get("name"):
        saved = replace(saved, model=trusted_model(saved.model, folder, trust_code))
    return saved


def names_code(config: Config) -> bool:
    return config.algorithm.name.endswith(".py") or config.model.foreign


def _require(trust_code: bool, folder: Path, what: str, name: str) -> None:
    if not trust_code:
        raise InputError(
            f"the {what} of {folder} is code of its own, {name}, which was not run: if you trust it, set trust_code"
        )
