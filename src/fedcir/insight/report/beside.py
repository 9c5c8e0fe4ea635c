"""What a report tells beside accuracy: AUC, F1, sensitivity and specificity of two classes, macro F1 of more."""

import math
from collections.abc import Mapping

from fedcir.analysis.diagnosis import Diagnosis
from fedcir.insight.report.page import Table
from fedcir.insight.report.tables import UNSEEN, percent
from fedcir.runs.compare import Estimate


def beside_accuracy(found: Mapping[str, Mapping[int, Diagnosis]]) -> Table:
    """By method and domain, over the seeds of each method."""
    one = next(iter(next(iter(found.values())).values()))
    names = list(one.beside_accuracy(one.domains[0]))
    positive = f"; {one.classes[1]} counts as positive" if len(names) > 1 else ""
    rows = [["method", "domain", *names]]
    for method, by_seed in found.items():
        first = next(iter(by_seed.values()))
        for domain in first.domains:
            each = [diagnosis.beside_accuracy(domain) for diagnosis in by_seed.values()]
            told = f"{domain} ({UNSEEN})" if domain in first.unseen else domain
            rows.append([method, told, *(_cell([values[name] for values in each]) for name in names)])
    return Table(f"Beside accuracy (%), mean ± standard deviation over seeds{positive}", rows)


def _cell(values: list[float]) -> str:
    """Empty where a domain has no test image of a class that the figure needs."""
    return "" if any(map(math.isnan, values)) else percent(Estimate.of(values))
