"""The commands of `fedcir`, and its entry point."""

import os
import sys

import typer
from typer.main import get_command

from fedcir.cli.application import DEBUG, App, catch_signals, escape_output, fail, ignore_signals
from fedcir.cli.data import data
from fedcir.cli.options import option
from fedcir.cli.predict import export, predict
from fedcir.cli.report import audit, diagnose, evaluate, forget, report, worth
from fedcir.cli.run import compare, reproduce, run
from fedcir.cli.settings import algorithms, init, recommend, settings, tune
from fedcir.cli.sites import deploy, inspect, merge, site

app = App("Train one classifier across sites whose data look different, without moving the data.")


def _print_version(requested: bool) -> None:
    if requested:
        from fedcir import __version__

        print(f"fedcir {__version__}")
        raise typer.Exit


# typer would import rich to print the name of the variable, which takes longer than all the rest of --help
DEBUG_HELP = f"Print the traceback if something fails.  [env var: {DEBUG}]"


@app.callback()
def set_global_options(
    version: bool = option("Print the version.", False, "--version", is_eager=True, callback=_print_version),
    debug: bool = option(DEBUG_HELP, False, "--debug", envvar=DEBUG, show_envvar=False),
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


for command in (
    *(init, run, compare, reproduce, algorithms, settings, diagnose),
    *(recommend, tune, report, evaluate, predict, export, audit, forget, worth),
    *(site, inspect, merge),
):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")


def main() -> None:
    """Run a command; turn what went wrong into one line and an exit code."""
    catch_signals()
    with escape_output():
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
