"""The network of a finished run, loaded for prediction."""

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
from fedcir.client.calibration import Calibration
from fedcir.client.local_update import get_local_tensors
from fedcir.client.prediction import Output, predict
from fedcir.client.state import ClientStore, find_local_cause
from fedcir.config import ModelConfig
from fedcir.data.domains import Split
from fedcir.data.encoding import TableEncoding, read_encoding
from fedcir.data.examples import ArrayExamples, Examples, ImageExamples, Normalisation
from fedcir.data.features import FeatureCache
from fedcir.data.federation import Client
from fedcir.errors import InputError, suggest_name
from fedcir.machine import check_memory, is_out_of_memory
from fedcir.models.adapters import merge_adapters
from fedcir.models.networks import use_standard_conv
from fedcir.models.pretrained import FrozenEncoder
from fedcir.runs.reader import Run, RunSource, restore_model, to_run
from fedcir.runtime.resolution import pick_device
from fedcir.runtime.resume import use_saved_model
from fedcir.runtime.run_folder import RunFolder
from fedcir.tasks.task import Task
from fedcir.text import to_one_line
from fedcir.types import LocalContext, Modules
from fedcir.validation import build_dataclass

AlgorithmChoice = Algorithm | type[Algorithm] | str | Path
"""An algorithm that is not part of fedcir: an instance, a class or a file."""

BATCH = 64
"""Number of images in a batch."""

UNCALIBRATED = (
    "probabilities are not calibrated and `novelty` is not a share, because the run has no calibration.json: "
    "set images aside in training with `--set data.val_fraction=0.1`, and no privacy.noise, with which none is fitted"
)


