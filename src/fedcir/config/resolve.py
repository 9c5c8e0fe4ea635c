"""A request (preset, file, options and assignments) and how it becomes a config; ranges of values to search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from fedcir.config import toml
from fedcir.config.schema import PATH_SETTINGS, SECTIONS, Config
from fedcir.errors import InputError, suggest_name
from fedcir.validation import strip_optional


@dataclass(frozen=True)
class Option:
    """A command-line option that stands for a setting."""

    setting: str
    """Name of the setting, such as local.lr."""
    help: str

    @property
    def type(self) -> type:
        """Type of the option: a path, or that of the field; a choice among names is a string."""
        if self.setting in PATH_SETTINGS:
            return Path
        section, name = self.setting.split(".")
        hint = strip_optional(get_type_hints(SECTIONS[section])[name])
        return str if get_origin(hint) is Literal else hint


OPTIONS = {
    "algorithm": Option("algorithm.name", "Algorithm, or a file (./mine.py). [default: fedcirplus]"),
    "seed": Option("run.seed", "Seed of all random choices. [default: 0]"),
    "dataset": Option("data.name", "Name of the dataset; see `fedcir data list`."),
    "data_root": Option("data.root", "Folder that holds the dataset."),
    "image_size": Option("data.image_size", "Image width and height; 128 by default for files."),
    "model": Option(
        "model.name", "Network: cnn, resnet18, efficientnet-lite0, hf:DIR, or a callable, as in ./mine.py:make."
    ),
    "norm": Option("model.norm", "Normalisation: batch, group, invariant or standardised."),
    "rounds": Option("server.rounds", "Number of training rounds."),
    "local_steps": Option("local.steps", "SGD steps per client and round."),
    "lr": Option("local.lr", "Learning rate of the clients."),
    "batch_size": Option("local.batch_size", "Training images per SGD step."),
    "prior": Option("local.prior", "Correction for label skew: none or client."),
    "clients": Option("partition.clients", "Number of clients to divide the domains among."),
    "active": Option("server.active", "Clients that train in each round; all by default."),
    "beta": Option("partition.beta", "Label skew: smaller values skew clients more."),
    "hold_out": Option("partition.hold_out", "Domain to test on but not to train on."),
    "workers": Option("run.workers", "Processes that train; one per core by default."),
    "device": Option("run.device", "Where to train: auto, cpu, cuda or mps."),
    "eval_every": Option("server.eval_every", "Test every N rounds."),
    "keep": Option("server.keep", "Model to save: of the last round, or of the best on validation images."),
}
"""Options by name, in the order of the help."""


@dataclass(frozen=True)
class NumberRange:
    """All numbers from `low` to `high`, both included."""

    low: float
    high: float
    whole: bool = False
    """Only whole numbers."""

    @property
    def log(self) -> bool:
        """Whether to search on a logarithmic scale: numbers above 0 that span at least a factor of ten."""
        return self.low > 0 and self.high >= 10 * self.low

    @property
    def ends(self) -> tuple[Any, ...]:
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def rounded(self, value: float) -> float:
        """Round a value to three digits, within the range."""
        return value if self.whole else min(max(float(f"{value:.3g}"), self.low), self.high)

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.12g}..{self.high:.12g}"


@dataclass(frozen=True)
class Choices:
    """A few values."""

    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """All values, since each must be valid by itself."""
        return self.values

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ",".join(str(value).lower() if isinstance(value, bool) else f"{value}" for value in self.values)


SearchRange = NumberRange | Choices


def parse_range(text: str, setting: str) -> SearchRange:
    """Parse `0.1,0.5` or `0.01..1`; `setting` is the name for errors."""
    low, dots, high = text.partition("..")
    if not dots:
        values = tuple(toml.parse_toml_value(item.strip()) for item in text.split(",") if item.strip())
        if not values:
            raise InputError(f"{setting} has no value to try: write {setting}=0.1,0.5 or {setting}=0.01..1")
        return Choices(tuple(dict.fromkeys(values)))
    try:
        span = NumberRange(float(low), float(high))
    except ValueError:
        raise InputError(f"{setting}={text} is no range: write two numbers, such as {setting}=0.001..0.1") from None
    if not (math.isfinite(span.low) and math.isfinite(span.high) and span.low < span.high):
        raise InputError(f"{setting}={text} is no range: its first number must be below its second")
    return span


Assignments = Sequence[str] | Mapping[str, Any]
"""Assignments of settings, such as `local.lr=0.1`, or {"local.lr": 0.1}."""

USER_DATASETS = ("arrays", "folders", "hub", "table")
"""Names for the user's own data, with which any preset may be used."""


