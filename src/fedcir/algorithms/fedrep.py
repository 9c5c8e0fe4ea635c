"""FedRep: clients share the encoder, and each keeps a head of its own.

Algorithm 1 of the paper for networks, as in its experiments: in each round a client first trains its head with the
received encoder fixed, then the encoder with that head fixed, and the server averages the encoders. The paper's
epochs are shares of the round's steps here.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai. Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021. https://arxiv.org/abs/2102.07078
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from torch import nn

from fedcir.algorithms.algorithm import Algorithm, Batch
from fedcir.errors import InputError
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import Classifier
from fedcir.models.optimizers import RoundOptimizer
from fedcir.types import LocalContext, Modules
from fedcir.validation import Weight


@dataclass(frozen=True)
class FedRep(Algorithm):
    """Collins et al., ICML 2021. https://arxiv.org/abs/2102.07078"""

    tau: Weight = 10.0
    """Steps of the head for each step of the encoder, which takes at least one: the paper's 10 epochs, then 1."""

    keeps_head = True
    ranges = {"tau": "1,3,10"}

    def build(self, builder: NetworkBuilder) -> Modules:
        modules = super().build(builder)
        if not any(p.requires_grad for p in modules["model"].encoder.parameters()):
            raise InputError("fedrep shares the encoder, but this one is frozen: use fedavg, or set model.freeze=false")
        return modules

    def local_update(
        self, modules: Modules, batches: Iterable[Batch], optimizer: RoundOptimizer, ctx: LocalContext
    ) -> dict[str, float]:
        model: Classifier = modules["model"]
        encoder_steps = max(1, round(ctx.steps / (1 + self.tau)))
        phases = ((model.head, model.encoder, ctx.steps - encoder_steps), (model.encoder, model.head, encoder_steps))
        stream, means = iter(batches), dict[str, float]()
        for trained, fixed, steps in phases:
            part = optimizer.with_parameters(trained.parameters())
            with freeze(fixed):
                phase = super().local_update(modules, islice(stream, steps), part, ctx)
            means = {name: means.get(name, 0.0) + mean * steps / ctx.steps for name, mean in phase.items()} or means
        return means


@contextmanager
def freeze(module: nn.Module) -> Iterator[None]:
    """Take the gradients of a module's parameters away, and give them back to those that had one."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
