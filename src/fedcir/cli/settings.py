"""`fedcir settings`: what can be set, in a file or by --set."""

import json as jsonlib
import shutil
import textwrap
from typing import Annotated

import typer


def settings(
    name: Annotated[str | None, typer.Argument(help="A section such as local, or a setting such as local.lr.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List all settings, with their values, defaults and meanings."""
    from dataclasses import asdict

    from fedcir.insight.settings import settings as find

    found = find(name)
    if json:
        print(jsonlib.dumps([asdict(each) for each in found], indent=1))
        return
    width = min(100, shutil.get_terminal_size().columns)
    for each in found:
        default = f"; default {each.default_text}{each.made_for_text}" if each.default_text else ""
        print(f"{each.name}: {each.takes}{default}{f'; {each.option}' if each.option else ''}")
        print(textwrap.fill(each.meaning, width, initial_indent="    ", subsequent_indent="    "))
