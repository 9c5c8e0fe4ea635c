"""FedSR: a probabilistic encoder whose z is short and says little about x beyond y.

In the authors' code each client keeps the reference r(z|y) to itself, and so it is here by default.

A. T. Nguyen, P. H. S. Torr, S.-N. Lim. FedSR: A Simple and Effective Domain Generalization Method for Federated
Learning. NeurIPS 2022. https://openreview.net/forum?id=mrt90D00aQX
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm
from fedcir.errors import InputError
from fedcir.losses import gaussian_kl, l2_norm
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import GaussianClassifier, Reference, sample
from fedcir.types import LocalContext, Losses, Modules
from fedcir.validation import Between, StdDev, Weight


@dataclass(frozen=True)
class FedSR(Algorithm):
    """Nguyen et al., NeurIPS 2022. https://openreview.net/forum?id=mrt90D00aQX"""

    alpha_l2r: Weight = 0.0
    """Weight of the length of z."""
    alpha_cmi: Weight = 1e-6
    """Weight of the KL of p(z|x) to r(z|y), which upper-bounds I(X;Z|Y)."""
    squared: bool = False
    """Penalise the squared length, as the paper's text does, instead of the length, as the authors' code does."""
    scaled: bool = False
    """Scale z by a learned scalar C before the KL, as the authors' code does."""
    share_reference: bool = False
    """Average r(z|y) over clients instead of leaving each client its own."""
    sigma_init: StdDev = 0.1
    """The encoder's sigma before training."""
    sigma_floor: StdDev = 1e-3
    """The encoder's sigma is never below this."""
    eval_samples: Annotated[int, Between(0, 10_000)] = 0
    """How many samples of z inference averages the probabilities of, 20 in the authors' code; 0 takes z = mu."""

    needs_classes = True
    ranges = {"alpha_l2r": "0,1e-3,1e-2", "alpha_cmi": "5e-7,1e-6,5e-5"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_init <= (floor := self.sigma_floor):
            raise InputError(f"algorithm.sigma_init must be above sigma_floor={floor}, got {self.sigma_init}")

    @property
    def trains(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("model", "reference") if self.share_reference else ("model",)

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.share_reference else ("reference",)

    def build(self, builder: NetworkBuilder) -> Modules:
        model = builder.gaussian_classifier(self.sigma_init, self.sigma_floor)
        return {"model": model, "reference": Reference(builder.num_classes, builder.latent)}

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model: GaussianClassifier = modules["model"]
        reference: Reference = modules["reference"]
        mu, sigma = model.encoder(x)  # each (B, Z)
        z = sample(mu, sigma, ctx.rng)
        total = ce = ctx.cross_entropy(model.head(z), y)
        terms = {"ce": ce}
        if self.alpha_l2r:
            terms["l2r"] = l2_norm(z, self.squared)
            total = total + self.alpha_l2r * terms["l2r"]
        if self.alpha_cmi:
            scale = reference.scale if self.scaled else torch.ones_like(reference.scale)
            terms["cmi"] = gaussian_kl(mu * scale, sigma * scale.abs(), *reference(y)).mean()
            total = total + self.alpha_cmi * terms["cmi"]
        return Losses(total, terms)

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        model: GaussianClassifier = modules["model"]
        return model.predict(x, self.eval_samples, ctx.rng)
