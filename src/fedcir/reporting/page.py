"""Tables as Markdown, CSV and LaTeX, and self-contained HTML pages of sentences, tables and charts."""

import csv
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from typing import Any

from fedcir.algorithms import PAPER_METHODS
from fedcir.reporting.charts import Chart
from fedcir.text import escape_cell, escape_markdown

Rows = list[list[str]]
"""Cells of a table. The first row is the header; the first cell of each row is its name."""


def to_text_rows(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Convert dictionaries to a table, numbers with six digits."""

    def to_text(value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else f"{value:.6g}"

    return [list(rows[0]), *([to_text(value) for value in row.values()] for row in rows)]


def to_markdown(rows: Rows) -> str:
    """Convert a table whose cells may hold any text, such as names of domains."""
    return join_markdown([[escape_markdown(cell) for cell in row] for row in rows])


def join_markdown(rows: Rows) -> str:
    """Convert a table whose cells are Markdown already; only `|`, which would end a cell, is escaped."""
    header, *body = [" | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) for row in rows]
    rule = " | ".join(["---"] + ["---:"] * (len(rows[0]) - 1))
    return "".join(f"| {line} |\n" for line in [header, rule, *body])


def to_csv(rows: Rows) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([escape_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def to_latex(rows: Rows) -> str:
    """Convert a table to a tabular for the booktabs package."""
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    lines = [" & ".join("".join(special.get(c, c) for c in cell) for cell in row) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    top, bottom = rf"\begin{{tabular}}{{{columns}}}" + "\n\\toprule", "\\bottomrule\n\\end{tabular}"
    return "\n".join([top, lines[0], r"\midrule", *lines[1:], bottom]) + "\n"


@dataclass(frozen=True)
class Sentences:
    """A list of sentences; text between backticks is shown as code."""

    sentences: tuple[str, ...]


def to_sentence(note: str) -> str:
    """Capitalise a note and add a full stop."""
    return f"{note[0].upper()}{note[1:]}."


@dataclass(frozen=True)
class Table:
    caption: str
    rows: Rows


@dataclass(frozen=True)
class Figure:
    """A chart, or several charts from which the reader chooses one."""

    title: str
    choices: dict[str, Chart]
    note: str = ""
    pick: str = "show"
    """Label of the choice."""
    wide: bool = False


@dataclass(frozen=True)
class Listing:
    """Text of a file, collapsed."""

    title: str
    text: str


Block = Sentences | Table | Figure | Listing


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


def render_page(title: str, lead: str, sections: Sequence[Section], methods: Sequence[str] = ()) -> str:
    """Render a page as HTML. Its content policy forbids external resources, and all names are escaped.

    The reader can show and hide `methods` in all charts.
    """
    figures: list[Figure] = []
    body = "".join(_render_section(number, section, figures) for number, section in enumerate(sections))
    links = "".join(f'<a href="#s{n}">{escape(section.title)}</a>' for n, section in enumerate(sections))
    charts = [
        {
            "title": figure.title,
            "choices": [
                {"name": name, "kind": type(chart).__name__.lower(), **_round_floats(asdict(chart))}
                for name, chart in figure.choices.items()
            ],
        }
        for figure in figures
    ]
    return _read_asset("page.html").format(
        title=escape(title),
        lead=escape(lead),
        links=links,
        body=body,
        style=_read_asset("page.css"),
        script=_read_asset("page.js"),
        data=_to_script({"methods": list(methods), "colours": assign_colours(methods), "figures": charts}),
    )


COLOURS = (PAPER_METHODS[-1], *PAPER_METHODS[1:-1], PAPER_METHODS[0])
"""The paper's methods in the order of their colours, the same in every report."""


def assign_colours(methods: Sequence[str]) -> list[int]:
    """Give each method the number of its usual colour if that is free, else the next free number."""
    numbers: dict[str, int] = {}
    for name in methods:
        usual = name.split(" ")[0]
        if usual in COLOURS and COLOURS.index(usual) not in numbers.values():
            numbers[name] = COLOURS.index(usual)
    free = (number for number in itertools.count() if number not in numbers.values())
    return [numbers[name] if name in numbers else numbers.setdefault(name, next(free)) for name in methods]


def _read_asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _to_script(data: object) -> str:
    """Encode JSON so that it cannot close the script element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _round_floats(value: Any) -> Any:
    """Round all numbers to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _round_floats(item) for key, item in value.items()}
    return [_round_floats(item) for item in value] if isinstance(value, list | tuple) else value


def _render_section(number: int, section: Section, figures: list[Figure]) -> str:
    """Render a section; consecutive figures share a row. Its figures are appended to `figures`."""
    parts = []
    for is_figure, blocks in itertools.groupby(section.blocks, lambda block: isinstance(block, Figure)):
        rendered = ""
        for block in blocks:
            rendered += _render_block(block, len(figures))
            if isinstance(block, Figure):
                figures.append(block)
        parts.append(f'<div class="figures">{rendered}</div>' if is_figure else rendered)
    title = escape(section.title)
    return f'<section aria-labelledby="s{number}"><h2 id="s{number}">{title}</h2>{"".join(parts)}</section>'


def _render_block(block: Block, number: int) -> str:
    if isinstance(block, Sentences):
        items = (re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence)) for sentence in block.sentences)
        return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
    if isinstance(block, Listing):
        return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"
    return _render_figure(block, number) if isinstance(block, Figure) else _render_table(block)


def _render_table(table: Table) -> str:
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


def _render_figure(figure: Figure, number: int) -> str:
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
