"""The network of a finished run, and what it takes to use it."""

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import ModelConfig, build
from fedcir.data.domains import Split
from fedcir.data.examples.features import FeatureCache
from fedcir.data.examples.images import ImageExamples, Normalisation
from fedcir.engine.calibration import Calibration, judge
from fedcir.engine.folder import RunFolder
from fedcir.engine.machine import pick_device
from fedcir.engine.own import own_batchnorm
from fedcir.engine.trust import trusted_model
from fedcir.models.frozen import FrozenEncoder
from fedcir.runs.run import Run, Source, as_run
from fedcir.types import InputError

Given = Algorithm | type[Algorithm] | str | Path
"""A method that fedcir does not bring, as its user names it."""

UNCALIBRATED = (
    "probabilities are not calibrated and `unlike` is not a share, because the run has no calibration.json: "
    "set images aside in training with `--set data.val_fraction=0.1`, and no privacy.noise, with which none is fitted"
)


@dataclass(frozen=True)
class Trained:
    """A network in evaluation mode, with its model card and what its clients' validation images told."""

    run: Run
    network: nn.Module
    device: torch.device
    layout: torch.memory_format
    calibration: Calibration
    site: str | None = None
    features: FeatureCache | None = None
    """Where features of a frozen encoder are kept, if they are used in place of images."""

    @property
    def card(self) -> dict[str, Any]:
        return self.run.card

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.card["classes"])

    @property
    def size(self) -> int:
        return int(self.card["image_size"])

    @property
    def channels(self) -> int:
        return int(self.card["channels"])

    @cached_property
    def normalisation(self) -> Normalisation:
        return Normalisation(tuple(self.card["mean"]), tuple(self.card["std"]))

    @property
    def calibrated(self) -> bool:
        return self.calibration.images > 0

    def inputs(self, images: NDArray[np.uint8]) -> Tensor:
        """Squares (B, H, W, C) as the network takes them: by the code that made its training batches."""
        if self.features is not None:
            values, places = self.features.load([(images, np.arange(len(images)))])
            return torch.from_numpy(values[places]).to(self.device)  # (B, F)
        split = Split(images, np.zeros(len(images), np.int64), range(len(images)))  # type: ignore[arg-type]
        return ImageExamples(split, self.normalisation).batch(np.arange(len(images)), self.device, self.layout)[0]

    @torch.inference_mode()
    def judged(self, images: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        """Calibrated probabilities (B, C) of squares, and what share of the images set aside is less unlike (B,)."""
        logits, unlike = judge(self.network, self.inputs(images))
        probabilities = (logits.double() / self.calibration.temperature).softmax(-1)
        return probabilities.cpu(), self.calibration.share(unlike.cpu())

    def with_network(self, network: nn.Module) -> "Trained":
        return replace(self, network=network, features=None)

    def with_cached_features(self) -> "Trained":
        """The same with features of a frozen encoder, where it has one, kept in the cache that training uses."""
        frozen = (module.network for module in self.network.modules() if isinstance(module, FrozenEncoder))
        if (encoder := next(frozen, None)) is None:
            return self
        model = trusted_model(build(ModelConfig, self.card["model"], "model"), self.run.path, self.run.trust_code)
        encoder = copy.deepcopy(encoder).to("cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        shape = (self.size, self.size, self.channels)
        return replace(self, features=FeatureCache(model, encoder, self.normalisation, shape))


def open_trained(
    source: Source,
    *,
    site: str | None = None,
    algorithm: Given | None = None,
    device: str = "auto",
    trust_code: bool = False,
) -> Trained:
    """The network of a finished run on images. Where each client has a part of its own, `site` says whose to take."""
    run = as_run(source, trust_code)
    if not run.finished:
        raise InputError(f"{run.path} holds no finished run: resume it to finish it")
    if "image_size" not in run.card:
        raise InputError(
            f"{run.path} was trained by fedcir.train on Datasets of its caller: use load_run(...).model(encoder=...)"
        )
    method = run.method(algorithm)
    if site is None and has_own_parts(run, method):
        domains = dict.fromkeys(client["domain"] for client in run.manifest["clients"])
        raise InputError(
            f"with {own_batchnorm(run.config, method) or run.config.algorithm.name} each client has a model of its "
            f"own: choose one as site, from {', '.join(domains)}"
        )
    place = pick_device(device)
    layout = torch.channels_last if run.config.run.layout == "channels_last" else torch.contiguous_format
    network = run.model(domain=site, algorithm=algorithm)
    network = network.to(place, memory_format=layout).requires_grad_(False)  # type: ignore[call-overload]
    known = None if run.config.privacy.noise else RunFolder(run.path).calibration()  # earlier versions fitted one
    calibration = known or Calibration()
    return Trained(run, network, place, layout, calibration, site)


def has_own_parts(run: Run, method: Algorithm) -> bool:
    """Whether each client has all or some of the model for itself."""
    return not method.one_model or own_batchnorm(run.config, method) is not None
