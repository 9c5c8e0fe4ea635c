"""FedAvg: clients train, the server averages. Every other method is a change to this one."""

from dataclasses import dataclass

from fedcir.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """McMahan et al., 2017. https://arxiv.org/abs/1602.05629"""
