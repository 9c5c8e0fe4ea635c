"""The options that mean the same in every command, and how they become a config."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from fedcir.config import Asked, Config

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

    def asked(self, **more: Any) -> "Asked":
        """What was asked for, and more by the names of options."""
        from fedcir.config import OPTIONS, Asked

        given = {name: getattr(self, name) for name in OPTIONS if hasattr(self, name)}
        return Asked(self.preset, self.config, {**given, **more}, tuple(self.set or ()))

    def keywords(self) -> dict[str, Any]:
        """The same by the names that the functions of the package take."""
        from fedcir.config import OPTIONS

        named = (*OPTIONS, "preset", "config", "out", "resume", "report", "track")
        given = {name: getattr(self, name) for name in named if hasattr(self, name)}
        return {**given, "set": self.set or ()}

    def to_run(self, algorithm: str | None, seed: int | None, prefix: str = "") -> "tuple[Config, Path]":
        """The settings and the folder of one run. A resumed one has its own, over which the given ones count."""
        from fedcir.engine.folder import RunFolder
        from fedcir.runs.places import run_name, unused
        from fedcir.types import InputError

        asked = self.asked(algorithm=algorithm, seed=seed)
        if not self.resume:
            config = asked.config()
            return config, self.out or unused(Path("runs", prefix + run_name(config)))
        if self.out is None:
            raise InputError("--resume continues the run in --out: name its folder")
        if not RunFolder(self.out).exists:
            raise InputError(f"{self.out} holds no run to continue: start one without --resume")
        return asked.config_over(RunFolder(self.out).config()), self.out


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def numbers(text: str) -> list[int]:
    from fedcir.types import InputError

    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


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
