"""A trained network with everything that belongs to it inside: bytes of pictures in, probabilities out."""

import copy

import torch
from torch import Tensor, nn

from fedcir.models.taps import leave_taps
from fedcir.use.trained import Trained


class Deployed(nn.Module):
    """Takes uint8 images (B, H, W, C), as pictures lie in memory, and gives probabilities (B, classes)."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        used = {"model", *trained.algorithm.trains, *trained.algorithm.keeps}
        modules = {name: copy.deepcopy(module) for name, module in trained.modules.items() if name in used}
        for module in modules.values():
            leave_taps(module)
            module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.network = modules.pop("model")
        self.others = nn.ModuleDict(modules)
        self.algorithm, self.ctx = trained.algorithm, trained.ctx
        self.temperature = trained.calibration.temperature
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", trained.normalisation.scale)
        self.register_buffer("shift", trained.normalisation.shift)

    def forward(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        modules = {"model": self.network, **self.others}
        logits = self.algorithm.predict(modules, x * self.scale + self.shift, self.ctx)
        return (logits / self.temperature).softmax(-1)
