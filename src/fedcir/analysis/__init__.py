"""Analyse data and runs: distances between clients, the bound, label skew, and privacy leakage."""

from fedcir.analysis.diagnosis import Diagnosis, diagnose_data, diagnose_run
from fedcir.analysis.divergence import (
    Alignment,
    Bound,
    Divergences,
    average_risk,
    distance,
    divergences,
    proxy_a_distance,
)
from fedcir.analysis.findings import verdict
from fedcir.client.cost import cost_to_target as to_target
from fedcir.runs.statistics import Interval

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
    "to_target",
    "verdict",
]
