"""FedCiR: client-invariant representations by a generator that only heads have taught.

Clients regularise towards the generator (more information on y in z) and towards its class Gaussians (less
information on the client in z). They upload their model and nothing else.

Z. Li, Z. Lin, J. Shao, Y. Mao, J. Zhang. FedCiR: Client-Invariant Representation Learning for Federated Non-IID
Features. 2023. https://arxiv.org/abs/2308.15786
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcir.algorithms.algorithm import Algorithm, Replies, get_head
from fedcir.errors import InputError
from fedcir.losses import class_gaussians, gaussian_kl, mixture_nll
from fedcir.models.builder import NetworkBuilder
from fedcir.models.classifier import GaussianClassifier, Generator, apply_heads, make_balanced_labels, sample
from fedcir.models.optimizers import Adam
from fedcir.models.tensors import snapshot
from fedcir.types import LocalContext, Losses, Modules, ServerContext, ServerState, Tensors
from fedcir.validation import Between, Count, LearningRate, StdDev, Weight, Width


@dataclass(frozen=True)
class FedCiR(Algorithm):
    """Li et al., 2023. https://arxiv.org/abs/2308.15786"""

    lambda_reg: Weight = 0.5
    """Weight of the head's cross-entropy on generated representations, which upper-bounds -I(Y;Z)."""
    lambda_align: Weight = 1e-6
    """Weight of the KL of p(z|x) to the class Gaussian q(z|y), which upper-bounds I(Z;K|Y)."""
    sigma_init: StdDev = 0.1
    """The encoder's sigma before training: a large one drowns the first rounds in noise."""
    sigma_floor: StdDev = 1e-3
    """The encoder's sigma is never below this."""
    noise: Width = 64
    """Dimensions of the generator's noise."""
    hidden: Width = 256
    """Width of the generator's hidden layer."""
    generator_steps: Count = 5
    """The server's steps on the generator in a round: E_g in the paper."""
    generator_lr: LearningRate = 1e-2
    """Learning rate of the generator's Adam, whose state lives across rounds."""
    generator_statistics: Literal["batch", "running"] = "running"
    """How the generator's BatchNorm works on clients: with statistics of the batch, or with those of the server."""
    gaussian_samples: Width = 256
    """Generated representations per class that the class Gaussians are fitted to."""
    gaussian_floor: StdDev = 0.1
    """The class Gaussians' sigma is never below this: a collapsed generator cannot blow up the KL."""
    eval_samples: Annotated[int, Between(0, 10_000)] = 0
    """How many samples of z inference averages the probabilities of; 0 takes z = mu."""

    needs_classes = True
    ranges = {"lambda_reg": "0.1,0.3,0.5,1", "lambda_align": "5e-7,1e-6,5e-5"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sigma_init <= (floor := self.sigma_floor):
            raise InputError(f"algorithm.sigma_init must be above sigma_floor={floor}, got {self.sigma_init}")

    def build(self, builder: NetworkBuilder) -> Modules:
        model = builder.gaussian_classifier(self.sigma_init, self.sigma_floor)
        return {"model": model, "generator": builder.generator(builder.latent, self.noise, self.hidden)}

    def start(self, modules: Modules, ctx: ServerContext) -> ServerState:
        # The generator is not sent before it has been trained once, so both regularisers are off until then.
        private = {"generator": snapshot(modules["generator"]), "optimizer": Tensors()}
        return ServerState(round=0, shared={"model": snapshot(modules["model"])}, private=private)

    def local_loss(self, modules: Modules, x: Tensor, y: Tensor, ctx: LocalContext) -> Losses:
        model: GaussianClassifier = modules["model"]
        generator: Generator = modules["generator"]
        mu, sigma = model.encoder(x)  # each (B, Z)
        total = loss = ctx.cross_entropy(model.head(sample(mu, sigma, ctx.rng)), y)
        terms = {"ce": loss}
        if self.lambda_reg and "generator" in ctx.broadcast:
            labels = torch.randint(ctx.num_classes, y.shape, generator=ctx.rng).to(y.device)
            with torch.no_grad():  # the gradient reaches the head only
                generated = generator(generator.draw(len(y), ctx.rng), labels, self.generator_statistics)
            terms["reg"] = F.cross_entropy(model.head(generated), labels)
            total = total + self.lambda_reg * terms["reg"]
        if self.lambda_align and "gaussians" in ctx.broadcast:
            gaussians = ctx.broadcast["gaussians"]
            terms["align"] = gaussian_kl(mu, sigma, gaussians["mean"][y], gaussians["std"][y]).mean()
            total = total + self.lambda_align * terms["align"]
        return Losses(total, terms)

    def server_step(self, state: ServerState, replies: Replies, modules: Modules, ctx: ServerContext) -> ServerState:
        means, heads = self.merge(replies, ctx, keep=get_head)
        generator: Generator = modules["generator"]
        generator.load_state_dict(state.private["generator"])
        optimizer = Adam(generator.parameters(), self.generator_lr, state.private["optimizer"])
        for _ in range(self.generator_steps):  # E_g steps on the mixture of the clients' heads
            labels = torch.randint(ctx.num_classes, (ctx.batch_size,), generator=ctx.rng)
            z = generator(generator.draw(ctx.batch_size, ctx.rng), labels, "update")  # (B, Z)
            optimizer.zero_grad()
            mixture_nll(apply_heads(z, heads), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            labels = make_balanced_labels(ctx.num_classes, self.gaussian_samples)
            z = generator(generator.draw(len(labels), ctx.rng), labels, "batch")
            mean, std = class_gaussians(z.view(ctx.num_classes, self.gaussian_samples, -1), self.gaussian_floor)
        shared, private = means, {"generator": snapshot(generator), "optimizer": optimizer.state}
        if self.lambda_reg:
            shared["generator"] = private["generator"]
        if self.lambda_align:
            shared["gaussians"] = {"mean": mean, "std": std}
        return ServerState(ctx.round, shared, private)

    def predict(self, modules: Modules, x: Tensor, ctx: LocalContext) -> Tensor:
        model: GaussianClassifier = modules["model"]
        return model.predict(x, self.eval_samples, ctx.rng)
