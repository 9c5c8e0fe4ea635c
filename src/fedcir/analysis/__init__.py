"""What the numbers of a run, or of data before any run, say: how far clients are apart, where, and at what risk."""

from fedcir.analysis.divergence import Distance, Divergences, distance, divergences, proxy_a_distance

__all__ = ["Distance", "Divergences", "distance", "divergences", "proxy_a_distance"]
