"""The settings: frozen dataclasses, with a sentence and a default for each field."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedcir.config.nearest import nearest
from fedcir.types import InputError

DEFAULT_ALGORITHM = "fedcirplus"
DEFAULT_COMPARISON = ("fedavg", "fedcir", "fedcirplus", "centralized")
"""The plain algorithm, the paper's, the recommended one, and a ceiling."""

PATHS = {"data.root", "data.lists", "data.table", "partition.file", "model.weights"}
"""Settings that name a place on the user's machine."""

OWN_MODELS = ("cnn", "resnet18")
"""Networks of this package, whose width and norm can be set; they start from random weights."""
MODELS = (*OWN_MODELS, "efficientnet-lite0")
FORM = "package.module:callable"
"""Networks that have a name; others are called by `package.module:callable` or `./mine.py:callable`."""


@dataclass(frozen=True)
class DataConfig:
    name: str = "minidigits"
    """Name of the dataset; `fedcir data list` lists them."""
    root: str | None = None
    """Folder that holds the dataset."""
    lists: str | None = None
    """Folder of the official train and test lists, if they are not beside the images (pacs)."""
    table: str | None = None
    """CSV file of labels, if it is not labels.csv in the root (table)."""
    image_size: int | None = None
    """Images are resized to this width and height; by default 128, but arrays and minidigits keep their size."""
    channels: int | None = None
    """3 makes all images RGB, 1 makes them grey; by default 3, but arrays and minidigits keep their channels."""
    classes: tuple[str, ...] | None = None
    """Use only these classes; by default all, but for domainnet the usual ten, where "all" means all 345."""
    columns: tuple[str, ...] = ("image", "label", "domain")
    """Names of the columns: image, label, domain (hub), or path, label, site and perhaps group and split (table)."""
    train_per_domain: int | None = None
    """Use at most this many training images per domain; classes keep their proportions."""
    test_fraction: float = 0.2
    """Share of each domain that is set aside for testing, if the dataset has no split of its own."""
    val_fraction: float = 0.0
    """Share of each domain's training images that is set aside, to pick the best round and to calibrate the model."""

    def __post_init__(self) -> None:
        require_at_least("data.train_per_domain", self.train_per_domain, 1)
        require_at_least("data.image_size", self.image_size, 1)
        if self.channels not in (None, 1, 3):
            raise InputError(f"data.channels must be 1 for grey or 3 for RGB, got {self.channels}")
        if self.classes == ():
            raise InputError("data.classes names no class: name some, or leave it out")
        require_share("data.val_fraction", self.val_fraction)
        require_share("data.test_fraction", self.test_fraction)
        require_positive("data.test_fraction", self.test_fraction)


@dataclass(frozen=True)
class PartitionConfig:
    scheme: Literal["domain", "dirichlet", "iid", "csv"] = "domain"
    """domain: one client each; dirichlet: domains divided with label skew; iid: data mixed evenly; csv: see `file`."""
    file: str | None = None
    """CSV file with the columns path and client, which says who holds each image (csv)."""
    clients: int | None = None
    """Number of clients; one per domain if not given."""
    beta: float = 0.5
    """Dirichlet concentration of labels: smaller values give more skewed clients, 1e6 gives even ones."""
    hold_out: str | None = None
    """Domain that no client trains on, but that the model is tested on."""
    min_samples: int = 1
    """Every client gets at least this many training images."""
    max_samples: int | None = None
    """No client trains on more images than this; classes keep their proportions."""

    def __post_init__(self) -> None:
        require_at_least("partition.clients", self.clients, 1)
        require_positive("partition.beta", self.beta)
        if self.beta > 1e6:  # numpy's Dirichlet overflows far above
            raise InputError(f"partition.beta must be at most 1e6, which already gives even clients, got {self.beta}")
        require_at_least("partition.min_samples", self.min_samples, 1)
        if self.max_samples is not None and self.max_samples < self.min_samples:
            raise InputError(
                f"partition.max_samples must be at least partition.min_samples={self.min_samples}, "
                f"got {self.max_samples}"
            )
        if (self.scheme == "csv") != (self.file is not None):
            raise InputError("partition.scheme=csv and partition.file=FILE.csv go together: give both or neither")
        if self.scheme == "csv" and self.clients is not None:
            raise InputError(
                f"partition.clients is {self.clients}, but {self.file} names the clients: leave partition.clients out"
            )


