"""Images from the gradient of a training step: what a server can see in an update.

Geiping et al., 2020 (Inverting Gradients, https://arxiv.org/abs/2003.14053): images whose gradient has the direction of
the one that was sent, and that are smooth.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

STEP = 0.1
"""Adam's step, in units of a channel's standard deviation."""
SMOOTH = 0.1
"""Weight of the total variation."""

Gradient = Callable[[Tensor], Sequence[Tensor]]
"""The gradient of the loss on a batch of images, which can be differentiated once more."""


def invert(gradient: Gradient, sent: Sequence[Tensor], low: Tensor, high: Tensor, steps: int, start: Tensor) -> Tensor:
    """Images (B, C, H, W) of which the gradient looks like the one that was sent, from `start`, within the bounds."""
    images = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([images], lr=STEP)
    falls = [round(steps * part) for part in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, falls, gamma=0.1)
    for _ in range(steps):
        distance = 1 - cosine(gradient(images), sent)
        (slope,) = torch.autograd.grad(distance + SMOOTH * total_variation(images), images)
        images.grad = slope.sign()  # as the paper does: the gradient's size says little
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            images.copy_(torch.maximum(torch.minimum(images, high), low))
    return images.detach()


def cosine(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """The cosine of the angle between two gradients, all their tensors together."""
    first, second = (torch.cat([part.flatten() for part in each]) for each in (one, other))
    return F.cosine_similarity(first, second, dim=0)


def total_variation(images: Tensor) -> Tensor:
    """How much neighbouring pixels differ, on average."""
    down, across = images.diff(dim=2).abs().mean(), images.diff(dim=3).abs().mean()
    return down + across


def psnr(images: Tensor, others: Tensor) -> list[float]:
    """Peak signal-to-noise ratio in dB of each image, of values from 0 to 1; above 20 the image can be made out."""
    errors = (images - others).square().flatten(1).mean(1).clamp_min(1e-10)
    return [float(value) for value in -10 * errors.log10()]


def nearest(image: Tensor, among: Tensor) -> int:
    """Which of some images (N, C, H, W) is nearest to one, by the correlation of their pixels.

    Brightness and contrast do not count, as an attack seldom finds them.
    """
    one, all = (_standardised(each) for each in (image[None], among))
    return int((all @ one.T).squeeze(1).argmax())


def _standardised(images: Tensor) -> Tensor:
    flat = images.flatten(1)
    return F.normalize(flat - flat.mean(1, keepdim=True))
