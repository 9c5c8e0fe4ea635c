"""What the numbers of a run, or of data before any run, say: how far clients are apart, where, and at what risk."""

from fedcir.analysis.bootstrap import Interval
from fedcir.analysis.divergence import Divergences, distance, divergences, proxy_a_distance

__all__ = ["Divergences", "Interval", "distance", "divergences", "proxy_a_distance"]
