"""Settings: frozen dataclasses to and from TOML, and `--set section.field=value`.

A key that does not exist or a value of the wrong type is an error that names the nearest right one.
"""

import dataclasses
import difflib
import functools
import math
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints, is_typeddict

import tomli_w

from fedcir.types import InputError

T = TypeVar("T")

DEFAULT_ALGORITHM = "fedcir"

PATHS = {"data.root", "data.lists", "partition.file", "model.weights"}
"""Settings that tell of the user's machine."""


@dataclass(frozen=True)
class DataConfig:
    name: str = "minidigits"
    """The dataset; `fedcir data list` names them."""
    root: str | None = None
    """The folder that holds it."""
    lists: str | None = None
    """The folder of its official train and test lists, where it has them apart (pacs)."""
    image_size: int | None = None
    """Images are made squares of so many pixels; 128 if not given, and as they are for arrays and minidigits."""
    classes: tuple[str, ...] | None = None
    """Only these classes; all if not given. For domainnet the ten that the field uses, unless it says "all"."""
    columns: tuple[str, ...] = ("image", "label", "domain")
    """The columns of image, label and domain (hub)."""
    train_per_domain: int | None = None
    """At most this many training images a domain, classes in their shares."""
    test_fraction: float = 0.2
    """The share of each domain that is split off for testing where the dataset has no split of its own."""
    val_fraction: float = 0.0
    """The share of each domain's training images that is set aside to pick the best round on."""

    def __post_init__(self) -> None:
        require_at_least("data.train_per_domain", self.train_per_domain, 1)
        require_at_least("data.image_size", self.image_size, 1)
        if self.classes == ():
            raise InputError("data.classes names no class: give some, or leave it out")
        require_share("data.val_fraction", self.val_fraction)
        require_share("data.test_fraction", self.test_fraction)
        require_positive("data.test_fraction", self.test_fraction)


@dataclass(frozen=True)
class PartitionConfig:
    scheme: Literal["domain", "dirichlet", "iid", "csv"] = "domain"
    """One client a domain; Dirichlet(beta) over labels within each; all data spread evenly; or as a file says."""
    file: str | None = None
    """A CSV file with the columns path and client: who holds what (csv)."""
    clients: int | None = None
    """How many clients; one a domain if not given."""
    beta: float = 0.5
    """Dirichlet concentration of labels: smaller values give more skewed clients, 1e6 gives even ones."""
    hold_out: str | None = None
    """A domain that nobody trains on, and everybody is tested on."""
    min_samples: int = 1
    """Every client gets at least this many training images."""

    def __post_init__(self) -> None:
        require_at_least("partition.clients", self.clients, 1)
        require_positive("partition.beta", self.beta)
        if self.beta > 1e6:  # numpy's Dirichlet overflows far above
            raise InputError(f"partition.beta must be at most 1e6, which is as even as can be, got {self.beta}")
        require_at_least("partition.min_samples", self.min_samples, 1)
        if (self.scheme == "csv") != (self.file is not None):
            raise InputError("partition.scheme=csv and partition.file=FILE.csv go together: give both")
        if self.scheme == "csv" and self.clients is not None:
            raise InputError(
                f"partition.clients is {self.clients}, but {self.file} says who the clients are: leave it out"
            )


@dataclass(frozen=True)
class ModelConfig:
    name: Literal["cnn", "resnet18"] = "cnn"
    """The backbone: `cnn` for small images, `resnet18` as in the paper."""
    width: int | None = None
    """Channels of its first stage; 16 for cnn and 64 for resnet18 if not given."""
    latent: int | None = None
    """Dimensions of z in the probabilistic methods; as wide as the features if not given."""
    weights: str | None = None
    """A local file of weights to start from (.safetensors or torchvision's .pth); from scratch if not given."""
    norm: Literal["batch", "group"] = "batch"
    """BatchNorm, as in the paper, or GroupNorm, which keeps no running statistics."""
    batchnorm: Literal["average", "pooled", "local"] = "average"
    """Running statistics: averaged like weights, variances pooled with the spread of the means, or each site's own."""

    def __post_init__(self) -> None:
        require_at_least("model.width", self.width, 1)
        require_at_least("model.latent", self.latent, 1)


@dataclass(frozen=True)
class LocalConfig:
    steps: int = 20
    """SGD steps of a client in a round: E in the paper."""
    batch_size: int = 32
    """Training images of a step."""
    lr: float = 0.01
    """Learning rate of SGD."""
    momentum: float = 0.9
    """Momentum of SGD; it starts at zero each round."""
    weight_decay: float = 5e-4
    """Weight of the L2 penalty on all parameters."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate over the rounds."""
    augment: tuple[Literal["flip", "crop", "colour"], ...] = ()
    """Training images are changed at random: mirrored, cut, or in their colours. Not done in the paper."""

    def __post_init__(self) -> None:
        require_at_least("local.steps", self.steps, 1)
        require_at_least("local.batch_size", self.batch_size, 2)  # BatchNorm needs two
        require_positive("local.lr", self.lr)
        require_share("local.momentum", self.momentum)
        require_not_negative("local.weight_decay", self.weight_decay)


