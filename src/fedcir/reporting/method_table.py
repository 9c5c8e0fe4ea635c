"""Results of methods as rows of tables: accuracies by domain, differences, and costs to a target."""

from collections.abc import Sequence
from typing import Any

from fedcir.reporting.page import Rows
from fedcir.runs.statistics import COVERS, Estimate, MethodResult
from fedcir.text import format_bytes, format_flops

UNSEEN = "not trained on"


def comparison_rows(methods: Sequence[MethodResult], baseline: str, seeds: int, target: float | None = None) -> Rows:
    """Build a table with a row for each method: accuracies of the last round in per cent."""
    has_unseen = any(method.unseen for method in methods)
    means = ["seen mean", "worst", "unseen mean"] if has_unseen else ["mean", "worst"]
    header = ["method", *domain_header(methods), *means, *goal_header(baseline, target)[:2]]
    rows = [[*header, f"difference to {baseline} ({COVERS})"] if seeds > 1 else header]
    for method in methods:
        row = [method.algorithm, *(domain_cell(methods, method, domain) for domain in domains_of(methods))]
        estimates = (method.mean, method.worst, method.unseen_mean) if has_unseen else (method.mean, method.worst)
        row += [*map(format_percent, estimates), *goal_cells(method, seeds)[:2]]
        rows.append([*row, format_difference(method)] if seeds > 1 else row)
    return rows


def comparison_numbers(methods: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """Return the same table as numbers by name, accuracies as fractions."""
    has_unseen = any(method.unseen for method in methods)
    rows = []
    for method in methods:
        estimates = {name: method.domains.get(name) for name in domains_of(methods)}
        estimates |= {"mean": method.mean, "worst": method.worst}
        estimates |= {"unseen_mean": method.unseen_mean} if has_unseen else {}
        row: dict[str, Any] = {"method": method.algorithm}
        for name, estimate in estimates.items():
            row |= {name: estimate.mean if estimate else None, f"{name}_std": estimate.std if estimate else None}
        goal, difference = method.to_target, method.difference
        row |= {"rounds_to_target": goal.rounds, "bytes_to_target": goal.bytes, "reached": goal.reached}
        rows.append({**row, "difference": difference.mean if difference else None, "half_width": method.half_width})
    return rows


def domains_of(methods: Sequence[MethodResult]) -> list[str]:
    return list(dict.fromkeys(domain for method in methods for domain in method.domains))


def mark_unseen(name: str, is_unseen: bool) -> str:
    return f"{name} ({UNSEEN})" if is_unseen else name


def domain_header(methods: Sequence[MethodResult]) -> list[str]:
    """Return the domains, marked if no method trains on them."""
    unseen = set.intersection(*(set(method.unseen) for method in methods))
    return [mark_unseen(domain, domain in unseen) for domain in domains_of(methods)]


def domain_cell(methods: Sequence[MethodResult], method: MethodResult, domain: str) -> str:
    """Format a domain's accuracy, marked if this method does not train on it but another one does."""
    is_unseen = domain in method.unseen and any(domain not in other.unseen for other in methods)
    return mark_unseen(format_percent(method.domains.get(domain)), is_unseen)


def format_percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{100 * estimate.mean:.1f}" + ("" if estimate.std is None else f" ± {100 * estimate.std:.1f}")


def format_difference(method: MethodResult) -> str:
    if method.difference is None or method.half_width is None:
        return ""
    return f"{100 * method.difference.mean:+.2f} ± {100 * method.half_width:.2f}"


def goal_header(baseline: str, target: float | None) -> list[str]:
    """Return the names of the columns of the cost to a target."""
    goal = f"match {baseline}" if target is None else f"reach {100 * target:g} %"
    return [f"rounds to {goal}", f"data moved to {goal}", f"computation to {goal}"]


def goal_cells(method: MethodResult, seeds: int) -> list[str]:
    """Format the cost to a target, or how many seeds reached it if the median seed did not."""
    goal = method.to_target
    if goal.rounds is None or goal.bytes is None:
        return ["not reached"] * 3 if not goal.reached else [f"{goal.reached} of {seeds} seeds", "", ""]
    rounds = f"{goal.rounds:g}" if goal.reached == seeds else f"{goal.rounds:g} ({goal.reached} of {seeds} seeds)"
    return [rounds, format_bytes(goal.bytes), "" if goal.flops is None else format_flops(goal.flops)]
