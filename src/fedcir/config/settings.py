"""The settings: frozen dataclasses, a sentence and a default for each field."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedcir.types import InputError

DEFAULT_ALGORITHM = "fedcir"

PATHS = {"data.root", "data.lists", "partition.file", "model.weights"}
"""Settings that tell of the user's machine."""


@dataclass(frozen=True)
class DataConfig:
    name: str = "minidigits"
    """The dataset; `fedcir data list` names them."""
    root: str | None = None
    """The folder that holds it."""
    lists: str | None = None
    """The folder of its official train and test lists, where it has them apart (pacs)."""
    image_size: int | None = None
    """Images are made squares of so many pixels; 128 if not given, and as they are for arrays and minidigits."""
    classes: tuple[str, ...] | None = None
    """Only these classes; all if not given. For domainnet the ten that the field uses, unless it says "all"."""
    columns: tuple[str, ...] = ("image", "label", "domain")
    """The columns of image, label and domain (hub)."""
    train_per_domain: int | None = None
    """At most this many training images a domain, classes in their shares."""
    test_fraction: float = 0.2
    """The share of each domain that is split off for testing where the dataset has no split of its own."""
    val_fraction: float = 0.0
    """The share of each domain's training images that is set aside to pick the best round on."""

    def __post_init__(self) -> None:
        require_at_least("data.train_per_domain", self.train_per_domain, 1)
        require_at_least("data.image_size", self.image_size, 1)
        if self.classes == ():
            raise InputError("data.classes names no class: give some, or leave it out")
        require_share("data.val_fraction", self.val_fraction)
        require_share("data.test_fraction", self.test_fraction)
        require_positive("data.test_fraction", self.test_fraction)


@dataclass(frozen=True)
class PartitionConfig:
    scheme: Literal["domain", "dirichlet", "iid", "csv"] = "domain"
    """One client a domain; Dirichlet(beta) over labels within each; all data spread evenly; or as a file says."""
    file: str | None = None
    """A CSV file with the columns path and client: who holds what (csv)."""
    clients: int | None = None
    """How many clients; one a domain if not given."""
    beta: float = 0.5
    """Dirichlet concentration of labels: smaller values give more skewed clients, 1e6 gives even ones."""
    hold_out: str | None = None
    """A domain that nobody trains on, and everybody is tested on."""
    min_samples: int = 1
    """Every client gets at least this many training images."""

    def __post_init__(self) -> None:
        require_at_least("partition.clients", self.clients, 1)
        require_positive("partition.beta", self.beta)
        if self.beta > 1e6:  # numpy's Dirichlet overflows far above
            raise InputError(f"partition.beta must be at most 1e6, which is as even as can be, got {self.beta}")
        require_at_least("partition.min_samples", self.min_samples, 1)
        if (self.scheme == "csv") != (self.file is not None):
            raise InputError("partition.scheme=csv and partition.file=FILE.csv go together: give both")
        if self.scheme == "csv" and self.clients is not None:
            raise InputError(
                f"partition.clients is {self.clients}, but {self.file} says who the clients are: leave it out"
            )


@dataclass(frozen=True)
class ModelConfig:
    name: Literal["cnn", "resnet18"] = "cnn"
    """The backbone: `cnn` for small images, `resnet18` as in the paper."""
    width: int | None = None
    """Channels of its first stage; 16 for cnn and 64 for resnet18 if not given."""
    latent: int | None = None
    """Dimensions of z in the probabilistic methods; as wide as the features if not given."""
    weights: str | None = None
    """A local file of weights to start from (.safetensors or torchvision's .pth); from scratch if not given."""
    norm: Literal["batch", "group", "invariant", "standardised"] = "batch"
    """BatchNorm as in the paper; GroupNorm; InstanceNorm first, then GroupNorm; or no norm and standardised weights."""
    batchnorm: Literal["average", "pooled", "local"] = "average"
    """Running statistics: averaged like weights, variances pooled with the spread of the means, or each site's own."""

    def __post_init__(self) -> None:
        require_at_least("model.width", self.width, 1)
        require_at_least("model.latent", self.latent, 1)


@dataclass(frozen=True)
class LocalConfig:
    steps: int = 20
    """SGD steps of a client in a round: E in the paper."""
    batch_size: int = 32
    """Training images of a step."""
    lr: float = 0.01
    """Learning rate of SGD."""
    momentum: float = 0.9
    """Momentum of SGD; it starts at zero each round."""
    weight_decay: float = 5e-4
    """Weight of the L2 penalty on all parameters."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate over the rounds."""
    augment: tuple[Literal["flip", "crop", "colour"], ...] = ()
    """Training images are changed at random: mirrored, cut, or in their colours. Not done in the paper."""

    def __post_init__(self) -> None:
        require_at_least("local.steps", self.steps, 1)
        require_at_least("local.batch_size", self.batch_size, 2)  # BatchNorm needs two
        require_positive("local.lr", self.lr)
        require_share("local.momentum", self.momentum)
        require_not_negative("local.weight_decay", self.weight_decay)


@dataclass(frozen=True)
class ServerConfig:
    rounds: int = 25
    """Rounds of training: in each, active clients train and the server averages."""
    active: int | None = None
    """Clients that train in a round; all if not given."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """The mean over clients: each the same, as in the paper, or by its number of samples."""
    eval_every: int = 1
    """Evaluate every so many rounds; the last is always evaluated."""
    min_replies: int = 1
    """A round with fewer usable replies ends the run."""
    checkpoint_every: int = 5
    """Save a checkpoint every so many rounds: a resume after a kill does the rounds since then again."""

    def __post_init__(self) -> None:
        for name in ("rounds", "active", "eval_every", "min_replies", "checkpoint_every"):
            require_at_least(f"server.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The method's name and its own fields, which its class checks."""

    name: str = DEFAULT_ALGORITHM
    """The method, or a file such as ./mine.py; `fedcir algorithms NAME` lists its own fields of this section."""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    seed: int = 0
    """Seed of everything random: equal seeds give equal bits."""
    workers: int | None = None
    """Processes that train on a CPU; as many as there are cores if not given. Results do not depend on it."""
    threads: int = 1
    """Torch threads of a training process: results depend on it, so it is saved."""
    device: str = "auto"
    """cpu, cuda, mps, or auto for the best there is."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Local steps in bfloat16 where torch's autocast deems it safe: for GPUs."""
    compile: bool = False
    """Whether torch.compile makes the encoder: slow to start, and results differ in the last bits."""
    layout: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of images and weights, from a fixed table by default: results depend on it, so it is saved."""

    def __post_init__(self) -> None:
        require_at_least("run.seed", self.seed, 0)
        require_at_least("run.threads", self.threads, 1)
        require_at_least("run.workers", self.workers, 1)


@dataclass(frozen=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    run: RunConfig = field(default_factory=RunConfig)


SECTIONS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}


def require_at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")


def require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} must be a number above 0, got {value}")


def require_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name} must be a number of at least 0, got {value}")


def require_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise InputError(f"{name} must be at least 0 and below 1, got {value}")
