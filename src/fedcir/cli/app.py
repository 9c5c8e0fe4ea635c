"""What all commands share: how their help looks, and that no traceback shows values."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

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
            suggest_commands=False,  # cli/failure.py does
            rich_markup_mode=None,
            pretty_exceptions_enable=False,  # they would show local variables, and samples' names among them
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **settings})


def _write_options(command: "click.Command", ctx: "click.Context", formatter: "click.HelpFormatter") -> None:
    """Typer's own would escape brackets for rich, which does not print this help."""
    rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is not None:
            term, text = record
            rows[param.param_type_name].append((term, text.replace("\\[", "[").removesuffix("  [required]")))
    for kind, listed in rows.items():
        if listed:
            with formatter.section(f"{kind.capitalize()}s"):
                formatter.write_dl(listed)