@dataclass(frozen=True)
class ModelConfig:
    name: str = "cnn"
    """`cnn` (small images), `resnet18` (as in the paper), `efficientnet-lite0` (pretrained), or `module:callable`."""
    arguments: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the callable, in a table [model.arguments]."""
    width: int | None = None
    """Channels of the network's first stage; by default 16 for cnn and 64 for resnet18."""
    latent: int | None = None
    """Dimensions of z in the probabilistic algorithms; by default as many as the features have."""
    weights: str | None = None
    """File of weights to start from (.safetensors or .pth), of this network or of one that contains it."""
    freeze: bool = False
    """Leave the encoder as it is: its features are computed once per image, and only what follows them trains."""
    hidden: int | None = None
    """Width of a hidden layer with ReLU between the features of a frozen encoder and the rest; none if not given."""
    mean: tuple[float, ...] | None = None
    """Mean by channel that pixel values from 0 to 1 are normalised with; by default the encoder's, or ImageNet's."""
    std: tuple[float, ...] | None = None
    """Standard deviation by channel, which goes with `mean`."""
    norm: Literal["batch", "group", "invariant", "standardised"] = "batch"
    """BatchNorm as in the paper; GroupNorm; InstanceNorm first, then GroupNorm; or no norm and standardised weights."""
    batchnorm: Literal["average", "pooled", "local", "frozen"] = "average"
    """BatchNorm statistics: averaged like weights, pooled as if over all data, kept by each client, or left alone."""

    def __post_init__(self) -> None:
        for name in ("width", "latent", "hidden"):
            require_at_least(f"model.{name}", getattr(self, name), 1)
        if not self.foreign:
            if self.name not in MODELS:
                raise InputError(f"model.name cannot be {self.name!r}; {nearest(self.name, (*MODELS, FORM))}")
            if self.name in OWN_MODELS and self.arguments:
                raise InputError(f"{self.name} takes no model.arguments: leave them out")
        if self.name not in OWN_MODELS and self.width is not None:
            raise InputError(f"model.width is for {' and '.join(OWN_MODELS)}, not for {self.name}: leave it out")
        if self.name not in OWN_MODELS and self.norm == "standardised":
            raise InputError(f"model.norm=standardised is for {' and '.join(OWN_MODELS)}, not for {self.name}")
        if self.hidden is not None and not self.freeze:
            raise InputError("model.hidden follows a frozen encoder: set model.freeze=true too, or leave it out")
        if self.keeps_norm and self.norm != "batch":
            what = "model.freeze=true" if self.freeze else "model.batchnorm=frozen"
            raise InputError(
                f"{what} keeps the encoder's norms as they are, and model.norm={self.norm} replaces them: "
                "leave out one of them"
            )
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise InputError("model.mean and model.std go together: give both, a value for each channel, or neither")
        for value in self.std or ():
            require_positive("model.std", value)

    @property
    def foreign(self) -> bool:
        """Whether it is called by module and callable, and not by a name of this package."""
        module, colon, name = self.name.rpartition(":")
        return bool(module and colon and name)

    @property
    def file(self) -> Path | None:
        """The user's file that makes the network, if one does."""
        module = self.name.rpartition(":")[0]
        return Path(module) if module.endswith(".py") else None

    @property
    def pretrained(self) -> bool:
        """Whether it is known to start from trained weights."""
        return self.weights is not None or (self.name not in OWN_MODELS and not self.foreign)

    @property
    def keeps_norm(self) -> bool:
        """Whether the norms that the encoder comes with must stay."""
        return self.freeze or self.batchnorm == "frozen"


@dataclass(frozen=True)
class LocalConfig:
    steps: int = 20
    """SGD steps per client and round; E in the paper."""
    batch_size: int = 32
    """Training images per SGD step."""
    lr: float = 0.01
    """Learning rate of SGD."""
    momentum: float = 0.9
    """Momentum of SGD; it starts from zero in each round."""
    weight_decay: float = 5e-4
    """Weight of the L2 penalty on all parameters."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate changes over the rounds."""
    augment: tuple[Literal["flip", "crop", "colour"], ...] = ()
    """Random changes to training images: mirror, crop, or change colours. The paper makes none."""
    prior: Literal["none", "client"] = "none"
    """With `client`, a client's own label shares correct its cross-entropy (balanced softmax); they never leave it."""
    balance: Literal["none", "classes"] = "none"
    """With `classes`, a client's cross-entropy weighs classes by their inverse frequency, so that all count alike."""

    def __post_init__(self) -> None:
        require_at_least("local.steps", self.steps, 1)
        require_at_least("local.batch_size", self.batch_size, 2)  # BatchNorm needs two
        require_positive("local.lr", self.lr)
        require_share("local.momentum", self.momentum)
        require_not_negative("local.weight_decay", self.weight_decay)
        if self.prior == "client" and self.balance == "classes":
            raise InputError(
                "local.prior=client and local.balance=classes both correct for the label shares: "
                "set local.prior=none or local.balance=none"
            )


