"""The options that several commands share, and how they become a config."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from fedcir.config import OPTIONS, Config, ConfigRequest
from fedcir.errors import InputError


def option(help: str, default: Any = None, *names: str, **more: Any) -> Any:
    """Declare an option as the default of a parameter."""
    return typer.Option(default, *names, help=help, **more)


def flag(name: str, help: str) -> Any:
    """Declare an option without a value, off by default."""
    return typer.Option(False, name, help=help)


def argument(help: str, default: Any = ..., **more: Any) -> Any:
    """Declare an argument, which is required unless it has a default."""
    return typer.Argument(default, help=help, **more)


def output(help: str, default: Any = None) -> Any:
    """Declare the option --out."""
    return typer.Option(default, "--out", "-o", help=help)


def setting(name: str, default: Any = None) -> Any:
    """Declare the option of a setting."""
    return typer.Option(default, help=OPTIONS[name].help)


SHARED = tuple(name for name in OPTIONS if name not in ("algorithm", "seed"))
"""Settings that every command that trains takes. Some commands take one algorithm and seed, others several."""
ALGORITHM, SEED = setting("algorithm"), setting("seed")
CONFIG = argument("A TOML file of settings.", None)
RUN = argument("A finished run.")
SET = option("A setting of `fedcir settings`; may be repeated.", None, "--set", metavar="SECTION.FIELD=VALUE")
TRUST_CODE = flag("--trust-code", "Run the code that the run names, a copy in its folder or a package's.")
FROM_ROUND = option("With --resume: go back to the last checkpoint at or before round N.", metavar="N")
SITE = option("Domain whose model to take, where each client has a part for itself.")
FORCE_SITE = flag("--force", "Use the model even at a site whose images are too novel for it.")
DEVICE = option("Where to run: auto, cpu, cuda or mps.", "auto")
OWN_ALGORITHM = option("The file of the algorithm, if it is your own (./mine.py).", None, "--algorithm")
TARGET = option("Accuracy to reach, such as 0.9, or the score of another task. [default: FedAvg's last]")
QUIET = flag("--quiet", "Print only errors and what --json asks for.")
NO_PROGRESS = flag("--quiet", "Show no progress.")
ONLY_ERRORS = flag("--quiet", "Print only errors.")
JSON = flag("--json", "Print the result as JSON.")
JSON_NUMBERS = flag("--json", "Print the numbers as JSON.")


@dataclass
class Options:
    """Settings of a run; each one given wins over the TOML file, and --set wins over all."""

    config: Path | None = CONFIG
    preset: str | None = option("The paper's settings for a dataset, such as pacs.")
    settings: Mapping[str, Any] | None = None
    """Values by the names of OPTIONS; None for an option that was not given."""
    out: Path | None = output("Folder for the results.")
    resume: bool = flag("--resume", "Continue what was started in --out.")
    report: bool = option("Write report.html.", True, "--report/--no-report")
    track: str | None = option("Log every round to tensorboard, wandb or mlflow.")
    profile: bool = flag("--profile", "Show where the time went.")
    quiet: bool = QUIET
    json: bool = JSON
    set: list[str] | None = SET

    def keywords(self, *names: str) -> dict[str, Any]:
        """Return the settings, and the named options, under the names that library functions take."""
        named = {name: getattr(self, name) for name in ("preset", "config", "out", "resume", *names)}
        return {**(self.settings or {}), **named, "set": self.set or ()}

    def to_run(
        self, algorithm: str | None, seed: int | None, prefix: str = "", trust_code: bool = False
    ) -> tuple[Config, Path]:
        """Return the settings and the folder of one run. A resumed run keeps its own settings unless others are given.

        Its own code, which another may have chosen, is kept only if it is trusted.
        """
        from fedcir.algorithms import resolve_config
        from fedcir.experiments.batch import run_name, unused_path
        from fedcir.runs.tracking import check_tracker
        from fedcir.runtime.resume import resolve_resumed_config
        from fedcir.runtime.run_folder import RunFolder

        check_tracker(self.track)
        options = {**(self.settings or {}), "algorithm": algorithm, "seed": seed}
        request = ConfigRequest(self.preset, self.config, options, tuple(self.set or ()))
        if not self.resume:
            config = resolve_config(request)
            return config, self.out or unused_path(Path("runs", prefix + run_name(config)))
        if self.out is None:
            raise InputError("--resume needs --out, the folder of the run to continue")
        if not RunFolder(self.out).exists:
            raise InputError(f"{self.out} holds no run to continue: start one without --resume")
        saved = resolve_resumed_config(RunFolder(self.out).config(), request.tables(), self.out, trust_code)
        return request.resolve_over(saved), self.out


def split_names(text: str | None) -> list[str] | None:
    """Split a list at its commas."""
    return None if text is None else [item.strip() for item in text.split(",") if item.strip()]


def split_seeds(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, got {text!r}") from None


def take_options(*names: str, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `options` of a command by the fields of Options, and `settings` by the named settings."""
    names = names or SHARED

    def replace_parameters(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        shared = [field for field in fields(Options) if field.name not in without] if "options" in own else []
        declared = [(p.name, p.annotation, p.default) for p in own.values() if p.name != "options"]
        declared += [(field.name, field.type, field.default) for field in shared]
        position = [name for name, *_ in declared].index("settings")
        declared[position : position + 1] = [(name, OPTIONS[name].type | None, setting(name)) for name in names]

        @functools.wraps(command)
        def run_command(**values: Any) -> None:
            values["settings"] = {name: values.pop(name) for name in names}
            if shared:
                values["options"] = Options(**{field.name: values.pop(field.name, None) for field in fields(Options)})
            command(**values)

        only = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, only, annotation=hint, default=value) for name, hint, value in declared]
        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {name: hint for name, hint, _ in declared}
        del run_command.__wrapped__  # or the signature of the command itself is found
        return run_command

    return replace_parameters
