"""Comparisons as rows of text, and those as Markdown."""

from collections.abc import Sequence

from fedcir.compare import Estimate, Method

Rows = list[list[str]]


def comparison_rows(methods: Sequence[Method], baseline: str, seeds: int) -> Rows:
    """A header and one row a method: accuracies of the last round in per cent."""
    domains = list(methods[0].domains)
    header = ["method", *domains, "mean", "worst", f"rounds to {baseline}'s last"]
    if seeds > 1:
        header.append(f"difference to {baseline} (95 %)")
    rows = [header]
    for method in methods:
        row = [method.algorithm, *(percent(method.domains[d]) for d in domains), percent(method.mean)]
        row += [percent(method.worst), _rounds(method, seeds)]
        if seeds > 1:
            row.append(_difference(method))
        rows.append(row)
    return rows


def percent(estimate: Estimate) -> str:
    if estimate.std is None:
        return f"{100 * estimate.mean:.1f}"
    return f"{100 * estimate.mean:.1f} ± {100 * estimate.std:.1f}"


def markdown(rows: Rows) -> str:
    header, *body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = " | ".join(["---"] + ["---:"] * (len(rows[0]) - 1))
    return "".join(f"| {line} |\n" for line in [header, rule, *body])


def _rounds(method: Method, seeds: int) -> str:
    if method.rounds_to_baseline is None:
        return "not reached" if not method.reached else f"{method.reached} of {seeds} seeds"
    rounds = f"{method.rounds_to_baseline:g}"
    return rounds if method.reached == seeds else f"{rounds} ({method.reached} of {seeds} seeds)"


def _difference(method: Method) -> str:
    if method.difference is None or method.half_width is None:
        return ""
    return f"{100 * method.difference.mean:+.2f} ± {100 * method.half_width:.2f}"
