"""Epsilon of a run, by Opacus' accountant of Renyi differential privacy, and what counts towards it."""

import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedcir.types import InputError

ORDERS = (1.01, 1.02, 1.05, *(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 65), 80, 96, 128, 192, 256, 512)
"""Renyi orders to search: any of them gives a valid epsilon, and the best of them is taken."""


@dataclass(frozen=True)
class Accountant:
    """Of a Gaussian mechanism on clipped updates, where adjacent runs differ by one client."""

    noise: float
    delta: float
    rate: float = 1.0
    """Probability that a client takes part in a round, each by a draw of its own (Poisson sampling)."""

    def epsilon(self, steps: int) -> float:
        """After so many noised sums of updates."""
        return _epsilon(self.noise, self.rate, steps, self.delta) if steps else 0.0


@cache
def _epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise InputError("privacy.noise needs Opacus' accountant: pip install 'fedcir[privacy]'") from None
    accountant = RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # at the ends of ORDERS epsilon is not the tightest, but valid
        return float(accountant.get_epsilon(delta, alphas=list(ORDERS)))


@dataclass(frozen=True)
class Releases:
    """How often a deployment has begun a round, in a file that grows by a byte each time.

    A round that is repeated after a crash gets fresh noise, and may get other replies. So it counts again.
    """

    path: Path

    def add(self) -> None:
        with open(self.path, "ab") as file:
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())

    def count(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0
