"""A frozen encoder: features that never change, computed once, and what may train right after them."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


class FrozenEncoder(nn.Module):
    """A network that does not train, and a hidden layer with ReLU that does, if there is one.

    It takes images, or the features that the network gave of them (B, F). Clients train one without the network: it
    neither travels nor takes part in their steps.
    """

    def __init__(self, network: nn.Module | None, hidden: nn.Linear | None) -> None:
        super().__init__()
        self.network = None if network is None else network.eval().requires_grad_(False)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        features = x if self.network is None or x.ndim == 2 else self.network(x)
        return cast(Tensor, features if self.hidden is None else F.relu(self.hidden(features)))

    def train(self, mode: bool = True) -> "FrozenEncoder":
        super().train(mode)
        if self.network is not None:
            self.network.eval()
        return self
