"""What is to be learned: the classes, and how to build the networks for them from a seed.

Every part is drawn from a seed of its own, so that all methods of one seed start from the same backbone.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedcir.config import OWN_MODELS, ModelConfig, check_memory
from fedcir.models.batchnorms import renormalise
from fedcir.models.cnn import CNN
from fedcir.models.efficientnet import efficientnet_lite0
from fedcir.models.encoder import Classifier, GaussianClassifier, GaussianEncoder, NormalisedEncoder, ProjectedEncoder
from fedcir.models.foreign import ForeignEncoder, call_foreign, one_line, without_classifier
from fedcir.models.frozen import FrozenEncoder
from fedcir.models.generator import Generator
from fedcir.models.resnet import ResNet18
from fedcir.models.weights import load_weights, read_weights
from fedcir.rng import seeded_init
from fedcir.types import InputError

BACKBONES: dict[str, type[CNN] | type[ResNet18]] = {"cnn": CNN, "resnet18": ResNet18}


@dataclass(frozen=True)
class Task:
    num_classes: int
    features: int
    """The width of what the encoder gives."""
    latent: int
    """The width of z in the probabilistic methods."""
    seed: int
    make_encoder: Callable[[], nn.Module]
    example: Tensor | None = None
    """A batch of inputs that the encoder takes, to look at what passes in it; None for a network that only predicts."""
    frozen: nn.Module | None = None
    """The encoder that never trains, whose features of images are the inputs; None where the whole encoder trains."""

    def whole(self) -> "Task":
        """The same on images: a frozen encoder is part of the network."""
        if self.frozen is None:
            return self

        def make_encoder() -> nn.Module:
            after = self.make_encoder()
            assert isinstance(after, FrozenEncoder)
            return FrozenEncoder(copy.deepcopy(self.frozen), after.hidden)

        return replace(self, make_encoder=make_encoder, example=None, frozen=None)

    def encoder(self) -> nn.Module:
        with seeded_init(self.seed, "init", "encoder"):
            return self.make_encoder()

    def classifier(self, projection: int = 0, normalised: bool = False) -> Classifier:
        """A linear head on the features, or on a projection of them to this width; if asked for, at length 1."""
        encoder = self.encoder()
        if projection:
            with seeded_init(self.seed, "init", "projection"):
                encoder = ProjectedEncoder(encoder, self.features, projection)
        encoder = NormalisedEncoder(encoder) if normalised else encoder
        return Classifier(encoder, self._linear("head", projection or self.features, self.num_classes))

    def gaussian_classifier(self, sigma_init: float, sigma_floor: float) -> GaussianClassifier:
        gaussian = self._linear("gaussian", self.features, 2 * self.latent)
        encoder = GaussianEncoder(self.encoder(), gaussian, sigma_init, sigma_floor)
        return GaussianClassifier(encoder, self._linear("head", self.latent, self.num_classes))

    def generator(self, width: int, noise: int, hidden: int) -> Generator:
        """One that gives representations of this width."""
        with seeded_init(self.seed, "init", "generator"):
            return Generator(self.num_classes, width, noise, hidden)

    def _linear(self, part: str, inputs: int, outputs: int) -> nn.Linear:
        with seeded_init(self.seed, "init", part):
            return nn.Linear(inputs, outputs)


def image_task(model: ModelConfig, num_classes: int, channels: int, seed: int, image_size: int = 32) -> Task:
    """The task of a configured encoder on images."""
    if model.name in OWN_MODELS and not model.freeze:
        return _own_task(model, num_classes, channels, seed)
    example = torch.zeros(2, channels, image_size, image_size)
    if model.name in OWN_MODELS:
        whole = _own_task(model, num_classes, channels, seed)
    else:
        with seeded_init(seed, "init", "encoder"):
            encoder = _foreign(model, example)
        whole = module_task(encoder, example, num_classes, model.latent, seed, "images")
    return _frozen_task(model, whole) if model.freeze else whole


def _own_task(model: ModelConfig, num_classes: int, channels: int, seed: int) -> Task:
    backbone = BACKBONES[model.name]
    arguments = {} if model.width is None else {"width": model.width}
    weights = None if model.weights is None else read_weights(Path(model.weights))

    def make_encoder() -> nn.Module:
        encoder = backbone(channels=channels, norm=model.norm, **arguments)
        if weights is not None:
            load_weights(encoder, weights, str(model.weights))
        return encoder

    with torch.device("meta"):
        drawn = backbone(channels=channels, norm=model.norm, **arguments)
    count = sum(parameter.numel() for parameter in drawn.parameters())
    check_memory(3 * 4 * count, f"model.width: {model.name} of {count:,} weights")  # each has a gradient and a momentum
    features = drawn.features
    return Task(num_classes, features, model.latent or features, seed, make_encoder, torch.zeros(1, channels, 32, 32))


def _foreign(model: ModelConfig, example: Tensor) -> ForeignEncoder:
    """Another's network without its classifier, with the configured weights and norms."""
    if model.foreign:
        network = without_classifier(call_foreign(model), example, model.name)
        if model.weights is not None:
            load_weights(network, read_weights(Path(model.weights)), model.weights)
    else:
        network = efficientnet_lite0(example.shape[1], example.shape[-1], model.arguments, model.weights)
    if model.norm in ("invariant", "group") and any(isinstance(each, _BatchNorm) for each in network.modules()):
        network = renormalise(network, example, model.norm)
    return ForeignEncoder(network)


