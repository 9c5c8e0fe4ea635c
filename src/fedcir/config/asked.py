"""What a user asked for: a preset, a file, options and assignments, over the defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcir.config.nearest import nearest
from fedcir.config.options import OPTIONS
from fedcir.config.presets import read_preset
from fedcir.config.settings import Config
from fedcir.config.tables import assigned, config_from, config_tables, merged, parse_assignment, read_settings
from fedcir.types import InputError

Assignments = Sequence[str] | Mapping[str, Any]
"""Such as `local.lr=0.1`, or {"local.lr": 0.1}."""

OWN_DATA = ("arrays", "folders", "hub", "table")
"""Datasets of the user's own, on which any preset may be tried."""


@dataclass(frozen=True)
class Asked:
    """Settings of a run. Each kind overrides the one before it."""

    preset: str | None = None
    file: Path | None = None
    """A TOML file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """By the names of OPTIONS; None means not given."""
    assignments: Assignments = ()
    saved: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the request that is resumed, as tables; the file and all below override them."""

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        preset: str | None = None,
        config: str | Path | None = None,
        set: Assignments = (),
        without: Sequence[str] = (),
    ) -> "Asked":
        """What a caller from Python gave by name. `without` are options that it gives in another way."""
        known = [name for name in OPTIONS if name not in without]
        if wrong := next((name for name in options if name not in known), None):
            raise InputError(f"no option {wrong!r}; {nearest(wrong, known)}")
        if isinstance(set, str):
            raise InputError(f"set takes a dict or a list of assignments, got {set!r}")
        return cls(preset, None if config is None else Path(config), options, set)

    def over(self, **options: Any) -> "Asked":
        """The same with other options over these."""
        return replace(self, options={**self.options, **options})

    def config(self, under: Mapping[str, Any] | None = None) -> Config:
        """The settings asked for; `under` lies between the preset and the file."""
        preset = {} if self.preset is None else read_preset(self.preset)
        config = config_from(self.tables(merged(preset, under or {})))
        if preset and config.data.name not in (preset["data"]["name"], *OWN_DATA):
            raise InputError(
                f"preset {self.preset!r} is for the dataset {preset['data']['name']}, not {config.data.name}: "
                "leave out the preset or the dataset"
            )
        return config

    def config_over(self, saved: Config) -> Config:
        """A run's saved settings, overridden by those asked for."""
        name = saved.algorithm.name
        # The fields of its algorithm lie where both ways of setting one override them.
        own: dict[str, Any] = {"algorithm": {"name": name}, "algorithms": {name: dict(saved.algorithm.fields)}}
        preset = {} if self.preset is None else read_preset(self.preset)
        return config_from(self.tables(merged({**config_tables(saved), **own}, preset)))

    def tables(self, under: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the file, the options and the assignments say, over other tables."""
        tables = merged(under or {}, self.saved)
        tables = merged(tables, {} if self.file is None else read_settings(self.file))
        options = {name: value for name, value in self.options.items() if value is not None}
        if "clients" in options or "beta" in options:
            tables = merged({"partition": {"scheme": "dirichlet"}}, tables)  # unless the file says otherwise
        for name, value in options.items():
            section, field = OPTIONS[name].place.split(".")
            tables = merged(tables, {section: {field: str(value) if isinstance(value, Path) else value}})
        said = self.assignments
        pairs = said.items() if isinstance(said, Mapping) else ()
        texts = () if isinstance(said, Mapping) else said
        for each in [*(assigned(*pair) for pair in pairs), *map(parse_assignment, texts)]:
            tables = merged(tables, each)
        return tables
