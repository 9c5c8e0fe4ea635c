"""The builder of networks: what encoder and head look like, made from a seed.

Every part has a seed of its own, so that all methods with one seed start from the same backbone.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcir.config import BUILTIN_MODELS, PRETRAINED_SIZES, ModelConfig
from fedcir.errors import InputError
from fedcir.machine import check_memory
from fedcir.models.adapters import limit_training
from fedcir.models.classifier import (
    Classifier,
    GaussianClassifier,
    GaussianEncoder,
    Generator,
    NormalisedEncoder,
    ProjectedEncoder,
)
from fedcir.models.hugging_face import add_pooling, find_image_size
from fedcir.models.networks import CNN, MLP, Flat, ResNet18, StagedEncoder
from fedcir.models.pretrained import (
    ConcatenatedEncoder,
    FrozenEncoder,
    ResizedEncoder,
    build_foreign_encoder,
    load_weights,
    read_weights,
)
from fedcir.models.unet import UNet
from fedcir.rng import seeded_init
from fedcir.tasks.classification import to_task
from fedcir.tasks.task import Head, Task
from fedcir.text import describe_error

BACKBONES: dict[str, type[CNN] | type[ResNet18] | type[UNet]] = {"cnn": CNN, "resnet18": ResNet18, "unet": UNet}


@dataclass(frozen=True)
class NetworkBuilder:
    task: Task
    features: int
    """Width of the encoder's output."""
    latent: int
    """Width of z in the probabilistic methods."""
    seed: int
    make_encoder: Callable[[], nn.Module]
    example: Tensor | None = None
    """A batch of inputs, to find the encoder's stages; None for a network that only predicts."""
    frozen: nn.Module | None = None
    """Encoder that is not trained, whose features are the inputs; None if the encoder sees the inputs itself."""
    limits: ModelConfig | None = None
    """Settings of partial training and of adapters; None if the whole encoder is trained."""

    @property
    def num_classes(self) -> int:
        """Width of the head's outputs."""
        return self.task.outputs

    def whole(self) -> "NetworkBuilder":
        """Return the builder on images, with a frozen encoder as part of the network."""
        if self.frozen is None:
            return self

        def make_encoder() -> nn.Module:
            trained = self.make_encoder()
            assert isinstance(trained, FrozenEncoder)
            return FrozenEncoder(copy.deepcopy(self.frozen), trained.hidden)

        return replace(self, make_encoder=make_encoder, example=None, frozen=None)

    def encoder(self) -> nn.Module:
        with seeded_init(self.seed, "init", "encoder"):
            encoder = self.make_encoder()
        return encoder if self.limits is None else limit_training(encoder, self.limits, self.seed)

    def limit(self, model: ModelConfig) -> "NetworkBuilder":
        """Return the builder of the same networks, of which only what these settings name trains."""
        return replace(self, limits=model) if model.partial else self

    def classifier(self, projection: int = 0, normalised: bool = False) -> Classifier:
        """Build the task's head on the features, or on a projection of them to this width; optionally of norm 1."""
        encoder = self.encoder()
        if projection:
            with seeded_init(self.seed, "init", "projection"):
                encoder = ProjectedEncoder(encoder, self.features, projection)
        encoder = NormalisedEncoder(encoder) if normalised else encoder
        return Classifier(encoder, self._head(projection or self.features))

    def gaussian_classifier(self, sigma_init: float, sigma_floor: float) -> GaussianClassifier:
        with seeded_init(self.seed, "init", "gaussian"):
            gaussian = nn.Linear(self.features, 2 * self.latent)
        encoder = GaussianEncoder(self.encoder(), gaussian, sigma_init, sigma_floor)
        return GaussianClassifier(encoder, self._head(self.latent))

    def generator(self, width: int, noise: int, hidden: int) -> Generator:
        """Build a generator of representations of this width."""
        with seeded_init(self.seed, "init", "generator"):
            return Generator(self.num_classes, width, noise, hidden)

    def _head(self, features: int) -> Head:
        with seeded_init(self.seed, "init", "head"):
            return self.task.head(features)


def make_image_builder(
    model: ModelConfig, task: Task | int, channels: int, seed: int, image_size: int = 32
) -> NetworkBuilder:
    """Make the builder of a configured encoder on images."""
    if not model.freeze:
        return _make_whole_builder(model, task, channels, seed, image_size).limit(model)
    networks = []
    for name in model.names:
        size = image_size
        if model.native_size or len(model.names) > 1:
            size = PRETRAINED_SIZES[name] if name in PRETRAINED_SIZES else find_image_size(model)
        whole = _make_whole_builder(replace(model, name=name), task, channels, seed, size)
        encoder = whole.encoder().eval().requires_grad_(False)
        if model.stages:
            assert whole.example is not None
            encoder = StagedEncoder(encoder, whole.example, model.stages)
        networks.append(encoder if size == image_size else ResizedEncoder(encoder, size))
    network = (networks[0] if len(networks) == 1 else ConcatenatedEncoder(networks)).eval()
    count = _measure_width(network, torch.zeros(2, channels, image_size, image_size), "images")
    width = model.hidden or count

    def make_encoder() -> nn.Module:
        if model.hidden is None:
            return FrozenEncoder(None, None)
        with seeded_init(seed, "init", "hidden"):
            return FrozenEncoder(None, nn.Linear(count, width))

    features = torch.zeros(1, count)
    return NetworkBuilder(to_task(task), width, model.latent or width, seed, make_encoder, features, network)


