"""FedReg: FedCiR without its alignment.

Z. Li, Z. Lin, J. Shao, Y. Mao, J. Zhang. FedCiR: Client-Invariant Representation Learning for Federated Non-IID
Features. 2023. https://arxiv.org/abs/2308.15786
"""

from dataclasses import dataclass, field

from fedcir.algorithms.fedcir import FedCiR


@dataclass(frozen=True)
class FedReg(FedCiR):
    """Li et al., 2023, ablation. https://arxiv.org/abs/2308.15786"""

    lambda_align: float = field(default=0.0, init=False)
    """Always 0."""
