"""The command line: arguments in, calls out."""

import signal
import sys

import typer

from fedcir.cli.data import data
from fedcir.cli.deploy import deploy
from fedcir.cli.diagnose import diagnose
from fedcir.cli.interrupt import Interrupted
from fedcir.cli.methods import algorithms
from fedcir.cli.report import report
from fedcir.cli.reproduce import reproduce
from fedcir.cli.train import compare, run

app = typer.Typer(
    help="Train one classifier across sites whose data look different, without moving the data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(compare)
app.command()(reproduce)
app.command()(algorithms)
app.command()(diagnose)
app.command()(report)
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")


def main() -> None:
    """Run a command; turn what went wrong into one line and an exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except Interrupted as stop:
        _fail(str(stop), 130)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 2)
    except Exception as error:
        from_parser = getattr(error, "format_message", None)
        if type(error).__name__ == "NoArgsIsHelpError" and from_parser is not None:
            print(from_parser())
            sys.exit(0)
        if from_parser is not None:
            _fail(from_parser() + _given(error), 2)
        if type(error).__name__ == "Abort":
            _fail("interrupted", 130)
        if _is_input_error(error):
            _fail(str(error), 2)
        raise


def _is_input_error(error: Exception) -> bool:
    from fedcir.types import InputError

    return isinstance(error, InputError)


def _given(error: Exception) -> str:
    """The value behind a parser's complaint, which does not always name it."""
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in reversed(list(zip(sys.argv, [*sys.argv[1:], ""], strict=True))):  # the last one counts
            if word == option or word.startswith(f"{option}="):
                return f", got {following if word == option else word.partition('=')[2]!r}"
    return ""


def _fail(message: str, code: int) -> None:
    print(f"fedcir: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