@dataclass(frozen=True)
class ConfigRequest:
    """Settings requested by a user. Each field overrides the one before it."""

    preset: str | None = None
    file: Path | None = None
    """A TOML file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values by the names of OPTIONS; None means not given."""
    assignments: Assignments = ()
    saved: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the request that is resumed, as tables; the file and all below override them."""

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any],
        preset: str | None = None,
        config: str | Path | None = None,
        set: Assignments = (),
        without: Sequence[str] = (),
    ) -> "ConfigRequest":
        """Make a request from keyword arguments. Options in `without` are not accepted."""
        allowed = [name for name in OPTIONS if name not in without]
        if wrong := next((name for name in options if name not in allowed), None):
            raise InputError(f"no option {wrong!r}; {suggest_name(wrong, allowed)}")
        if isinstance(set, str):
            raise InputError(f"set takes a dict or a list of assignments, got {set!r}")
        return cls(preset, None if config is None else Path(config), options, set)

    def with_options(self, **options: Any) -> "ConfigRequest":
        """Return a request with some options replaced."""
        return replace(self, options={**self.options, **options})

    def resolve(self, base: Mapping[str, Any] | None = None) -> Config:
        """Build the config; the tables `base` come between the preset and the file."""
        preset = toml.read_preset(self.preset)
        config = toml.config_from_tables(self.tables(toml.merge_tables(preset, base or {})))
        given, meant = config.data.name, preset.get("data", {}).get("name")
        if preset and given not in (meant, *USER_DATASETS):
            raise InputError(f"preset {self.preset!r} is for the dataset {meant}, not {given}: leave out one of them")
        return config

    def resolve_over(self, saved: Config) -> Config:
        """Build the config of a resumed run: its saved settings, overridden by this request."""
        name = saved.algorithm.name
        # Both ways of setting a field of the algorithm override [algorithms.NAME].
        algorithm: dict[str, Any] = {"algorithm": {"name": name}, "algorithms": {name: dict(saved.algorithm.fields)}}
        base = toml.merge_tables({**toml.config_to_tables(saved), **algorithm}, toml.read_preset(self.preset))
        return toml.config_from_tables(self.tables(base))

    def tables(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Merge the file, the options and the assignments over the tables `base`."""
        tables = toml.merge_tables(base or {}, self.saved)
        tables = toml.merge_tables(tables, {} if self.file is None else toml.read_config_file(self.file))
        options = {name: value for name, value in self.options.items() if value is not None}
        if "clients" in options or "beta" in options:
            tables = toml.merge_tables({"partition": {"scheme": "dirichlet"}}, tables)  # unless the file says otherwise
        for name, value in options.items():
            section, field = OPTIONS[name].setting.split(".")
            tables = toml.merge_tables(tables, {section: {field: str(value) if isinstance(value, Path) else value}})
        if isinstance(self.assignments, Mapping):
            assigned = [toml.assignment_to_tables(name, value) for name, value in self.assignments.items()]
        else:
            assigned = [toml.parse_assignment(text) for text in self.assignments]
        for assignment in assigned:
            tables = toml.merge_tables(tables, assignment)
        return tables
