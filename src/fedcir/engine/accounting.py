"""Epsilon of a run, by Opacus' accountant of Renyi differential privacy, and what counts towards it."""

import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        if not steps:
            return 0.0
        divergences = steps * _of_one_step(self.noise, self.rate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # at an end of ORDERS epsilon is not the tightest, but valid
            epsilon, _ = _analysis().get_privacy_spent(orders=ORDERS, rdp=divergences, delta=self.delta)
        return float(epsilon)


@cache
def _of_one_step(noise: float, rate: float) -> NDArray[np.float64]:
    """Renyi divergences by order, which add up over steps."""
    return _analysis().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)  # type: ignore[no-any-return]


def _analysis() -> Any:
    try:
        from opacus.accountants.analysis import rdp
    except ImportError:
        raise InputError("privacy.noise needs Opacus' accountant: pip install 'fedcir[privacy]'") from None
    return rdp


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
