"""The options that mean the same in every command, and how they become a config."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fedcir.config import OPTIONS, Asked, Config

SHARED = [name for name in OPTIONS if name not in ("algorithm", "seed")]
"""Settings that every command that trains takes. Some commands take one algorithm and seed, others several."""
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the code that the run names, a copy in its folder or a package's."),
]
FromRound = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --resume: go back to the last checkpoint at or before round N."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="A setting of `fedcir settings`; may be repeated."),
]


def option(name: str) -> Any:
    """The option of a setting, as a command takes it."""
    return typer.Option(help=OPTIONS[name].help)


@dataclass
class Options:
    """Settings of a run; each one given wins over the TOML file, and --set wins over all."""

    config: Annotated[Path | None, typer.Argument(help="A TOML file of settings.")] = None
    preset: Annotated[str | None, typer.Option(help="The paper's settings for a dataset, such as pacs.")] = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """By the names of OPTIONS, each an option of its own; None where it was not given."""
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the results.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue what was started in --out.")] = False
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True
    track: Annotated[str | None, typer.Option(help="Log every round to tensorboard, wandb or mlflow.")] = None
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time went.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only errors and what --json asks for.")] = False
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    set: Assignments = None

    def asked(self, **more: Any) -> Asked:
        """What was asked for, and more by the names of options."""
        return Asked(self.preset, self.config, {**self.settings, **more}, tuple(self.set or ()))

    def keywords(self) -> dict[str, Any]:
        """The same by the names that the functions of the package take."""
        named = ("preset", "config", "out", "resume", "report", "track")
        return {**self.settings, **{name: getattr(self, name) for name in named}, "set": self.set or ()}

    def to_run(
        self, algorithm: str | None, seed: int | None, prefix: str = "", trust_code: bool = False
    ) -> tuple[Config, Path]:
        """The settings and the folder of one run. A resumed run keeps its own settings unless others are given.

        Its own code, which another may have chosen, is kept only if it is trusted.
        """
        from fedcir.algorithms import asked_config
        from fedcir.engine.folder import RunFolder
        from fedcir.engine.trust import resumed
        from fedcir.runs.places import run_name, unused
        from fedcir.types import InputError

        asked = self.asked(algorithm=algorithm, seed=seed)
        if not self.resume:
            config = asked_config(asked)
            return config, self.out or unused(Path("runs", prefix + run_name(config)))
        if self.out is None:
            raise InputError("--resume needs --out, the folder of the run to continue")
        if not RunFolder(self.out).exists:
            raise InputError(f"{self.out} holds no run to continue: start one without --resume")
        saved = resumed(RunFolder(self.out).config(), asked.tables(), self.out, trust_code)
        return asked.config_over(saved), self.out


def listed(text: str) -> list[str]:
    """The words between commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def numbers(text: str) -> list[int]:
    from fedcir.types import InputError

    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


def with_options(command: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """A command that takes every field of Options but some as its own parameter, and gets them as `options`."""
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "options"
    ]
    hints = get_type_hints(Options, include_extras=True)
    shared = []
    for each in fields(Options):
        if each.name in without:
            continue
        if each.name == "settings":
            shared += [_parameter(name, Annotated[OPTIONS[name].type | None, option(name)], None) for name in SHARED]
        else:
            shared.append(_parameter(each.name, hints[each.name], each.default))

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        mine = {parameter.name: values.pop(parameter.name) for parameter in own}
        given = {name: values.pop(name) for name in SHARED}
        command(options=Options(settings=given, **values), **mine)

    expanded.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    del expanded.__wrapped__  # or the signature of the command itself is found
    return expanded


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
