"""The command line: arguments in, calls out."""

import os
import sys
from typing import Annotated

import typer
from typer.main import get_command

from fedcir.cli.app import App
from fedcir.cli.audit import audit
from fedcir.cli.data import data
from fedcir.cli.deploy import deploy
from fedcir.cli.diagnose import diagnose
from fedcir.cli.evaluate import evaluate
from fedcir.cli.export import export
from fedcir.cli.failure import DEBUG, fail
from fedcir.cli.init import init
from fedcir.cli.interrupt import catch_signals, ignore_signals
from fedcir.cli.methods import algorithms
from fedcir.cli.predict import predict
from fedcir.cli.recommend import recommend
from fedcir.cli.report import report
from fedcir.cli.reproduce import reproduce
from fedcir.cli.run import compare, run
from fedcir.cli.settings import settings
from fedcir.cli.terminal import escape_output
from fedcir.cli.tune import tune

app = App("Train one classifier across sites whose data look different, without moving the data.")


def _print_version(asked: bool) -> None:
    if asked:
        from fedcir import __version__

        print(f"fedcir {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback if something fails.", envvar=DEBUG)
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


app.command()(init)
app.command()(run)
app.command()(compare)
app.command()(reproduce)
app.command()(algorithms)
app.command()(settings)
app.command()(diagnose)
app.command()(recommend)
app.command()(tune)
app.command()(report)
app.command()(evaluate)
app.command()(predict)
app.command()(export)
app.command()(audit)
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")


def main() -> None:
    """Run a command; turn what went wrong into one line and an exit code."""
    catch_signals()
    with escape_output():
        _main()


def _main() -> None:
    try:
        code = get_command(app)(prog_name="fedcir", standalone_mode=False)
        if code == 130:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        ignore_signals()
        sys.exit(code if isinstance(code, int) else 0)
    except (Exception, KeyboardInterrupt) as error:
        ignore_signals()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(0)
        fail(error)
