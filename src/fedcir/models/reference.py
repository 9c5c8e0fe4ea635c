"""FedSR's reference distribution."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reference(nn.Module):
    """r(z|y): a learned Gaussian per class, and the authors' scalar C that z may be scaled by."""

    def __init__(self, num_classes: int, latent: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(num_classes, latent))
        self.raw_sigma = nn.Parameter(torch.ones(num_classes, latent))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean[y], F.softplus(self.raw_sigma[y])  # each (B, Z)
