"""What a run tells of the paper's bound (Theorem 2): the global model's risk, and the divergence to the mixture.

The bound's first term is the average risk of the local models, each on its own client's data. A run keeps only the
global model, so its average risk stands in for that term.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcir.analysis.bootstrap import Interval, mean_of
from fedcir.analysis.divergence import Divergences
from fedcir.analysis.views import View
from fedcir.types import RoundRecord


@dataclass(frozen=True)
class Bound:
    """Both terms side by side. Their scales differ (a loss, and a distance up to 2), so no sum is made of them."""

    global_risk_interval: Interval
    """The global model's mean loss on each domain's test images, averaged over domains: in place of the first term,
    sum_k p(k) err_k(h_k), whose local models h_k are not kept."""
    divergence_interval: Interval
    """The second term: the mean distance of a domain's representations to the mixture's."""

    @property
    def global_risk(self) -> float:
        return self.global_risk_interval.value

    @property
    def divergence(self) -> float:
        return self.divergence_interval.value


def bound(views: Sequence[View], apart: Divergences, seed: int = 0) -> Bound:
    """With clients weighing the same, as in the mean over clients."""
    return Bound(mean_of({view.domain: view.losses for view in views}, seed), apart.mean_to_mixture)


def risks(records: Sequence[RoundRecord]) -> dict[int, dict[str, float]]:
    """Each client's risk by round, where it was evaluated: the global model's mean loss on its test images."""
    return {record.round: record.risk for record in records if record.risk}


def average_risk(records: Sequence[RoundRecord]) -> dict[int, float]:
    """The mean over clients by round; a domain that nobody trains on is left out."""
    return {record.round: record.risk_mean for record in records if record.risk_mean is not None}
