"""One self-contained HTML page: words, tables and charts, with everything that it needs inside."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import Any

from fedcir.insight.charts import Chart
from fedcir.insight.experiments.paper import METHODS
from fedcir.insight.report.tables import Rows


@dataclass(frozen=True)
class Words:
    """Sentences, as a list; what is between backticks is a command."""

    sentences: tuple[str, ...]


def sentence(note: str) -> str:
    """A note as a sentence: with a capital letter and a full stop."""
    return f"{note[0].upper()}{note[1:]}."


@dataclass(frozen=True)
class Table:
    caption: str
    rows: Rows
    """The first is the header, and each row's first cell its name."""


@dataclass(frozen=True)
class Figure:
    """A chart, or several of which the reader picks one."""

    title: str
    choices: dict[str, Chart]
    note: str = ""
    pick: str = "show"
    """What is picked."""
    wide: bool = False


@dataclass(frozen=True)
class Listing:
    """A file's text, folded."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Words | Table | Figure | Listing, ...]


def page(title: str, lead: str, sections: Sequence[Section], methods: Sequence[str]) -> str:
    """The page's HTML. It loads nothing from outside: its policy forbids it. Names are text, whatever they hold."""
    figures: list[Figure] = []
    body = "".join(_section(number, section, figures) for number, section in enumerate(sections))
    links = "".join(f'<a href="#s{n}">{escape(section.title)}</a>' for n, section in enumerate(sections))
    data = {
        "methods": list(methods),
        "places": places(methods),
        "figures": [
            {"title": figure.title, "choices": [_told(name, chart) for name, chart in figure.choices.items()]}
            for figure in figures
        ],
    }
    return _asset("page.html").format(
        title=escape(title),
        lead=escape(lead),
        links=links,
        body=body,
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=_as_script(data),
    )


COLOURS = (METHODS[-1], *METHODS[1:-1], METHODS[0])
"""The paper's methods by the colour that each has in every report: its own first, the ceiling last."""


def places(methods: Sequence[str]) -> list[int]:
    """The number of each method's colour: its own where that is free, else the next that nobody has."""
    taken: dict[str, int] = {}
    for name in methods:
        own = name.split(" ")[0]
        if own in COLOURS and COLOURS.index(own) not in taken.values():
            taken[name] = COLOURS.index(own)
    free = (number for number in itertools.count() if number not in taken.values())
    return [taken[name] if name in taken else taken.setdefault(name, next(free)) for name in methods]


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _as_script(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _told(name: str, chart: Chart) -> dict[str, Any]:
    return {"name": name, "kind": type(chart).__name__.lower(), **_short(asdict(chart))}


def _short(value: Any) -> Any:
    """The same with numbers of six digits at most."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return value


def _section(number: int, section: Section, figures: list[Figure]) -> str:
    parts, row = [], []
    for block in section.blocks:
        if isinstance(block, Figure):
            row.append(_figure(len(figures), block))
            figures.append(block)
            continue
        if row:
            parts.append(f'<div class="figures">{"".join(row)}</div>')
            row = []
        parts.append(_block(block))
    if row:
        parts.append(f'<div class="figures">{"".join(row)}</div>')
    title = escape(section.title)
    return f'<section aria-labelledby="s{number}"><h2 id="s{number}">{title}</h2>{"".join(parts)}</section>'


def _block(block: Words | Table | Listing) -> str:
    if isinstance(block, Words):
        items = (re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence)) for sentence in block.sentences)
        return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
    if isinstance(block, Listing):
        return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"
    return _table(block)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in table.rows[1:]
    )
    caption = escape(table.caption)
    return (
        f'<p class="caption">{caption}</p><div class="table" role="region" aria-label="{caption}" tabindex="0">'
        f'<table aria-label="{caption}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _figure(number: int, figure: Figure) -> str:
    wide = " wide" if figure.wide else ""
    pick = ""
    if len(figure.choices) > 1:
        options = "".join(f'<option value="{n}">{escape(name)}</option>' for n, name in enumerate(figure.choices))
        pick = f'<label class="pick">{escape(figure.pick)} <select>{options}</select></label>'
    note = f'<p class="note">{escape(figure.note)}</p>' if figure.note else ""
    return (
        f'<figure class="chart{wide}" data-figure="{number}"><figcaption>{escape(figure.title)}</figcaption>{pick}'
        f'<div class="plot"></div><div class="legend"></div>{note}'
        '<details class="numbers"><summary>Numbers</summary></details></figure>'
    )
