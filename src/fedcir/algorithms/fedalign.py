"""FedAlign: FedCiR without the regulariser on generated representations."""

from dataclasses import dataclass, field

from fedcir.algorithms.fedcir import FedCiR


@dataclass(frozen=True)
class FedAlign(FedCiR):
    """Li et al., 2023, ablation. https://arxiv.org/abs/2308.15786"""

    lambda_reg: float = field(default=0.0, init=False)
    """Always 0."""