def _frozen_task(model: ModelConfig, whole: Task) -> Task:
    """The task on the features of an encoder that stays as it is."""
    network = whole.encoder().eval().requires_grad_(False)
    width = model.hidden or whole.features

    def make_encoder() -> nn.Module:
        if model.hidden is None:
            return FrozenEncoder(None, None)
        with seeded_init(whole.seed, "init", "hidden"):
            return FrozenEncoder(None, nn.Linear(whole.features, width))

    example = torch.zeros(1, whole.features)
    return Task(whole.num_classes, width, model.latent or width, whole.seed, make_encoder, example, network)


def module_task(
    encoder: nn.Module, example: Tensor, num_classes: int, latent: int | None, seed: int, whose: str = "the example"
) -> Task:
    """The task of the caller's own encoder, which starts from the weights that it has, in single precision."""
    if not isinstance(encoder, nn.Module):
        raise InputError(f"encoder must be an nn.Module, got {encoder!r}")
    if any(is_lazy(tensor) for tensor in (*encoder.parameters(), *encoder.buffers())):
        raise InputError("encoder has lazy layers, which have no weights yet: call it on a batch first")
    try:
        own = copy.deepcopy(encoder).to("cpu", torch.float32)
    except Exception as error:
        raise InputError(f"encoder cannot be copied to the CPU: {one_line(error)}") from error
    width = _feature_width(own, example, whose)
    return Task(num_classes, width, latent or width, seed, lambda: copy.deepcopy(own), example)


def check_features(task: Task, example: Tensor, whose: str) -> None:
    """The encoder gives features of one width, whatever the shape of its input."""
    width = _feature_width(task.make_encoder(), example, whose)
    if width != task.features:
        raise InputError(
            f"encoder gives {width} features on {whose}, whose inputs are {list(example.shape[1:])}, "
            f"and {task.features} on others: give all inputs the same shape"
        )


def _feature_width(encoder: nn.Module, example: Tensor, whose: str) -> int:
    what = f"a batch of {whose}, {str(example.dtype).removeprefix('torch.')}{list(example.shape)}"
    try:
        with torch.no_grad():
            features = copy.deepcopy(encoder).eval()(example)
    except Exception as error:
        fix = "" if example.is_floating_point() else " (whole numbers are passed on as they are: give floats, or bytes)"
        raise InputError(f"encoder fails on {what}: {one_line(error)}{fix}") from error
    if not isinstance(features, Tensor):
        raise InputError(f"encoder must map a batch to (batch, features), got {type(features).__name__} on {what}")
    if features.ndim != 2 or len(features) != len(example):
        raise InputError(
            f"encoder must map a batch to (batch, features), got the shape {list(features.shape)} on {what}: "
            "nn.Flatten() at its end may help"
        )
    if not features.is_floating_point():
        raise InputError(f"encoder must give floats, got {features.dtype} on {what}")
    return features.shape[1]