def make_array_builder(model: ModelConfig, task: Task | int, shape: Sequence[int], seed: int) -> NetworkBuilder:
    """Make the builder of a configured encoder on inputs of any shape, such as the features of a table."""
    if model.name in BACKBONES and len(shape) != 3:
        raise InputError(f"{model.name} takes images, but the inputs are of the shape {list(shape)}: use mlp or linear")
    if model.name in BUILTIN_MODELS:
        return _make_builtin_builder(model, task, shape, seed).limit(model)
    if set(model.names) <= set(PRETRAINED_SIZES):
        raise InputError(f"{model.name} takes images, but the inputs are of the shape {list(shape)}: use mlp or linear")
    example = torch.zeros(2, *shape)
    with seeded_init(seed, "init", "encoder"):
        encoder = build_foreign_encoder(model, example, to_task(task).uses_maps)
    return make_module_builder(encoder, example, task, model.latent, seed, "inputs").limit(model)


def _make_whole_builder(
    model: ModelConfig, task: Task | int, channels: int, seed: int, image_size: int
) -> NetworkBuilder:
    """Make the builder in which the whole encoder trains."""
    if model.name in BUILTIN_MODELS:
        return _make_builtin_builder(model, task, (channels, image_size, image_size), seed)
    example = torch.zeros(2, channels, image_size, image_size)
    with seeded_init(seed, "init", "encoder"):
        encoder = build_foreign_encoder(model, example, to_task(task).uses_maps)
    return make_module_builder(encoder, example, task, model.latent, seed, "images")


def _make_builtin_builder(model: ModelConfig, task: Task | int, shape: Sequence[int], seed: int) -> NetworkBuilder:
    width = {} if model.width is None else {"width": model.width}
    if to_task(task).uses_maps != (model.name == "unet"):
        kind, fix = ("a class for each pixel", "unet") if model.name != "unet" else ("one prediction an image", "cnn")
        raise InputError(f"{model.name} is not for {to_task(task).name}, which is {kind}: set model.name={fix}")
    example = torch.zeros(1, *shape)
    if model.name in BACKBONES:
        make: Callable[[], Any] = partial(BACKBONES[model.name], channels=shape[0], norm=model.norm, **width)
        example = torch.zeros(1, shape[0], 32, 32)
    else:
        make = partial(MLP, math.prod(shape), **width) if model.name == "mlp" else partial(Flat, math.prod(shape))
    weights = None if model.weights is None else read_weights(Path(model.weights))

    def make_encoder() -> nn.Module:
        encoder: nn.Module = make()
        if weights is not None:
            load_weights(encoder, weights, str(model.weights))
        return encoder

    with torch.device("meta"):
        drawn = make()
    count = sum(parameter.numel() for parameter in drawn.parameters())
    check_memory(3 * 4 * count, f"model.width: {model.name} of {count:,} weights")  # each has a gradient and a momentum
    features = drawn.features
    return NetworkBuilder(to_task(task), features, model.latent or features, seed, make_encoder, example)


def make_module_builder(
    encoder: nn.Module, example: Tensor, task: Task | int, latent: int | None, seed: int, whose: str = "the example"
) -> NetworkBuilder:
    """Make the builder of the caller's encoder, which starts from its weights, in single precision."""
    if not isinstance(encoder, nn.Module):
        raise InputError(f"encoder must be an nn.Module, got {encoder!r}")
    if any(is_lazy(tensor) for tensor in (*encoder.parameters(), *encoder.buffers())):
        raise InputError("encoder has lazy layers, which have no weights yet: call it on a batch first")
    try:
        copied = copy.deepcopy(encoder).to("cpu", torch.float32)
    except Exception as error:
        raise InputError(f"encoder cannot be copied to the CPU: {describe_error(error)}") from error
    task = to_task(task)
    width = _measure_width(add_pooling(copied), example, whose, task)
    return NetworkBuilder(task, width, latent or width, seed, lambda: copy.deepcopy(copied), example)


def check_features(builder: NetworkBuilder, example: Tensor, whose: str) -> None:
    """Check that the encoder's features on this input have the same width."""
    width = _measure_width(builder.make_encoder(), example, whose, builder.task)
    if width != builder.features:
        raise InputError(
            f"encoder gives {width} features on {whose}, whose inputs are {list(example.shape[1:])}, "
            f"and {builder.features} on others: give all inputs the same shape"
        )


def _measure_width(encoder: nn.Module, example: Tensor, whose: str, task: Task | None = None) -> int:
    inputs = f"a batch of {whose}, {str(example.dtype).removeprefix('torch.')}{list(example.shape)}"
    try:
        with torch.no_grad():
            features = copy.deepcopy(encoder).eval()(example)
    except Exception as error:
        fix = "" if example.is_floating_point() else " (whole numbers are passed on as they are: give floats, or bytes)"
        raise InputError(f"encoder fails on {inputs}: {describe_error(error)}{fix}") from error
    uses_maps = task is not None and task.uses_maps
    form = "(batch, features, height, width)" if uses_maps else "(batch, features)"
    if not isinstance(features, Tensor):
        raise InputError(f"encoder must map a batch to {form}, got {type(features).__name__} on {inputs}")
    if features.ndim != (4 if uses_maps else 2) or len(features) != len(example):
        fix = "leave out its pooling" if uses_maps else "nn.Flatten() at its end may help"
        raise InputError(f"encoder must map a batch to {form}, got the shape {list(features.shape)} on {inputs}: {fix}")
    if uses_maps and features.shape[2:] != example.shape[2:]:
        sizes = " and ".join("x".join(map(str, tensor.shape[2:])) for tensor in (example, features))
        raise InputError(
            f"encoder must give maps of the size of the images, got {sizes}: upsample them, as a U-Net does"
        )
    if not features.is_floating_point():
        raise InputError(f"encoder must give floats, got {features.dtype} on {inputs}")
    return features.shape[1]
