"""A trained network with everything that belongs to it inside: bytes of pictures in, probabilities out."""

import torch
from torch import Tensor, nn

from fedcir.use.trained import Trained


class Deployed(nn.Module):
    """Takes uint8 images (B, H, W, C), as pictures lie in memory, and gives probabilities (B, classes)."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.network = trained.network
        self.temperature = trained.calibration.temperature
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", trained.normalisation.scale)
        self.register_buffer("shift", trained.normalisation.shift)

    def forward(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        logits: Tensor = self.network(x * self.scale + self.shift)
        return (logits / self.temperature).softmax(-1)
