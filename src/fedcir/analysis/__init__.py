"""What the numbers of a run, or of data before any, say: how far clients are apart, where, at what risk and cost."""

from fedcir.analysis.alignment import Alignment
from fedcir.analysis.bootstrap import Interval
from fedcir.analysis.bound import Bound, average_risk, risks
from fedcir.analysis.diagnose import Diagnosis, diagnose_data, diagnose_run, verdict
from fedcir.analysis.divergence import Divergences, distance, divergences, proxy_a_distance
from fedcir.engine.cost import to_target

__all__ = [
    "Alignment",
    "Bound",
    "Diagnosis",
    "Divergences",
    "Interval",
    "average_risk",
    "diagnose_data",
    "diagnose_run",
    "distance",
    "divergences",
    "proxy_a_distance",
    "risks",
    "to_target",
    "verdict",
]