@dataclass(frozen=True)
class ServerConfig:
    rounds: int = 25
    """Rounds of training: in each, active clients train and the server averages."""
    active: int | None = None
    """Clients that train in a round; all if not given."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """The mean over clients: each the same, as in the paper, or by its number of samples."""
    eval_every: int = 1
    """Evaluate every so many rounds; the last is always evaluated."""
    min_replies: int = 1
    """A round with fewer usable replies ends the run."""
    checkpoint_every: int = 5
    """Save a checkpoint every so many rounds: a resume after a kill does the rounds since then again."""

    def __post_init__(self) -> None:
        for name in ("rounds", "active", "eval_every", "min_replies", "checkpoint_every"):
            require_at_least(f"server.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The method's name and its own fields, which its class checks."""

    name: str = DEFAULT_ALGORITHM
    """The method, or a file such as ./mine.py; `fedcir algorithms NAME` lists its own fields of this section."""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    seed: int = 0
    """Seed of everything random: equal seeds give equal bits."""
    workers: int | None = None
    """Processes that train on a CPU; as many as there are cores if not given. Results do not depend on it."""
    threads: int = 1
    """Torch threads of a training process: results depend on it, so it is saved."""
    device: str = "auto"
    """cpu, cuda, mps, or auto for the best there is."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Local steps in bfloat16 where torch's autocast deems it safe: for GPUs."""
    compile: bool = False
    """Whether torch.compile makes the encoder: slow to start, and results differ in the last bits."""
    layout: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of images and weights, from a fixed table by default: results depend on it, so it is saved."""

    def __post_init__(self) -> None:
        require_at_least("run.seed", self.seed, 0)
        require_at_least("run.threads", self.threads, 1)
        require_at_least("run.workers", self.workers, 1)


@dataclass(frozen=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    run: RunConfig = field(default_factory=RunConfig)


SECTIONS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}


def require_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")


def require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be a number above 0, got {value}")


def require_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name} must be a number of at least 0, got {value}")


def require_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InputError(f"{name} must be at least 0 and below 1, got {value}")


def nearest(name: str, choices: Iterable[str]) -> str:
    """The hint at the end of an error about a name: the nearest one if there is one, else all."""
    names = sorted(choices)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"


def build(cls: type[T], values: Mapping[str, Any], section: str) -> T:
    """A dataclass from a mapping: every key must be a field of the class and every value of its type."""
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            hint = nearest(name, fields) if fields else "it takes none"
            raise InputError(f"[{section}] has no field {name!r}; {hint}")
    for name, each in fields.items():
        if name not in values and each.default is each.default_factory is dataclasses.MISSING:
            raise InputError(f"{section}.{name} is missing")
    return cls(**{name: typed(value, hints[name], f"{section}.{name}") for name, value in values.items()})


def config_from(tables: Mapping[str, Any]) -> Config:
    """A config from nested tables as TOML gives them.

    `[algorithms.fedcir]` holds fields that count where the algorithm is fedcir: one file serves several methods.
    """
    sections: dict[str, Any] = {}
    for name, values in tables.items():
        if name == "fedcir":  # a run's config.toml says there which fedcir wrote it
            continue
        if name not in SECTIONS and name != "algorithms":
            raise InputError(f"no section [{name}]; {nearest(name, SECTIONS)}")
        if not isinstance(values, Mapping):
            raise InputError(f"{name} must be a section [{name}], got {values!r}")
        if name not in ("algorithm", "algorithms"):
            sections[name] = build(SECTIONS[name], values, name)
    chosen = dict(tables.get("algorithm", {}))
    algorithm = typed(chosen.pop("name", DEFAULT_ALGORITHM), str, "algorithm.name")
    own = tables.get("algorithms", {}).get(algorithm, {})
    if not isinstance(own, Mapping):
        raise InputError(f"algorithms.{algorithm} must be a section [algorithms.{algorithm}], got {own!r}")
    sections["algorithm"] = AlgorithmConfig(algorithm, {**own, **chosen})
    return Config(**sections)


def config_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The inverse of `config_from`; fields that are None are left out, since TOML has no such value."""
    tables = {
        name: {key: value for key, value in dataclasses.asdict(getattr(config, name)).items() if value is not None}
        for name in SECTIONS
    }
    tables["algorithm"] = {"name": config.algorithm.name, **config.algorithm.fields}
    return tables


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read the config {path}: {error}") from error


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
            raise InputError(f"{name} must be a section [{name}], got {result[name]!r}")
        else:
            result[name] = values
    return result


def parse_assignment(text: str) -> dict[str, Any]:
    """`local.lr=0.1` as tables. The value is read as TOML, and as a plain string where that fails."""
    key, equals, value = text.partition("=")
    *sections, name = key.strip().split(".")
    if not (equals and sections and all(sections) and name):
        raise InputError(f"--set takes section.field=value, got {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    tables: dict[str, Any] = {name: parsed["value"] if len(parsed) == 1 else value.strip()}
    for section in reversed(sections):
        tables = {section: tables}
    return tables


def typed(value: Any, hint: Any, name: str) -> Any:
    """A value read from a file if it is of the type, which may be nested; the error names the part that is not."""
    if type(value) is hint:  # nearly always, and files are read often
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
        raise InputError(f"{name} must be a list, got {value!r}")
    if inner is str and (number := next((each for each in value if not isinstance(each, str)), None)) is not None:
        raise InputError(f'{name} holds names, got {number!r}; write each in quotes, ["{number}", ...]')
    return tuple(typed(each, inner, name) for each in value)


def _single(value: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise InputError(f"{name} cannot be {value!r}; {nearest(str(value), get_args(hint))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1023 else math.copysign(math.inf, value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint not in (bool, object)):
        quote = f'; write it in quotes, "{value}"' if hint is str else ""
        raise InputError(f"{name} must be {_WORDS.get(hint, hint)}, got {reprlib.repr(value)}{quote}")
    return value


_hints = functools.cache(get_type_hints)

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
