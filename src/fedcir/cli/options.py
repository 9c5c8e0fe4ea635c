"""The options that several commands share, and how they become a config."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from fedcir.config import OPTIONS, Config, ConfigRequest

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
RunArgument = Annotated[Path, typer.Argument(help="A finished run.")]
SiteOption = Annotated[
    str | None, typer.Option(help="Domain whose model to take, where each client has a part for itself.")
]
OwnAlgorithm = Annotated[
    str | None, typer.Option("--algorithm", help="The file of the algorithm, if it is your own (./mine.py).")
]


def option(name: str) -> Any:
    """Return the command-line option of a setting."""
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

    def to_request(self, **more: Any) -> ConfigRequest:
        """Make a config request from the options and others by name."""
        return ConfigRequest(self.preset, self.config, {**self.settings, **more}, tuple(self.set or ()))

    def keywords(self) -> dict[str, Any]:
        """Return the options under the names that library functions take."""
        named = ("preset", "config", "out", "resume", "report", "track")
        return {**self.settings, **{name: getattr(self, name) for name in named}, "set": self.set or ()}

    def to_run(
        self, algorithm: str | None, seed: int | None, prefix: str = "", trust_code: bool = False
    ) -> tuple[Config, Path]:
        """The settings and the folder of one run. A resumed run keeps its own settings unless others are given.

        Its own code, which another may have chosen, is kept only if it is trusted.
        """
        from fedcir.algorithms import resolve_config
        from fedcir.errors import InputError
        from fedcir.experiments.batch import run_name, unused_path
        from fedcir.runtime.resume import resolve_resumed_config
        from fedcir.runtime.run_folder import RunFolder

        request = self.to_request(algorithm=algorithm, seed=seed)
        if not self.resume:
            config = resolve_config(request)
            return config, self.out or unused_path(Path("runs", prefix + run_name(config)))
        if self.out is None:
            raise InputError("--resume needs --out, the folder of the run to continue")
        if not RunFolder(self.out).exists:
            raise InputError(f"{self.out} holds no run to continue: start one without --resume")
        saved = resolve_resumed_config(RunFolder(self.out).config(), request.tables(), self.out, trust_code)
        return request.resolve_over(saved), self.out


def split_names(text: str) -> list[str]:
    """Split a list at its commas."""
    return [item.strip() for item in text.split(",") if item.strip()]


def split_seeds(text: str) -> list[int]:
    from fedcir.errors import InputError

    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


def with_options(command: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """A command that takes every field of Options but some as its own parameter, and gets them as `options`."""
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
        if name != "options"
    ]
    hints = get_type_hints(Options, include_extras=True)
    shared = []
    for entry in fields(Options):
        if entry.name in without:
            continue
        if entry.name == "settings":
            shared += [
                _make_parameter(name, Annotated[OPTIONS[name].type | None, option(name)], None) for name in SHARED
            ]
        else:
            shared.append(_make_parameter(entry.name, hints[entry.name], entry.default))

    @functools.wraps(command)
    def run_command(**values: Any) -> None:
        mine = {parameter.name: values.pop(parameter.name) for parameter in parameters}
        settings = {name: values.pop(name) for name in SHARED}
        command(options=Options(settings=settings, **values), **mine)

    run_command.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, *shared]}
    del run_command.__wrapped__  # or the signature of the command itself is found
    return run_command


def _make_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
