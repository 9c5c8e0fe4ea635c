"""The options that mean the same in every command, and how they become a config."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from fedcir.config import Config

BETA = "Label skew; smaller values skew clients more."
SET = "Any of `fedcir settings`; may be repeated."


@dataclass
class Options:
    """Settings of a run; each one given wins over the TOML file, and --set wins over all."""

    config: Annotated[Path | None, typer.Argument(help="A TOML file of settings.")] = None
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset (`fedcir data list`).")] = None
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the dataset.")] = None
    image_size: Annotated[int | None, typer.Option(help="Pixels of a side; 128 by default for image files.")] = None
    preset: Annotated[str | None, typer.Option(help="The paper's settings for a dataset, such as pacs.")] = None
    model: Annotated[str | None, typer.Option(help="Network: cnn or resnet18.")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None
    local_steps: Annotated[int | None, typer.Option(help="SGD steps of a client in a round.")] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate of the clients.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Training images of a step.")] = None
    clients: Annotated[int | None, typer.Option(help="Number of clients to split the domains between.")] = None
    active: Annotated[int | None, typer.Option(help="Clients that train in a round; all by default.")] = None
    beta: Annotated[float | None, typer.Option(help=BETA)] = None
    hold_out: Annotated[str | None, typer.Option(help="Domain to test on but not to train on.")] = None
    workers: Annotated[int | None, typer.Option(help="Processes that train; by default one a core.")] = None
    device: Annotated[str | None, typer.Option(help="Where to train: auto, cpu, cuda or mps.")] = None
    eval_every: Annotated[int | None, typer.Option(help="Test after every so many rounds.")] = None
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is in --out.")] = False
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True
    track: Annotated[str | None, typer.Option(help="Log every round to tensorboard, wandb or mlflow.")] = None
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time went.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors and --json.")] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    set: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help=SET)] = None

    def to_config(
        self, algorithm: str | None = None, seed: int | None = None, under: Mapping[str, Any] | None = None
    ) -> "Config":
        """The settings of the preset, the file, the options and --set, in this order, over the defaults.

        `under` lies between the preset and the file.
        """
        from fedcir.config import config_from, merged
        from fedcir.presets import read_preset
        from fedcir.types import InputError

        preset = {} if self.preset is None else read_preset(self.preset)
        config = config_from(self.given(algorithm, seed, merged(preset, under or {})))
        if preset and config.data.name not in (preset["data"]["name"], *OWN_DATA):
            raise InputError(
                f"preset {self.preset!r} is for the dataset {preset['data']['name']}, not {config.data.name}: "
                "leave one of the two out"
            )
        return config

    def to_run(self, algorithm: str | None, seed: int | None, prefix: str = "") -> "tuple[Config, Path]":
        """The settings and the folder of one run. A resumed one has its own, over which the given ones count."""
        from fedcir.config import config_from, merged
        from fedcir.presets import read_preset
        from fedcir.records import RunFolder
        from fedcir.types import InputError

        if not self.resume:
            config = self.to_config(algorithm, seed)
            return config, self.out or unused(Path("runs", prefix + run_name(config)))
        if self.out is None:
            raise InputError("--resume continues the run in --out: name its folder")
        if not RunFolder(self.out).exists:
            raise InputError(f"{self.out} holds no run to continue: start one without --resume")
        preset = {} if self.preset is None else read_preset(self.preset)
        base = merged(saved_tables(RunFolder(self.out).config()), preset)
        return config_from(self.given(algorithm, seed, base)), self.out

    def given(
        self, algorithm: str | None = None, seed: int | None = None, under: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What the file, the options and --set say, as tables, over those given."""
        from fedcir.config import merged, parse_assignment, read_toml

        tables = merged(under or {}, {} if self.config is None else read_toml(self.config))
        given: dict[str, dict[str, Any]] = {}
        for option, place in PLACES.items():
            if (value := getattr(self, option)) is not None:
                section, name = place.split(".")
                given.setdefault(section, {})[name] = str(value) if isinstance(value, Path) else value
        if self.clients is not None or self.beta is not None:
            tables = merged({"partition": {"scheme": "dirichlet"}}, tables)  # unless the file says otherwise
        if algorithm is not None:
            given["algorithm"] = {"name": algorithm}
        if seed is not None:
            given["run"] = {**given.get("run", {}), "seed": seed}
        tables = merged(tables, given)
        for assignment in self.set or ():
            tables = merged(tables, parse_assignment(assignment))
        return tables


def run_name(config: "Config") -> str:
    return f"{config.data.name}-{Path(config.algorithm.name).stem}-{config.run.seed}"


def saved_tables(config: "Config") -> dict[str, Any]:
    """A run's settings, with the fields of its algorithm where both ways of naming one count over them."""
    from fedcir.config import config_tables

    tables: dict[str, Any] = config_tables(config)
    name = config.algorithm.name
    return {**tables, "algorithm": {"name": name}, "algorithms": {name: dict(config.algorithm.fields)}}


def unused(path: Path) -> Path:
    """This path, or the first with a number behind it where nothing lies yet."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not _in_use(each))


def latest(path: Path) -> Path:
    """The last of those that `unused` has given out, or the path itself."""
    free = unused(path)
    number = int(free.name.removeprefix(f"{path.name}-")) if free != path else 2
    return path if number <= 2 else path.with_name(f"{path.name}-{number - 1}")


def _in_use(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


OWN_DATA = ("arrays", "folders", "hub")
"""Datasets that hold anything, so that any preset may be tried on them."""

PLACES = {
    "dataset": "data.name",
    "data_root": "data.root",
    "image_size": "data.image_size",
    "model": "model.name",
    "rounds": "server.rounds",
    "local_steps": "local.steps",
    "lr": "local.lr",
    "batch_size": "local.batch_size",
    "clients": "partition.clients",
    "active": "server.active",
    "beta": "partition.beta",
    "hold_out": "partition.hold_out",
    "device": "run.device",
    "workers": "run.workers",
    "eval_every": "server.eval_every",
}
"""The settings that options stand for."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes every field of Options as its own parameter, and gets them as `options`."""
    hints = get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(Options)
    ]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "options"
    ]
    names = {f.name for f in dataclasses.fields(Options)}

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        options = Options(**{name: value for name, value in values.items() if name in names})
        command(options=options, **{name: value for name, value in values.items() if name not in names})

    expanded.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    del expanded.__wrapped__  # or the signature of the command itself is found
    return expanded
