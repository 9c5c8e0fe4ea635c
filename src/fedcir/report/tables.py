"""Comparisons as rows of text, and those as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Sequence

from fedcir.compare import Estimate, Method

Rows = list[list[str]]


def comparison_rows(methods: Sequence[Method], baseline: str, seeds: int, target: float | None = None) -> Rows:
    """A header and one row a method: accuracies of the last round in per cent."""
    domains = list(methods[0].domains)
    header = ["method", *domains, "mean", "worst", *goal_header(baseline, target)[:2]]
    if seeds > 1:
        header.append(f"difference to {baseline} (95 %)")
    rows = [header]
    for method in methods:
        row = [method.algorithm, *(percent(method.domains[d]) for d in domains), percent(method.mean)]
        row += [percent(method.worst), *goal_cells(method, seeds)[:2]]
        if seeds > 1:
            row.append(difference(method))
        rows.append(row)
    return rows


def comparison_numbers(methods: Sequence[Method]) -> Rows:
    """The same as plain numbers, accuracies as fractions, for a program to read."""
    domains = list(methods[0].domains)
    measures = [*domains, "mean", "worst"]
    header = ["method", *(f"{m}{end}" for m in measures for end in ("", "_std"))]
    rows = [[*header, "rounds_to_target", "bytes_to_target", "reached", "difference", "half_width"]]
    for method in methods:
        estimates = [*method.domains.values(), method.mean, method.worst]
        goal, difference = method.to_target, method.difference
        numbers = [value for estimate in estimates for value in (estimate.mean, estimate.std)]
        numbers += [goal.rounds, goal.bytes, goal.reached, difference.mean if difference else None, method.half_width]
        rows.append([method.algorithm, *("" if value is None else f"{value:.6g}" for value in numbers)])
    return rows


def percent(estimate: Estimate) -> str:
    if estimate.std is None:
        return f"{100 * estimate.mean:.1f}"
    return f"{100 * estimate.mean:.1f} ± {100 * estimate.std:.1f}"


def markdown(rows: Rows) -> str:
    header, *body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = " | ".join(["---"] + ["---:"] * (len(rows[0]) - 1))
    return "".join(f"| {line} |\n" for line in [header, rule, *body])


def comma_separated(rows: Rows) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
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
    goal = f"{baseline}'s last" if target is None else f"{100 * target:g} %"
    return [f"rounds to {goal}", f"MB to {goal}", f"TFLOPs to {goal}"]


def goal_cells(method: Method, seeds: int) -> list[str]:
    """What a target took; where the middle seed did not get there, how many did."""
    goal = method.to_target
    if goal.rounds is None or goal.bytes is None:
        return ["not reached"] * 3 if not goal.reached else [f"{goal.reached} of {seeds} seeds", "", ""]
    rounds = f"{goal.rounds:g}" if goal.reached == seeds else f"{goal.rounds:g} ({goal.reached} of {seeds} seeds)"
    return [rounds, f"{goal.bytes / 1e6:.1f}", "" if goal.flops is None else f"{goal.flops / 1e12:.3g}"]


def difference(method: Method) -> str:
    if method.difference is None or method.half_width is None:
        return ""
    return f"{100 * method.difference.mean:+.2f} ± {100 * method.half_width:.2f}"
