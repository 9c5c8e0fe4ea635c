"""Centralized: all data in one place, as many steps as all clients together. A ceiling for federated methods."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcir.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class Centralized(Algorithm):
    """Not a federated method: the data move."""

    pools: ClassVar[Literal["steps", "batch"] | None] = "steps"
