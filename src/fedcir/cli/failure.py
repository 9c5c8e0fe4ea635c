"""What went wrong, in one line and an exit code: 2 for what the user gave, 1 for what broke, 130 for Ctrl-C."""

import difflib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedcir.cli.interrupt import Interrupted

DEBUG = "FEDCIR_DEBUG"
"""Set to 1, it makes this command and the processes that it starts print tracebacks."""
LONG = 300
"""The most characters that are shown of another library's message."""
_TAKES = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}


def fail(error: BaseException) -> None:
    """Say what went wrong on the last line of standard error, and end."""
    line, code = told(error)
    if debugging() and code != 130 and not hasattr(error, "format_message"):
        traceback.print_exception(error)
    from fedcir.runs.events import tell

    line = " ".join(line.split())
    if not tell("failed", line):
        print(f"fedcir: {line}", file=sys.stderr)
    sys.exit(code)


def debugging() -> bool:
    return os.environ.get(DEBUG) == "1"


def told(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Interrupted | KeyboardInterrupt) or type(error).__name__ == "Abort":
        return str(error) or "interrupted", 130
    if hasattr(error, "format_message"):
        return _misused(error), 2
    if isinstance(error, OSError) and (error.filename is not None or error.strerror is not None):
        return f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 2
    from fedcir.types import FedcirError, InputError

    if isinstance(error, FedcirError):
        return with_options(str(error), sys.argv[1:]), 2 if isinstance(error, InputError) else 1
    from fedcir.engine.transports.processes import too_little_memory

    if too_little_memory(error):
        return "not enough memory: lower --workers, --batch-size or --image-size", 2
    return _broken(error), 1


def with_options(text: str, arguments: Sequence[str] = ()) -> str:
    """A message with the options of the settings that it names: in place of one at its beginning, else at its end.

    If a file of settings was given, only options that were given too are named: the value may stand in the file.
    """
    from fedcir.config import OPTIONS

    names = {option.place: name for name, option in OPTIONS.items()} | {name: name for name in (*OPTIONS, "trust_code")}
    options = {name: f"--{option.replace('_', '-')}" for name, option in names.items()}
    if any(argument.endswith(".toml") for argument in arguments):
        given = {argument.partition("=")[0] for argument in arguments}
        options = {name: option for name, option in options.items() if option in given or name == "trust_code"}
    setting, colon, rest = text.partition(": ")
    if colon and setting in options:
        return f"{options[setting]}: {rest}"
    mentioned = re.findall(r"(?<![\w./-])([a-z]+[._][a-z_]+)(?![\w=/.]*[\w=/])", text)
    missing = dict.fromkeys(options[name] for name in mentioned if name in options and options[name] not in text)
    return f"{text} ({', '.join(missing)})" if missing else text


def _misused(error: Any) -> str:
    """An error of the argument parser, known by its name, since versions define the classes in different modules."""
    kinds: dict[str, Callable[[Any], str]] = {
        "BadParameter": _bad_value,
        "MissingParameter": _missing,
        "NoSuchOption": _no_option,
        "NoSuchCommand": _no_command,
        "BadOptionUsage": _bad_usage,
    }
    if (say := kinds.get(type(error).__name__)) is not None:
        return say(error)
    if extra := re.search(r"unexpected extra arguments? \((.*)\)", error.message):
        return f"too many arguments: {extra[1]}{_see(error)}"
    return f"{error.format_message().rstrip('.')}{_see(error)}"


def _bad_value(error: Any) -> str:
    value, found, _ = error.message.partition(" is not a valid ")
    takes = _TAKES.get(error.param.type.name)
    return f"{_name(error.param)} " + (
        f"takes {takes}, got {value}" if takes and found else f"is wrong: {error.message}"
    )


def _missing(error: Any) -> str:
    meaning = error.param.help.rstrip(".")
    return f"{_name(error.param)} is missing: {meaning[:1].lower()}{meaning[1:]}{_see(error)}"


def _no_option(error: Any) -> str:
    name, ctx = error.option_name, error.ctx
    if ctx.parent is not None and name in _options(ctx.find_root()):
        return f"{name} goes before the command: fedcir {name} {ctx.command_path.partition(' ')[2]} ..."
    return f"no option {name}{_meant(name, _options(ctx)) or _see(error)}"


def _no_command(error: Any) -> str:
    name, known = error.command_name, error.ctx.command.commands
    return f"no command {name!r}{_meant(name, known) or '; choose from ' + ', '.join(known)}"


def _bad_usage(error: Any) -> str:
    return f"{error.option_name} takes " + ("no value" if "not take" in error.message else "a value, got none")


def _see(error: Any) -> str:
    return f"; see `{error.ctx.command_path if error.ctx else 'fedcir'} --help`"


def _name(param: Any) -> str:
    return str(max(param.opts, key=len) if param.param_type_name == "option" else param.human_readable_name)


def _options(ctx: Any) -> list[str]:
    params = ctx.command.get_params(ctx)
    return [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")]


def _meant(name: str, known: Iterable[str]) -> str:
    """The nearest name, without the dashes that all options share."""
    bare = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    best = bare[close[0]] if close else ""
    return f"; did you mean {best if best.startswith('-') else repr(best)}?" if close else ""


def _broken(error: BaseException) -> str:
    """An unexpected exception: the line of the user's algorithm that raised it, or an internal error."""
    from fedcir.algorithms import line_of_own, own_files

    what = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    what = what if len(what) <= LONG else f"{what[:LONG]}..."
    if line := line_of_own(error):
        return f"{line}: {what}"
    package = Path(__file__).parents[1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if package in Path(frame.filename).parents]
    if frames:
        what += f" ({Path(frames[-1].filename).relative_to(package)}, line {frames[-1].lineno})"
    if own := own_files():
        return (
            f"{what} with {own[-1]}: `fedcir algorithms {own[-1]} --check` may show why, and `fedcir --debug ...` where"
        )
    return f"internal error: {what}: run it again as `fedcir --debug ...` and report the traceback"
