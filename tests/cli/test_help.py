"""The help of every command, and how fast it comes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from user_files import Command

from fedcir import __version__
from fedcir.cli import app
from fedcir.cli.run import IDS
from fedcir.experiments.paper import EXPERIMENTS


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_is_whole_and_says_what_each_option_does(fedcir: Command, path: tuple[str, ...]) -> None:
    output = fedcir(*path, "--help")
    assert (output.code, output.err) == (0, "")
    assert "\\" not in output.out
    listed = output.out.partition("Commands:")[2]
    assert "..." not in listed, "its first sentence is too long for the list"
    assert all(param.help for param in COMMANDS[path].params)


def test_defaults_are_shown_in_brackets(fedcir: Command) -> None:
    assert "[default: report.html]" in fedcir("report", "--help").out
    assert "[default: report]" in fedcir("run", "--help").out


def test_the_help_of_reproduce_names_every_table_and_figure() -> None:
    assert re.findall(r"[a-z0-9-]+\d|fig-[a-z-]+", IDS) == sorted(
        EXPERIMENTS, key=lambda id: (id.startswith("fig"), id)
    )


def test_version_is_printed(fedcir: Command) -> None:
    assert fedcir("--version") == (0, f"fedcir {__version__}\n", "")


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["run", "--nope"], ["--version"]])
def test_help_does_not_wait_for_torch(command: list[str]) -> None:
    script = (
        "import sys, fedcir.cli\n"
        f"sys.argv = ['fedcir', *{command!r}]\n"
        "try:\n    fedcir.cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib'} & sys.modules.keys()\n"
        "print('heavy:', *sorted(heavy))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.endswith("heavy:\n")