@dataclass(frozen=True)
class TrainedModel:
    """The networks of a run, ready to predict as the run's own tests do, with its model card and its calibration."""

    run: Run
    algorithm: Algorithm
    modules: Modules
    """Networks in evaluation mode."""
    ctx: LocalContext
    device: torch.device
    layout: torch.memory_format
    calibration: Calibration
    site: str | None = None
    features: FeatureCache | None = None
    """Cache of features of a frozen encoder, if they replace images."""

    @property
    def network(self) -> nn.Module:
        network: nn.Module = self.modules["model"]
        return network

    @property
    def card(self) -> dict[str, Any]:
        return self.run.card

    @property
    def task(self) -> Task:
        return self.run.task

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.card["classes"])

    @property
    def takes_images(self) -> bool:
        """Whether examples are images, and not rows of a table or arrays of floats."""
        return "image_size" in self.card

    @property
    def noun(self) -> str:
        """What examples are called."""
        return "images" if self.takes_images else "rows" if "table" in self.card else "examples"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an example: an image (H, W, C), or floats of any shape."""
        return (self.size, self.size, self.channels) if self.takes_images else tuple(self.card["shape"])

    @cached_property
    def encoding(self) -> TableEncoding | None:
        """Encoding of rows, if the model takes tables."""
        return read_encoding(self.card["table"]) if "table" in self.card else None

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

    def inputs(self, images: NDArray[Any]) -> Tensor:
        """Convert images (B, H, W, C), or floats (B, ...), to inputs, by the code that makes training batches."""
        if self.features is not None:
            values, rows = self.features.load([(images, np.arange(len(images)))])
            return torch.from_numpy(values[rows]).to(self.device)  # (B, F)
        split = Split(images, np.zeros(len(images), np.int64), "")
        examples = ImageExamples(split, self.normalisation) if self.takes_images else ArrayExamples(split)
        return examples.batch(np.arange(len(images)), self.device, self.layout)[0]

    @torch.inference_mode()
    def compute(self, images: NDArray[Any]) -> Output:
        """Run the method's own prediction on square images (B, H, W, C), or on floats (B, ...)."""
        try:
            output = predict(self.algorithm, self.modules, self.inputs(images), self.ctx)
        except RuntimeError as error:  # by torch, for images that are too small for the network
            if self.run.config.model.foreign or is_out_of_memory(error):
                raise
            size = "x".join(map(str, self.shape[:2]))
            problem = f"the model of {self.run.path} takes no {size} {'images' if self.takes_images else 'arrays'}"
            raise InputError(f"{problem}: {to_one_line(error, 200)}") from error
        if not (output.logits.softmax(-1) if self.task.has_classes else output.logits).isfinite().all():
            raise InputError(f"the model of {self.run.path} gives no numbers for some inputs: train it again")
        return output

    @torch.inference_mode()
    def predict(self, images: NDArray[Any]) -> tuple[Tensor, Tensor]:
        """Predict calibrated probabilities (B, C) and the novelty (B,) of examples.

        Other tasks than classification give their own predictions, and no novelty, which is NaN.
        """
        output = self.compute(images)
        if not self.task.has_classes:
            return self.task.predict(output.logits).cpu(), torch.full((len(images),), torch.nan)
        probabilities = (output.logits.double() / self.calibration.temperature).softmax(-1)
        return probabilities.cpu(), self.calibration.share(output.novelty.cpu())

    def with_network(self, network: nn.Module) -> "TrainedModel":
        return replace(self, modules={**self.modules, "model": network}, features=None)

    def with_cached_features(self) -> "TrainedModel":
        """Return a copy that caches features of a frozen encoder, if it has one, where training does."""
        frozen = (module.network for module in self.network.modules() if isinstance(module, FrozenEncoder))
        if (encoder := next(frozen, None)) is None:
            return self
        model = use_saved_model(
            build_dataclass(ModelConfig, self.card["model"], "model"), self.run.path, self.run.trust_code
        )
        encoder = copy.deepcopy(encoder).to("cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        shape = (self.size, self.size, self.channels)
        return replace(self, features=FeatureCache(model, encoder, self.normalisation, shape))


def open_model(
    source: RunSource,
    *,
    site: str | None = None,
    algorithm: AlgorithmChoice | None = None,
    device: str = "auto",
    trust_code: bool = False,
    train: Examples | None = None,
) -> TrainedModel:
    """Open the network of a finished run. `site` selects a client's, where each keeps a part of its own.

    `train` holds the training images of that client, for one that never trained: the run tests it on the first weights,
    with BatchNorm statistics of these images.
    """
    run = to_run(source, trust_code)
    if not run.finished:
        raise InputError(f"{run.path} holds no finished run: resume it to finish it")
    if not {"image_size", "shape"} & run.card.keys():
        raise InputError(
            f"{run.path} was trained by fedcir.train on Datasets of its caller: use load_run(...).model(encoder=...)"
        )
    if "image_size" in run.card:
        size, channels = run.card["image_size"], run.card["channels"]
        check_memory(5 * BATCH * size * size * channels, f"image_size={size} of {run.path} for {BATCH} images")
    method = run.configured_method(algorithm)
    if site is None and has_client_parts(run, method):
        domains = dict.fromkeys(client["domain"] for client in run.manifest["clients"])
        raise InputError(
            f"with {find_local_cause(run.config, method) or run.config.algorithm.name} each client has a model of its "
            f"own: choose one as site, from {', '.join(domains)}"
        )
    restored = restore_model(run, run.config, method, run.builder(run.weights()), str(pick_device(device)))
    first = {client["domain"]: client["id"] for client in reversed(run.manifest["clients"])}
    if site is not None and site not in first:
        raise InputError(f"no domain {site!r} in {run.path}; {suggest_name(site, first)}")
    if site is None:  # the model without what any client keeps
        restored = replace(restored, store=ClientStore())
    client = Client(0 if site is None else first[site], site or "", train, None)
    local_tensors = get_local_tensors(restored.store.load(client.id, restored.round + 1))
    if site is not None and train is None and not local_tensors and has_client_parts(run, method):
        raise InputError(f"no client of {site!r} has trained in {run.path}, so it has no model: choose another site")
    ctx, trainer = restored.load(client), restored.trainer
    modules = {name: merge_adapters(module).requires_grad_(False) for name, module in trainer.modules.items()}
    # Earlier versions fitted one on private data too.
    calibration = (None if run.config.privacy.noise else RunFolder(run.path).calibration()) or Calibration()
    return TrainedModel(run, method, modules, ctx, trainer.device, trainer.layout, calibration, site)


def has_client_parts(run: Run, method: Algorithm) -> bool:
    """Check whether clients keep all or part of the model to themselves."""
    return not method.one_model or find_local_cause(run.config, method) is not None


class ExportedModule(nn.Module):
    """Map uint8 images (B, H, W, C), as pictures lie in memory, or floats (B, ...), to probabilities (B, classes).

    Other tasks than classification give their own predictions.
    """

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        used = {"model", *trained.algorithm.trains, *trained.algorithm.keeps}
        modules = {name: copy.deepcopy(module) for name, module in trained.modules.items() if name in used}
        for module in modules.values():
            use_standard_conv(module)
            module.to(memory_format=torch.contiguous_format)
        self.network = modules.pop("model")
        self.others = nn.ModuleDict(modules)
        self.algorithm, self.ctx = trained.algorithm, trained.ctx
        self.temperature = trained.calibration.temperature
        self.task, self.takes_images = trained.task, trained.takes_images
        self.scale: Tensor
        self.shift: Tensor
        if self.takes_images:
            self.register_buffer("scale", trained.normalisation.scale)
            self.register_buffer("shift", trained.normalisation.shift)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        if self.takes_images:
            images = inputs.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
            x = images * self.scale + self.shift
        logits = self.algorithm.predict({"model": self.network, **self.others}, x, self.ctx)
        return (logits / self.temperature).softmax(-1) if self.task.has_classes else self.task.predict(logits)
