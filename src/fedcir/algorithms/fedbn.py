"""FedBN: each client keeps its own BatchNorm layers, and everything else is averaged.

Weights, biases and running statistics of BatchNorm stay with the client, so there is no one model for all: each
domain is tested with the layers of the client that trains on it.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.
ICLR 2021. https://arxiv.org/abs/2102.07623
"""

from dataclasses import dataclass

from fedcir.algorithms.algorithm import Algorithm
from fedcir.errors import InputError
from fedcir.models.adapters import frozen_names
from fedcir.models.builder import NetworkBuilder
from fedcir.models.tensors import batchnorm_names
from fedcir.types import Modules


@dataclass(frozen=True)
class FedBN(Algorithm):
    """Li et al., ICLR 2021. https://arxiv.org/abs/2102.07623"""

    keeps_batchnorm = True

    def build(self, builder: NetworkBuilder) -> Modules:
        modules = super().build(builder)
        if not batchnorm_names(modules["model"]) - frozen_names(modules["model"]):
            raise InputError(
                "fedbn keeps BatchNorm layers that train on each client, but this network has none: use fedavg"
            )
        return modules