@dataclass(frozen=True)
class ServerConfig:
    rounds: int = 25
    """Number of rounds. In each, the active clients train and the server averages their models."""
    active: int | None = None
    """Clients that train in each round; all if not given."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """Weights of the mean over clients: equal, as in the paper, or by number of training images."""
    eval_every: int = 1
    """Test every N rounds; the last round is always tested."""
    min_replies: int = 1
    """The run stops if a round gets fewer usable replies than this."""
    checkpoint_every: int = 5
    """Save a checkpoint every N rounds; a run that was killed repeats the rounds after its last one."""
    upload: Literal["float32", "bfloat16", "int8"] = "float32"
    """How clients upload their changes to the model: whole, in a half or in a quarter of the bytes."""

    def __post_init__(self) -> None:
        for name in ("rounds", "active", "eval_every", "min_replies", "checkpoint_every"):
            require_at_least(f"server.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class PrivacyConfig:
    clip: float | None = None
    """L2 norm that no client's change to the model may exceed: longer ones are scaled down; off if not given."""
    noise: float = 0.0
    """Standard deviation of the Gaussian noise on the sum of the changes, or on each, in multiples of `clip`."""
    unit: Literal["client", "example"] = "client"
    """What epsilon protects: a client with all its images, or one image, with noise in every local step (DP-SGD)."""
    place: Literal["server", "client"] = "server"
    """Who clips and adds noise: a server that all clients trust, or each client, whose uploads are then private."""
    adaptive: bool = False
    """Move `clip` from round to round towards the median norm of the changes, which is counted with noise."""
    epsilon: float | None = None
    """The run ends before the round that would bring its epsilon above this."""
    delta: float = 1e-5
    """Probability with which epsilon may fail to hold; keep it well below 1 / number of clients."""

    def __post_init__(self) -> None:
        require_not_negative("privacy.noise", self.noise)
        require_share("privacy.delta", self.delta)
        require_positive("privacy.delta", self.delta)
        for name in ("clip", "epsilon"):
            if (value := getattr(self, name)) is not None:
                require_positive(f"privacy.{name}", value)
        if self.clip is None and (self.noise or self.adaptive):
            raise InputError("privacy.noise and privacy.adaptive need a norm to start from: set privacy.clip too")
        if self.epsilon is not None and not self.noise:
            raise InputError(f"privacy.epsilon={self.epsilon} cannot be kept without noise: set privacy.noise too")
        if self.adaptive and self.place == "client":
            raise InputError("privacy.adaptive counts over all clients: it needs privacy.place=server")
        if self.unit == "example" and (self.adaptive or self.place == "client" or not self.noise):
            raise InputError(
                "privacy.unit=example clips and adds noise in every local step: set privacy.noise, "
                "and leave out privacy.place and privacy.adaptive"
            )
        if self.noise and not 0.01 <= self.noise <= 1000:  # beyond that, epsilon says nothing, or overflows
            raise InputError(f"privacy.noise must be 0, or from 0.01 to 1000, got {self.noise}")

    @property
    def by_server(self) -> bool:
        """Whether the server clips and adds noise."""
        return self.clip is not None and self.unit == "client" and self.place == "server"

    @property
    def by_clients(self) -> bool:
        """Whether each client does, before it uploads."""
        return self.clip is not None and self.unit == "client" and self.place == "client"

    @property
    def by_steps(self) -> bool:
        """Whether each client does, in every step."""
        return self.clip is not None and self.unit == "example"


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm's name and its own fields, which its class checks."""

    name: str = DEFAULT_ALGORITHM
    """Algorithm, by name or file (./mine.py); `fedcir algorithms NAME` lists the fields it adds to this section."""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    seed: int = 0
    """Seed of all random choices; equal seeds give results that are equal to the bit."""
    workers: int | None = None
    """Processes that train on a CPU; one per core if not given. Results do not depend on it."""
    threads: int = 1
    """Torch threads per training process. Results depend on it, so it is saved with the run."""
    device: str = "auto"
    """cpu, cuda, mps, or auto for the best one available."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs local steps under torch's autocast, which is meant for GPUs."""
    compile: bool = False
    """Compile the networks with torch.compile: slower to start, and results differ in the last bits."""
    layout: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of images and weights; auto takes it from a fixed table. Results depend on it, so it is saved."""

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
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.model.freeze and self.local.augment:
            raise InputError(
                f"local.augment={','.join(self.local.augment)} changes images at every step, but with "
                "model.freeze=true features are computed once: leave out one of them"
            )
        if (self.privacy.by_server or self.privacy.by_clients) and self.server.weighting != "uniform":
            raise InputError(
                "privacy.clip bounds what one client can change, so all must count alike: "
                f"set server.weighting=uniform, got {self.server.weighting}"
            )
        if self.privacy.by_server and getattr(self.server, "aggregation", "mean") != "mean":
            raise InputError("privacy.clip bounds a client's share of the mean: set server.aggregation=mean")


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
