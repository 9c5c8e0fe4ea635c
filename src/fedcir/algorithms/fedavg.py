"""FedAvg: clients train, the server averages. Every other method is a change to this one.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017. https://arxiv.org/abs/1602.05629
"""

from dataclasses import dataclass

from fedcir.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """McMahan et al., 2017. https://arxiv.org/abs/1602.05629"""
