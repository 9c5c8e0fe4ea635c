"""How near representations are to the global q(z|y), and how well the generator's Gaussians stand for the true ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedcir.analysis.views import View
from fedcir.losses import gaussian_kl
from fedcir.records import RunFolder
from fedcir.types import Arrays


@dataclass(frozen=True)
class Alignment:
    """KL divergences in nats, summed over z."""

    clients: dict[str, float]
    """Of each client's p(z|x) to q(z|y), on average over its samples: what L_align is."""
    generator: float
    """Of the true class Gaussians, over all clients together, to the generator's, on average over the classes. Only a
    simulation can know it."""


def gaussians_of(folder: RunFolder) -> Arrays | None:
    """The class Gaussians that the server shares at the end, where the method has them."""
    state = folder.load_checkpoint()
    return None if state is None else state.shared.get("gaussians")


def alignment(views: Sequence[View], gaussians: Arrays) -> Alignment | None:
    """None where the encoder gives no sigma."""
    if any(view.sigma is None for view in views):
        return None
    mean, std = gaussians["mean"], gaussians["std"]
    clients = {}
    for view in views:
        assert view.sigma is not None
        y = torch.from_numpy(view.labels)
        kl = gaussian_kl(torch.from_numpy(view.z), torch.from_numpy(view.sigma), mean[y], std[y])
        clients[view.domain] = float(kl.mean())
    z, labels = (np.concatenate([getattr(view, name) for view in views]) for name in ("z", "labels"))
    floor = float(std.min())
    there = [label for label in np.unique(labels) if (labels == label).sum() > 1]
    kls = []
    for label in there:
        own = torch.from_numpy(z[labels == label])
        true = own.mean(0, keepdim=True), own.std(0, keepdim=True, unbiased=False).clamp_min(floor)
        kls.append(float(gaussian_kl(*true, mean[label : label + 1], std[label : label + 1])))
    return Alignment(clients, float(np.mean(kls)) if kls else float("nan"))
