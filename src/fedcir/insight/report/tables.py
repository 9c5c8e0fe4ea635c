"""Comparisons as rows of text, and those as Markdown, CSV and LaTeX."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedcir.config.display import escape_markdown
from fedcir.config.spreadsheet import safe_cell
from fedcir.insight.report.quantities import flops, size
from fedcir.runs.compare import Estimate, Method
from fedcir.runs.intervals import COVERS

Rows = list[list[str]]


def comparison_rows(methods: Sequence[Method], baseline: str, seeds: int, target: float | None = None) -> Rows:
    """A header and one row a method: accuracies of the last round in per cent."""
    domains = domains_of(methods)
    unseen = any(method.unseen for method in methods)
    means = ["seen mean", "worst", "unseen mean"] if unseen else ["mean", "worst"]
    header = ["method", *domain_header(methods), *means, *goal_header(baseline, target)[:2]]
    if seeds > 1:
        header.append(f"difference to {baseline} ({COVERS})")
    rows = [header]
    for method in methods:
        row = [method.algorithm, *(domain_cell(methods, method, d) for d in domains), percent(method.mean)]
        row += [percent(method.worst), *([percent(method.unseen_mean)] if unseen else [])]
        row += goal_cells(method, seeds)[:2]
        if seeds > 1:
            row.append(difference(method))
        rows.append(row)
    return rows


def comparison_numbers(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """The same as plain numbers by name, accuracies as fractions, for a program to read."""
    domains = domains_of(methods)
    unseen = any(method.unseen for method in methods)
    rows = []
    for method in methods:
        estimates = {name: method.domains.get(name) for name in domains}
        estimates |= {"mean": method.mean, "worst": method.worst}
        estimates |= {"unseen_mean": method.unseen_mean} if unseen else {}
        row: dict[str, Any] = {"method": method.algorithm}
        for name, each in estimates.items():
            row |= {name: each.mean if each else None, f"{name}_std": each.std if each else None}
        goal, difference = method.to_target, method.difference
        row |= {"rounds_to_target": goal.rounds, "bytes_to_target": goal.bytes, "reached": goal.reached}
        rows.append({**row, "difference": difference.mean if difference else None, "half_width": method.half_width})
    return rows


def as_text(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """A header and the values, numbers with six digits."""
    return [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6g}"


UNSEEN = "not trained on"


def domains_of(methods: Sequence[Method]) -> list[str]:
    return list(dict.fromkeys(domain for method in methods for domain in method.domains))


def domain_header(methods: Sequence[Method]) -> list[str]:
    """The domains, marked where no method trains on them."""
    unseen = set.intersection(*(set(method.unseen) for method in methods))
    return [f"{domain} ({UNSEEN})" if domain in unseen else domain for domain in domains_of(methods)]


def domain_cell(methods: Sequence[Method], method: Method, domain: str) -> str:
    """A domain's accuracy, marked where this method does not train on it but another one does."""
    told = percent(method.domains.get(domain))
    apart = domain in method.unseen and any(domain not in other.unseen for other in methods)
    return f"{told} ({UNSEEN})" if apart else told


def percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.std is None:
        return f"{100 * estimate.mean:.1f}"
    return f"{100 * estimate.mean:.1f} ± {100 * estimate.std:.1f}"


def markdown(rows: Rows) -> str:
    """A table of cells that may hold any text, such as names of domains."""
    return markdown_table([[escape_markdown(cell) for cell in row] for row in rows])


def markdown_table(rows: Rows) -> str:
    """A table of cells that are Markdown already, but for `|`, which would end them."""
    header, *body = [" | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) for row in rows]
    rule = " | ".join(["---"] + ["---:"] * (len(rows[0]) - 1))
    return "".join(f"| {line} |\n" for line in [header, rule, *body])


def comma_separated(rows: Rows) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([safe_cell(cell) for cell in row] for row in rows)
    return text.getvalue()


def latex(rows: Rows) -> str:
    """A tabular for the booktabs package."""
    special = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    lines = [" & ".join("".join(special.get(c, c) for c in cell) for cell in row) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    top, bottom = rf"\begin{{tabular}}{{{columns}}}" + "\n\\toprule", "\\bottomrule\n\\end{tabular}"
    return "\n".join([top, lines[0], r"\midrule", *lines[1:], bottom]) + "\n"


def goal_header(baseline: str, target: float | None) -> list[str]:
    """The columns of what a target took."""
    goal = f"match {baseline}" if target is None else f"reach {100 * target:g} %"
    return [f"rounds to {goal}", f"data moved to {goal}", f"computation to {goal}"]


def goal_cells(method: Method, seeds: int) -> list[str]:
    """What a target took; where the middle seed did not get there, how many did."""
    goal = method.to_target
    if goal.rounds is None or goal.bytes is None:
        return ["not reached"] * 3 if not goal.reached else [f"{goal.reached} of {seeds} seeds", "", ""]
    rounds = f"{goal.rounds:g}" if goal.reached == seeds else f"{goal.rounds:g} ({goal.reached} of {seeds} seeds)"
    return [rounds, size(goal.bytes), "" if goal.flops is None else flops(goal.flops)]


def difference(method: Method) -> str:
    if method.difference is None or method.half_width is None:
        return ""
    return f"{100 * method.difference.mean:+.2f} ± {100 * method.half_width:.2f}"
