"""The options that mean the same in every command, and how they become a config."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from fedcir.config import Config


@dataclass
class Options:
    """Settings of a run; each one given wins over the TOML file, and --set wins over all."""

    config: Annotated[Path | None, typer.Argument(help="A TOML file of settings.", show_default=False)] = None
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset (`fedcir data list`).")] = None
    data_root: Annotated[Path | None, typer.Option(help="Folder that holds the dataset.")] = None
    image_size: Annotated[int | None, typer.Option(help="Pixels of a side; 128 by default for image files.")] = None
    preset: Annotated[str | None, typer.Option(help="Settings of the paper for a dataset, such as pacs.")] = None
    model: Annotated[str | None, typer.Option(help="Backbone: cnn or resnet18.")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None
    local_steps: Annotated[int | None, typer.Option(help="SGD steps of a client in a round.")] = None
    clients: Annotated[int | None, typer.Option(help="Number of clients; domains are split between them.")] = None
    active: Annotated[int | None, typer.Option(help="Clients that train in a round; all by default.")] = None
    beta: Annotated[float | None, typer.Option(help="Dirichlet label skew within a domain; small is skewed.")] = None
    hold_out: Annotated[str | None, typer.Option(help="Domain that is tested on but not trained on.")] = None
    workers: Annotated[int | None, typer.Option(help="Processes that train; as many as cores by default.")] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")] = None
    eval_every: Annotated[int | None, typer.Option(help="Evaluate every so many rounds.")] = None
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is in --out.")] = False
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True
    track: Annotated[str | None, typer.Option(help="Tell tensorboard, wandb or mlflow of every round.")] = None
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time went.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    set: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting; may be repeated.")
    ] = None

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
        config = config_from(merged(merged(preset, under or {}), self.given(algorithm, seed)))
        if preset and config.data.name not in (preset["data"]["name"], *OWN_DATA):
            raise InputError(
                f"preset {self.preset!r} is for the dataset {preset['data']['name']}, not {config.data.name}: "
                "leave one of the two out"
            )
        return config

    def given(self, algorithm: str | None = None, seed: int | None = None) -> dict[str, Any]:
        """What the file, the options and --set say, as tables."""
        from fedcir.config import merged, parse_assignment, read_toml

        tables = {} if self.config is None else read_toml(self.config)
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


OWN_DATA = ("arrays", "folders", "hub")
"""Datasets that hold anything, so that any preset may be tried on them."""

PLACES = {
    "dataset": "data.name",
    "data_root": "data.root",
    "image_size": "data.image_size",
    "model": "model.name",
    "rounds": "server.rounds",
    "local_steps": "local.steps",
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
