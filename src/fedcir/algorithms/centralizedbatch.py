"""CentralizedBatch: all data in one place, as many steps as one client, each on the batches of all clients as one.

A client of a federation takes no more steps in a row than this, and all clients together see no more images: what
Centralized gains beyond it comes from its longer row of steps, not from the data being in one place.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedcir.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class CentralizedBatch(Algorithm):
    """Not a federated method: the data move."""

    pools: ClassVar[Literal["steps", "batch"] | None] = "batch"
