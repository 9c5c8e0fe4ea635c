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
from fedcir.config import ModelConfig, build, check_memory, nearest
from fedcir.data.domains import Split
from fedcir.data.examples.features import FeatureCache
from fedcir.data.examples.images import Examples, ImageExamples, Normalisation
from fedcir.data.federation import Client
from fedcir.engine.calibration import Calibration
from fedcir.engine.client import own_part
from fedcir.engine.folder import RunFolder
from fedcir.engine.machine import pick_device
from fedcir.engine.own import own_batchnorm
from fedcir.engine.prediction import predict
from fedcir.engine.transports.processes import too_little_memory
from fedcir.engine.trust import trusted_model
from fedcir.models.frozen import FrozenEncoder
from fedcir.runs.restore import restore
from fedcir.runs.run import Run, Source, as_run
from fedcir.types import InputError, LocalContext, Modules

Given = Algorithm | type[Algorithm] | str | Path
"""A method that fedcir does not bring, as its user names it."""

BATCH = 64
"""Images that a model is given at a time."""

UNCALIBRATED = (
    "probabilities are not calibrated and `unlike` is not a share, because the run has no calibration.json: "
    "set images aside in training with `--set data.val_fraction=0.1`, and no privacy.noise, with which none is fitted"
)


@dataclass(frozen=True)
class Trained:
    """The networks of a run, ready to predict as the run's own tests do, with its model card and its calibration."""

    run: Run
    algorithm: Algorithm
    modules: Modules
    """In evaluation mode."""
    ctx: LocalContext
    device: torch.device
    layout: torch.memory_format
    calibration: Calibration
    site: str | None = None
    features: FeatureCache | None = None
    """Where features of a frozen encoder are kept, if they are used in place of images."""

    @property
    def network(self) -> nn.Module:
        return self.modules["model"]

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
        try:
            output = predict(self.algorithm, self.modules, self.inputs(images), self.ctx)
        except RuntimeError as error:  # by torch, of images that are too small for the network
            if self.run.config.model.foreign or too_little_memory(error):
                raise
            why = " ".join(str(error).split())[:200]
            raise InputError(f"the model of {self.run.path} takes no {self.size}x{self.size} images: {why}") from error
        probabilities = (output.logits.double() / self.calibration.temperature).softmax(-1)
        if not probabilities.isfinite().all():
            raise InputError(f"the model of {self.run.path} gives no numbers for some images: train it again")
        return probabilities.cpu(), self.calibration.share(output.novelty.cpu())

    def plain(self) -> "Trained":
        """The same without the method's own way to predict: the answer is what the network gives."""
        return replace(self, algorithm=Algorithm())

    def with_network(self, network: nn.Module) -> "Trained":
        return replace(self, modules={**self.modules, "model": network}, features=None)

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
    train: Examples | None = None,
) -> Trained:
    """The network of a finished run on images. Where each client has a part of its own, `site` says whose to take.

    `train` holds the training images of that client, for one that never trained: the run tests it on the first weights,
    with BatchNorm statistics of these images.
    """
    run = as_run(source, trust_code)
    if not run.finished:
        raise InputError(f"{run.path} holds no finished run: resume it to finish it")
    if "image_size" not in run.card:
        raise InputError(
            f"{run.path} was trained by fedcir.train on Datasets of its caller: use load_run(...).model(encoder=...)"
        )
    size, channels = run.card["image_size"], run.card["channels"]
    check_memory(5 * BATCH * size * size * channels, f"image_size={size} of {run.path} for {BATCH} images")
    method = run.configured_method(algorithm)
    if site is None and has_own_parts(run, method):
        domains = dict.fromkeys(client["domain"] for client in run.manifest["clients"])
        raise InputError(
            f"with {own_batchnorm(run.config, method) or run.config.algorithm.name} each client has a model of its "
            f"own: choose one as site, from {', '.join(domains)}"
        )
    restored = restore(run, run.config, method, run.task(run.weights()), str(pick_device(device)))
    client = replace(_client(run, site), train=train)
    own = own_part(restored.store.load(client.id, restored.round + 1))
    if site is not None and train is None and not own and has_own_parts(run, method):
        raise InputError(f"no client of {site!r} has trained in {run.path}, so it has no model: choose another site")
    ctx, bench = restored.load(client), restored.bench
    for module in bench.modules.values():
        module.requires_grad_(False)
    known = None if run.config.privacy.noise else RunFolder(run.path).calibration()  # earlier versions fitted one
    return Trained(run, method, bench.modules, ctx, bench.device, bench.layout, known or Calibration(), site)


def _client(run: Run, site: str | None) -> Client:
    """The client whose own parts of the model are taken: the first of a site."""
    first = {client["domain"]: client["id"] for client in reversed(run.manifest["clients"])}
    if site is not None and site not in first:
        raise InputError(f"no domain {site!r} in {run.path}; {nearest(site, first)}")
    return Client(first[site] if site is not None else 0, site or "", None, None)


def has_own_parts(run: Run, method: Algorithm) -> bool:
    """Whether each client has all or some of the model for itself."""
    return not method.one_model or own_batchnorm(run.config, method) is not None
