"""The typer application, its output, signals, and errors as one line and an exit code: 2 input, 1 failure, 130 Ctrl-C.

Control characters in names of files and classes are escaped in everything that is printed.
"""

import contextlib
import difflib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from fedcir.config import OPTIONS
from fedcir.errors import FedcirError, InputError
from fedcir.files import send_event
from fedcir.plugins import list_imported_files, locate_in_file
from fedcir.text import describe_error, escape_controls, escape_line

if TYPE_CHECKING:
    import click


class Command(TyperCommand):
    def format_options(self, ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    def format_options(self, ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


class App(typer.Typer):
    """A group of commands."""

    def __init__(self, help: str) -> None:
        super().__init__(
            help=help,
            cls=Group,
            no_args_is_help=True,
            add_completion=False,
            suggest_commands=False,  # _suggest does
            rich_markup_mode=None,
            pretty_exceptions_enable=False,  # they would show local variables, and samples' names among them
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **settings})


def _write_options(command: "click.Command", ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
    """Write the help of options; typer's own method escapes brackets for rich, which is not used."""
    rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is not None:
            term, text = record
            rows[param.param_type_name].append((term, text.replace("\\[", "[").removesuffix("  [required]")))
    for kind, listed in rows.items():
        if listed:
            with formatter.section(f"{kind.capitalize()}s"):
                formatter.write_dl(listed)


class EscapedStream:
    """A text stream that escapes control characters."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def escape_output() -> Iterator[None]:
    """Escape everything that any module prints within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(IO[str], EscapedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def get_raw_stream(stream: IO[str]) -> IO[str]:
    """Return the stream without escapes, for progress bars and for files that must be exact."""
    return stream.stream if isinstance(stream, EscapedStream) else stream


def print_note(note: str) -> None:
    """Print a note on standard error, or send it to the process that started this one."""

    if not send_event("note", note):
        print(f"note: {note}", file=sys.stderr)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1, ensure_ascii=False))


def print_table(rows: list[list[str]], title: str | None = None) -> None:
    """Print rows of cells, the first of which is the header."""
    from rich import box
    from rich.table import Table

    from fedcir.cli.progress import make_console

    if title is not None:
        print(title)
    table = Table(*map(escape_line, rows[0]), box=box.SIMPLE_HEAD)
    for row in rows[1:]:
        table.add_row(*map(escape_line, row))
    make_console(sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)


PATIENCE = 5.0
"""Seconds in which further signals do not disturb a command that is already ending."""


class Interrupted(Exception):
    """The user stopped the command; the message says how to continue."""


def catch_signals() -> None:
    """Turn the first SIGINT or SIGTERM into a KeyboardInterrupt. One that comes much later ends the process at once."""
    first: list[float] = []

    def handle_signal(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt
        if time.monotonic() - first[0] > PATIENCE:
            os.write(2, b"\nfedcir: ended at once\n")
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores SIGINT for what runs in the background
        signal.signal(number, handle_signal)


def ignore_signals() -> None:
    """Ignore signals while the process ends, so that Python prints no traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


DEBUG = "FEDCIR_DEBUG"
"""Set to 1, it makes this command and the processes that it starts print tracebacks."""
LONG = 300
"""The most characters that are shown of another library's message."""
_TAKES = {"integer": "a whole number", "float": "a number", "boolean": "true or false"}


def fail(error: BaseException) -> None:
    """Print an error as the last line of standard error, and exit."""
    line, code = describe_failure(error)
    if debugging() and code != 130 and not hasattr(error, "format_message"):
        traceback.print_exception(error)

    line = " ".join(line.split())
    if not send_event("failed", line):
        print(f"fedcir: {line}", file=sys.stderr)
    sys.exit(code)


def debugging() -> bool:
    return os.environ.get(DEBUG) == "1"


def describe_failure(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Interrupted | KeyboardInterrupt) or type(error).__name__ == "Abort":
        return str(error) or "interrupted", 130
    if hasattr(error, "format_message"):
        return _describe_misuse(error), 2
    if isinstance(error, OSError) and (error.filename is not None or error.strerror is not None):
        return f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 2

    if isinstance(error, FedcirError):
        return name_options(str(error), sys.argv[1:]), 2 if isinstance(error, InputError) else 1
    from fedcir.machine import is_out_of_memory

    if is_out_of_memory(error):
        return "not enough memory: lower --workers, --batch-size or --image-size", 2
    return _describe_unexpected(error), 1


def name_options(text: str, arguments: Sequence[str] = ()) -> str:
    """Add the options of the settings that a message names: in place of one at its beginning, else at its end.

    If a file of settings was given, only options that were given too are named: the value may stand in the file.
    """

    names = {option.setting: name for name, option in OPTIONS.items()} | {
        name: name for name in (*OPTIONS, "trust_code")
    }
    options = {name: f"--{option.replace('_', '-')}" for name, option in names.items()}
    if any(argument.endswith(".toml") for argument in arguments):
        present = {argument.partition("=")[0] for argument in arguments}
        options = {name: option for name, option in options.items() if option in present or name == "trust_code"}
    setting, colon, rest = text.partition(": ")
    if colon and setting in options:
        return f"{options[setting]}: {rest}"
    mentioned = re.findall(r"(?<![\w./-])([a-z]+[._][a-z_]+)(?![\w=/.]*[\w=/])", text)
    missing = dict.fromkeys(options[name] for name in mentioned if name in options and options[name] not in text)
    return f"{text} ({', '.join(missing)})" if missing else text


def _describe_misuse(error: Any) -> str:
    """Describe an error of the argument parser, known by its name: versions define the classes in different modules."""
    kind, message, ctx = type(error).__name__, error.message, error.ctx
    see = f"; see `{ctx.command_path if ctx else 'fedcir'} --help`"
    if kind == "BadParameter":
        value, is_type_error, _ = message.partition(" is not a valid ")
        takes = _TAKES.get(error.param.type.name) if is_type_error else None
        text = f"{_name(error.param)} " + (f"takes {takes}, got {value}" if takes else f"is wrong: {message}")
    elif kind == "MissingParameter":
        meaning = error.param.help.rstrip(".")
        text = f"{_name(error.param)} is missing: {meaning[:1].lower()}{meaning[1:]}{see}"
    elif kind == "NoSuchOption":
        name = error.option_name
        if ctx.parent is not None and name in _list_options(ctx.find_root()):
            text = f"{name} goes before the command: fedcir {name} {ctx.command_path.partition(' ')[2]} ..."
        else:
            text = f"no option {name}{_suggest(name, _list_options(ctx)) or see}"
    elif kind == "NoSuchCommand":
        name, commands = error.command_name, ctx.command.commands
        text = f"no command {name!r}{_suggest(name, commands) or '; choose from ' + ', '.join(commands)}"
    elif kind == "BadOptionUsage":
        text = f"{error.option_name} takes " + ("no value" if "not take" in message else "a value, got none")
    elif extra := re.search(r"unexpected extra arguments? \((.*)\)", message):
        text = f"too many arguments: {extra[1]}{see}"
    else:
        text = f"{error.format_message().rstrip('.')}{see}"
    return text


def _name(param: Any) -> str:
    return str(max(param.opts, key=len) if param.param_type_name == "option" else param.human_readable_name)


def _list_options(ctx: Any) -> list[str]:
    params = ctx.command.get_params(ctx)
    return [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")]


def _suggest(name: str, options: Iterable[str]) -> str:
    """Suggest the nearest name, compared without the dashes that all options share."""
    bare = {option.lstrip("-"): option for option in options}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    if not close:
        return ""
    best = bare[close[0]]
    return f"; did you mean {best if best.startswith('-') else repr(best)}?"


def _describe_unexpected(error: BaseException) -> str:
    """Describe an unexpected exception: the line of the user's algorithm that raised it, or an internal error."""

    message = describe_error(error, LONG)
    if line := locate_in_file(error):
        return f"{line}: {message}"
    package = Path(__file__).parents[1]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if package in Path(frame.filename).parents]
    if frames:
        message += f" ({Path(frames[-1].filename).relative_to(package)}, line {frames[-1].lineno})"
    if custom := list_imported_files():
        check = f"`fedcir algorithms {custom[-1]} --check` may show why, and `fedcir --debug ...` where"
        return f"{message} with {custom[-1]}: {check}"
    return f"internal error: {message}: run it again as `fedcir --debug ...` and report the traceback"
