"""Write the tables of methods, settings and results into their pages, from classes and published runs: `make docs`."""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fedcir.algorithms import find_algorithm, list_algorithms
from fedcir.experiments.reference import describe_algorithm, list_settings, measure_traffic
from fedcir.reporting.page import join_markdown

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "results"))
from adaptation import table as adaptation_table  # noqa: E402 (scripts beside the published runs)
from adapters import table as adapters_table  # noqa: E402
from hospitals import table as hospitals_table  # noqa: E402
from onemessage import table as onemessage_table  # noqa: E402
from privacy import table as privacy_table  # noqa: E402
from robust import table as attacks_table  # noqa: E402
from table import figure  # noqa: E402
from table import table as results_table  # noqa: E402

from tasks import table as tasks_table  # noqa: E402

WRITTEN = ("commands", "deploy", "hospitals", "privacy", "replication", "results", "robust", "settings", "tune", "use")
WRITTEN += ("encoders", "tasks", "what-helps")
METHOD_PAGES = sorted(page for page in (DOCS / "methods").glob("*.md") if page.stem != "index")
PAGES = [*METHOD_PAGES, *(DOCS / f"{page}.md" for page in WRITTEN)]
PAGES.append(DOCS.parent / "README.md")
KINDS = "fields|travels|bytes|settings|ranges|results|commands|attacks|privacy|adaptation|onemessage|hospitals|adapters"
KINDS += "|tasks"
BETWEEN = re.compile(rf"(<!-- ({KINDS}): ([\w -]+?) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: ([\w/, -]+?) -->).*?(<!-- /figure -->)", re.DOTALL)
"""A number inside a sentence."""


def with_tables(text: str) -> str:
    """A page with every table and figure made anew."""
    makers = {"fields": fields_table, "travels": travels_table, "bytes": bytes_table, "settings": settings_table}
    makers |= {"ranges": ranges_table, "results": results_table, "commands": commands, "attacks": attacks_table}
    makers |= {"privacy": privacy_table, "adaptation": adaptation_table, "onemessage": onemessage_table}
    makers |= {"hospitals": hospitals_table, "adapters": adapters_table, "tasks": tasks_table}
    text = BETWEEN.sub(lambda match: f"{match[1]}{makers[match[2]](match[3])}{match[4]}", text)
    return FIGURE.sub(lambda match: f"{match[1]}{figure(match[2])}{match[3]}", text)


def commands(which: str) -> str:
    """What `--help` says of every command."""
    from typer.main import get_command

    from fedcir.cli import app

    return "\n".join(_command(get_command(app), "fedcir", None))


def _command(command: Any, path: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent)
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _command(each, f"{path} {name}", context)
        return
    yield f"## {path}\n\n{' '.join((command.help or '').split())}\n"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"```\n{path} {usage}\n```\n"
    records = [param.get_help_record(context) for param in command.params]
    rows = [[f"`{term}`", text.replace("\\[", "[").replace("|", "\\|")] for term, text in filter(None, records)]
    yield join_markdown([["", "meaning"], *rows]).replace("---:", "---")


def fields_table(name: str) -> str:
    fields = describe_algorithm(find_algorithm(name))["fields"]
    rows = [["field", "takes", "default", "meaning"]]
    rows += [[f"`{f['name']}`", f["takes"], f"{f['default']}", f["doc"]] for f in fields]
    return join_markdown(rows).replace("---:", "---") if fields else "None.\n"


@cache
def moved(name: str) -> dict[str, dict[str, int]]:
    """What travels under a method, seen once for its own page and the page of all."""
    return measure_traffic(find_algorithm(name)())


def travels_table(name: str) -> str:
    rows = [["", "group", "bytes"]]
    for way, groups in moved(name).items():
        rows += [[way, group, f"{size:,}"] for group, size in groups.items()]
    return join_markdown(rows) if len(rows) > 1 else "Nothing: the data themselves do.\n"


def bytes_table(which: str) -> str:
    """A client's bytes in a round, of every method that can run across sites."""
    rows = [["method", "to a site", "from a site", "of which not the model"]]
    for name in list_algorithms():
        if not find_algorithm(name).pools:
            down, up = moved(name)["down"], moved(name)["up"]
            others = ", ".join(f"`{group}` {size:,}" for group, size in up.items() if group != "model")
            rows.append([name, f"{sum(down.values()):,}", f"{sum(up.values()):,}", others or "nothing"])
    return join_markdown(rows)


def settings_table(section: str) -> str:
    rows = [["setting", "takes", "default", "option", "meaning"]]
    for each in list_settings(section):
        name, default, option = (f"`{text}`" if text else "" for text in (each.name, each.default_text, each.option))
        rows.append([name, each.takes, default + each.made_for_text, option, each.meaning])
    return join_markdown(rows).replace("---:", "---")


def ranges_table(which: str) -> str:
    """What `fedcir tune` tries of every method's own fields."""
    rows = [["algorithm", "setting", "default", "values"]]
    for name in list_algorithms():
        for field in describe_algorithm(find_algorithm(name))["fields"]:
            if field["tried"]:
                setting = f"`algorithm.{field['name']}`"
                rows.append([name, setting, f"{field['default']}", field["tried"].replace(",", ", ")])
    return join_markdown(rows).replace("---:", "---")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
