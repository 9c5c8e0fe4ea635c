"""FedCiRPlus: features that are client-invariant by construction, and a head that is free of label shares.

The backbone takes each image's own contrast and colour out and keeps no statistics of the data (`model.norm`). Each
client's own label shares correct its cross-entropy (`local.prior`), so that all clients train a head under the same
prior, which FedCiR asks a generator for. Clients upload their model and nothing else.

Z. Li, Z. Lin, J. Shao, Y. Mao, J. Zhang. FedCiR: Client-Invariant Representation Learning for Federated Non-IID
Features. 2023. https://arxiv.org/abs/2308.15786
"""

from dataclasses import dataclass

from fedcir.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class FedCiRPlus(Algorithm):
    """This package's own, after Li et al., 2023 (https://arxiv.org/abs/2308.15786)."""

    needs_classes = True
    defaults = {"model": {"norm": "invariant"}, "local": {"prior": "client"}}
