"""The settings: frozen dataclasses, with a sentence and a default for each field."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fedcir.errors import InputError, suggest_name
from fedcir.plugins import find_file, list_entry_points
from fedcir.validation import Between, Count, Fraction, LearningRate, Weight, check_bounds, format_value

DEFAULT_ALGORITHM = "fedcirplus"
DEFAULT_COMPARISON = ("fedavg", "fedcir", "fedcirplus", "centralized")
"""The plain algorithm, the paper's, the recommended one, and a ceiling."""

PATH_SETTINGS = {"data.root", "data.lists", "data.table", "partition.file", "model.weights"}
"""Settings that name a place on the user's machine."""

BUILTIN_MODELS = ("cnn", "resnet18", "unet", "mlp", "linear")
"""Networks of this package, which start from random weights."""
PRETRAINED_SIZES = {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}
"""Encoders with ImageNet weights, and the image sizes that they were trained with."""
HUGGING_FACE = "hf"
"""Name of an encoder of transformers, whose folder is model.weights; hf:DIR names both."""
MODELS = (*BUILTIN_MODELS, *PRETRAINED_SIZES, HUGGING_FACE)
"""Networks that have a name; others are called by `package.module:callable` or `./mine.py:callable`."""
MAX_IMAGE_SIZE = 4_096
"""Width and height of images in pixels."""
MAX_CLIENTS = 100_000

Pooling = Literal["cls", "mean", "pooler"]


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
    image_size: Annotated[int | None, Between(1, MAX_IMAGE_SIZE)] = None
    """Images are resized to this width and height; by default 128, but arrays and minidigits keep their size."""
    channels: Annotated[int | None, Between(1, 3)] = None
    """3 makes all images RGB, 1 makes them grey; by default 3, but arrays and minidigits keep their channels."""
    classes: tuple[str, ...] | None = None
    """Use only these classes; by default all, but for domainnet the usual ten, where "all" means all 345."""
    columns: tuple[str, ...] = ("image", "label", "domain")
    """Names of the columns: image, label, domain (hub), or path, label, site and perhaps group and split (table)."""
    train_per_domain: Annotated[int | None, Between(1, 10**9)] = None
    """Use at most this many training images per domain; classes keep their proportions."""
    max_bytes: Annotated[int, Between(1, 10**11)] = 500_000_000
    """The largest image file, in bytes; a larger one counts as not readable."""
    max_pixels: Annotated[int, Between(1, 178_956_970)] = 100_000_000
    """The most pixels of an image; a larger one counts as not readable. Decoding takes up to 20 bytes a pixel."""
    test_fraction: Annotated[float, Between(0, 1, above=True, below=True)] = 0.2
    """Share of each domain that is set aside for testing, if the dataset has no split of its own."""
    val_fraction: Fraction = 0.0
    """Share of each domain's training images that is set aside, to pick the best round and to calibrate the model."""
    target: str | None = None
    """Column to predict, or several with commas (csv); num>0 makes two classes of a column of numbers."""
    site: str = "site"
    """Column that names the site of each row, if all sites are in one file (csv)."""
    group: str | None = None
    """Column whose equal values, such as a patient's rows, stay on one side of every split (csv)."""
    split: str | None = None
    """Column that says train, validation or test for each row (csv); by default test rows are drawn."""
    ignore: tuple[str, ...] = ()
    """Columns that are left out, such as names and numbers of patients (csv)."""
    categorical: tuple[str, ...] = ()
    """Columns of numbers that are codes of categories (csv); columns of text are categories anyway."""
    missing: Literal["mean", "drop"] = "mean"
    """A missing number becomes the mean, beside a feature that says so; or its row is dropped (csv)."""
    scale: Literal["federation", "client", "none"] = "federation"
    """Whose mean and spread scale the numbers of tables: all sites', from sums; each site's; or none; targets too."""

    def __post_init__(self) -> None:
        check_bounds(self, "data")
        if self.channels == 2:
            raise InputError("data.channels must be 1 for grey or 3 for RGB, got 2")
        if self.classes == ():
            raise InputError("data.classes names no class: name some, or leave it out")


@dataclass(frozen=True)
class TaskConfig:
    name: str | None = None
    """classification, multilabel, regression, survival, segmentation, or ./mine.py; by default it follows the data."""


@dataclass(frozen=True)
class PartitionConfig:
    scheme: Literal["domain", "dirichlet", "iid", "csv"] = "domain"
    """domain: one client each; dirichlet: domains divided with label skew; iid: data mixed evenly; csv: see `file`."""
    file: str | None = None
    """CSV file with the columns path and client, which says who holds each image (csv)."""
    clients: Annotated[int | None, Between(1, MAX_CLIENTS)] = None
    """Number of clients; one per domain if not given."""
    beta: Annotated[float, Between(0, 1_000_000, above=True)] = 0.5
    """Dirichlet concentration of labels: smaller values give more skewed clients, 1e6 gives even ones."""
    hold_out: str | None = None
    """Domain that no client trains on, but that the model is tested on."""
    exclude: tuple[str, ...] = ()
    """Sites that take no part: domains, or clients by number or name. The others keep their numbers and seeds."""
    min_samples: Annotated[int, Between(1, 10**9)] = 1
    """Every client gets at least this many training images."""
    max_samples: Annotated[int | None, Between(1, 10**9)] = None
    """No client trains on more images than this; classes keep their proportions."""

    def __post_init__(self) -> None:
        check_bounds(self, "partition")
        most, least = self.max_samples, self.min_samples
        if most is not None and most < least:
            raise InputError(f"partition.max_samples must be at least partition.min_samples={least}, got {most}")
        if (self.scheme == "csv") != (self.file is not None):
            raise InputError("partition.scheme=csv and partition.file=FILE.csv go together: give both or neither")
        if self.scheme == "csv" and self.clients is not None:
            raise InputError(f"{self.file} names the clients: leave partition.clients out, got {self.clients}")


@dataclass(frozen=True)
class ModelConfig:
    name: str = "cnn"
    """cnn, resnet18, unet, mlp, linear, efficientnet-lite0, -1, -2 (pretrained; two: a+b), hf:DIR, ./mine.py:make."""
    arguments: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the callable, in a table [model.arguments]."""
    width: Annotated[int | None, Between(1, 4_096)] = None
    """Channels of the network's first stage, 16 for cnn and unet, 64 for resnet18; or the width of an mlp, 64."""
    latent: Annotated[int | None, Between(1, 16_384)] = None
    """Dimensions of z in the probabilistic algorithms; by default as many as the features have."""
    weights: str | None = None
    """File of weights to start from (.safetensors or .pth), of this network or of one that contains it."""
    pooling: Pooling | None = None
    """How the tokens of a transformer become features: cls, mean or pooler; by default what the network is made for."""
    start: Literal["none", "fedcirone"] = "none"
    """With fedcirone, training begins with the head that it fits in closed form on the encoder's features."""
    freeze: bool = False
    """Leave the encoder as it is: its features are computed once per image, and only what follows them trains."""
    stages: Annotated[int | None, Between(1, 64)] = None
    """Last stages of a frozen encoder whose averaged maps join its features; none if not given."""
    native_size: bool | None = None
    """Whether images are resized to the size that a pretrained encoder was trained with; several encoders always do."""
    hidden: Annotated[int | None, Between(1, 16_384)] = None
    """Width of a hidden layer with ReLU between the features of a frozen encoder and the rest; none if not given."""
    train: tuple[str, ...] | None = None
    """Parts of the encoder that train, by name or pattern (layer4, layer*), besides the head; others are frozen."""
    adapter: Literal["none", "lora"] = "none"
    """With lora, the encoder is frozen, but low-rank changes of its linear layers and convolutions train."""
    adapter_rank: Annotated[int | None, Between(1, 4_096)] = None
    """Rank of these changes; 8 if not given."""
    adapter_alpha: Annotated[float | None, Between(0, 1_000_000, above=True)] = None
    """Their factor, divided by the rank; 16 if not given."""
    adapter_targets: tuple[str, ...] | None = None
    """Layers that get adapters, by name or pattern (layer4, *.conv2); all if not given."""
    mean: Annotated[tuple[float, ...] | None, Between(-1_000, 1_000)] = None
    """Mean by channel that pixel values from 0 to 1 are normalised with; by default the encoder's, or ImageNet's."""
    std: Annotated[tuple[float, ...] | None, Between(0, 1_000, above=True)] = None
    """Standard deviation by channel, which goes with `mean`."""
    norm: Literal["batch", "group", "invariant", "standardised"] = "batch"
    """BatchNorm as in the paper; GroupNorm; InstanceNorm first, then GroupNorm; or no norm and standardised weights."""
    batchnorm: Literal["average", "pooled", "local", "frozen"] = "average"
    """BatchNorm statistics: averaged like weights, pooled as if over all data, kept by each client, or left alone."""

    def __post_init__(self) -> None:
        check_bounds(self, "model")
        if self.name.startswith(f"{HUGGING_FACE}:"):
            self._split_folder()
        self._check_name()
        for setting, is_set in (("stages", self.stages is not None), ("hidden", self.hidden is not None)):
            if is_set and not self.freeze:
                raise InputError(f"model.{setting} is for a frozen encoder: set model.freeze=true too, or leave it out")
        self._check_partial()
        if self.start != "none" and (self.hidden is not None or self.norm != "batch"):
            setting = "hidden" if self.hidden is not None else "norm"
            raise InputError(
                f"model.start={self.start} fits a head on the encoder as it comes: leave out model.{setting}"
            )
        if self.keeps_norm and self.norm != "batch":
            setting = "model.freeze=true" if self.freeze else "model.batchnorm=frozen"
            raise InputError(f"{setting} keeps the norms that model.norm={self.norm} replaces: leave out one")
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise InputError("model.mean and model.std go together: give both, a value for each channel, or neither")

    def _check_partial(self) -> None:
        for name in ("adapter_rank", "adapter_alpha", "adapter_targets"):
            if getattr(self, name) is not None and self.adapter == "none":
                raise InputError(f"model.{name} is for adapters: set model.adapter=lora too, or leave it out")
        for name in ("train", "adapter_targets"):
            if getattr(self, name) == ():
                raise InputError(f"model.{name} names no part: name some, or leave it out")
        if self.freeze and self.partial:
            raise InputError(f"model.freeze=true freezes the whole encoder: leave it out, or {self.frozen_by}")

    def _check_name(self) -> None:
        module, colon, attribute = self.name.rpartition(":")
        if "+" in self.name:
            self._check_side_by_side()
        elif self.native_size and (not self.freeze or colon or self.name in BUILTIN_MODELS):
            raise InputError(f"model.native_size is for a frozen {', '.join(PRETRAINED_SIZES)} or hf:DIR: leave it out")
        if self.pooling is not None and self.name in (*BUILTIN_MODELS, *PRETRAINED_SIZES):
            raise InputError(f"model.pooling is for transformers, such as hf:DIR, not for {self.name}: leave it out")
        if self.foreign and self.file is None and not (module and colon and attribute):
            installed = list_entry_points("model")
            if self.name not in installed:
                names = (*MODELS[:-1], "hf:DIR", *installed, "package.module:callable")
                raise InputError(f"model.name cannot be {format_value(self.name)}; {suggest_name(self.name, names)}")
        if self.name in BUILTIN_MODELS and self.arguments:
            raise InputError(f"{self.name} takes no model.arguments: leave them out")
        for setting, is_set, names in (
            ("width", self.width is not None, ("cnn", "resnet18", "unet", "mlp")),
            ("norm=standardised", self.norm == "standardised", ("cnn", "resnet18", "unet")),
        ):
            if is_set and self.name not in names:
                raise InputError(f"model.{setting} is for {' and '.join(names)}, not for {self.name}: leave it out")

    def _split_folder(self) -> None:
        """Take the folder of hf:DIR as the weights."""
        folder = self.name.partition(":")[2]
        if not folder:
            raise InputError("model.name: hf: names no folder: write hf:DIR, a folder that save_pretrained wrote")
        if self.weights is not None and os.path.abspath(self.weights) != os.path.abspath(folder):
            raise InputError(f"model.name: {self.name} has weights: leave out model.weights={self.weights}")
        if self.arguments:
            raise InputError(f"{self.name} takes no model.arguments: the config.json of the folder has its settings")
        object.__setattr__(self, "name", HUGGING_FACE)
        object.__setattr__(self, "weights", folder)

    def _check_side_by_side(self) -> None:
        for name in self.names:
            if name not in PRETRAINED_SIZES:
                raise InputError(
                    f"model.name: {name!r} cannot be combined with another; {suggest_name(name, PRETRAINED_SIZES)}"
                )
        if len(set(self.names)) < len(self.names):
            raise InputError(f"model.name: {self.name} names an encoder twice")
        if not self.freeze or self.weights is not None or self.arguments:
            raise InputError(
                f"model.name: {self.name} is for frozen encoders with their own weights: set model.freeze=true, "
                "and leave out model.weights and model.arguments"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoders, of which there are several in `a+b`."""
        return tuple(self.name.split("+"))

    @property
    def foreign(self) -> bool:
        """Whether other code makes the network: a callable, a user's file or an entry point."""
        return not set(self.names) <= set(MODELS)

    @property
    def file(self) -> Path | None:
        """The user's file that makes the network, if one does."""
        return find_file(self.name)

    @property
    def partial(self) -> bool:
        """Whether parts of the encoder are frozen, or all but its adapters."""
        return self.train is not None or self.adapter != "none"

    @property
    def frozen_by(self) -> str | None:
        """Setting that freezes the encoder or parts of it; None if all of it trains."""
        settings = {"model.train": self.train is not None, "model.adapter": self.adapter != "none"}
        return next((name for name, is_set in {**settings, "model.freeze": self.freeze}.items() if is_set), None)

    @property
    def pretrained(self) -> bool:
        """Whether it is known to start from trained weights."""
        return self.weights is not None or (self.name not in BUILTIN_MODELS and not self.foreign)

    @property
    def keeps_norm(self) -> bool:
        """Whether the norms that the encoder comes with must stay."""
        return self.freeze or self.batchnorm == "frozen"


@dataclass(frozen=True)
class LocalConfig:
    steps: Count = 20
    """SGD steps per client and round; E in the paper."""
    epochs: Annotated[int | None, Between(1, 1_000_000)] = None
    """Passes over a client's images in a round, so that larger clients take more steps; `steps` if not given."""
    batch_size: Annotated[int, Between(2, 65_536)] = 32
    """Training images per SGD step; BatchNorm needs two."""
    lr: LearningRate = 0.01
    """Learning rate; adam and adamw usually need a lower one, such as 0.001."""
    optimizer: str = "sgd"
    """sgd, adam, adamw, or another class of torch.optim by name; its state starts anew in each round."""
    momentum: Fraction = 0.9
    """Momentum of SGD and of other optimisers that take one; it starts from zero in each round."""
    weight_decay: Weight = 5e-4
    """Weight of the L2 penalty on all parameters."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate changes over the rounds."""
    warmup: Annotated[int, Between(0, 1_000_000)] = 0
    """Rounds before the full learning rate, over which it grows linearly."""
    clip_norm: Annotated[float | None, Between(0, 1_000_000_000, above=True)] = None
    """L2 norm that the gradient of a step may not exceed: longer ones are scaled down; no limit if not given."""
    augment: tuple[Literal["flip", "crop", "colour"], ...] = ()
    """Random changes to training images: mirror, crop, or change colours. The paper makes none."""
    prior: Literal["none", "client"] = "none"
    """With `client`, a client's own label shares correct its cross-entropy (balanced softmax); they never leave it."""
    balance: Literal["none", "classes"] = "none"
    """With `classes`, a client's cross-entropy weighs classes by their inverse frequency, so that all count alike."""

    def count_steps(self, images: int) -> int:
        """Steps in a round of a client with so many training images; batches are full, so the last one wraps."""
        return self.steps if self.epochs is None else -(-self.epochs * images // self.batch_size)

    @property
    def work(self) -> str:
        """A client's work in a round, in words."""
        number, noun = (self.steps, "step") if self.epochs is None else (self.epochs, "epoch")
        return f"{number} local {noun}{'' if number == 1 else 's'}"

    def __post_init__(self) -> None:
        check_bounds(self, "local")
        if self.prior == "client" and self.balance == "classes":
            raise InputError(
                "local.prior=client and local.balance=classes both correct for the label shares: "
                "set local.prior=none or local.balance=none"
            )


@dataclass(frozen=True)
class ServerConfig:
    rounds: Count = 25
    """Number of rounds. In each, the active clients train and the server averages their models."""
    active: Annotated[int | None, Between(1, MAX_CLIENTS)] = None
    """Clients that train in each round; all if not given."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """Weights of the mean over clients: equal, as in the paper, or by number of training images."""
    aggregation: str = "mean"
    """Rule that combines the models: mean; the robust median, trimmed-mean, krum or norm-clip; or a file ./mine.py."""
    trim: Annotated[float, Between(0, 0.5, above=True, below=True)] = 0.25
    """Share of the clients whose values are left out at each end (trimmed-mean)."""
    byzantine: Annotated[int | None, Between(0, MAX_CLIENTS)] = None
    """How many bad clients a choice of the server must stand (krum); as many as it can if not given."""
    clip: Annotated[float | None, Between(0, 1_000_000_000, above=True)] = None
    """Longest update that counts in full (norm-clip); the median of the round's updates if not given."""
    max_update: Annotated[float, Between(0, 1_000_000_000)] = 100.0
    """A reply is dropped if its update is so many times as long as usual; 0 drops none for its length."""
    eval_every: Count = 1
    """Test every N rounds; the last round is always tested."""
    min_replies: Annotated[int, Between(1, MAX_CLIENTS)] = 1
    """The run stops if a round gets fewer usable replies than this."""
    patience: Annotated[int | None, Between(1, 1_000_000)] = None
    """The run ends after so many tests in a row without a higher mean accuracy on validation images."""
    masked: bool = False
    """Clients mask their sums (fedcirone), so that the server learns only the total of all of them."""
    store_sums: bool = False
    """Store each client's sums (fedcirone) in the run folder, and test all coalitions, for `worth` and `forget`."""
    checkpoint_every: Count = 5
    """Save a checkpoint every N rounds; a run that was killed repeats the rounds after its last one."""
    keep: Literal["last", "best"] = "last"
    """Round whose model is saved: the last, or the tested one of the highest mean accuracy on validation images."""
    upload: Literal["float32", "bfloat16", "int8"] = "float32"
    """How clients upload their changes to the model: whole, in a half or in a quarter of the bytes."""

    def __post_init__(self) -> None:
        check_bounds(self, "server")
        if 0 < self.max_update <= 1:
            raise InputError(f"server.max_update must be a number above 1, or 0 for no limit, got {self.max_update}")


@dataclass(frozen=True)
class PrivacyConfig:
    clip: Annotated[float | None, Between(0, 1_000_000, above=True)] = None
    """L2 norm that no client's change to the model may exceed: longer ones are scaled down; off if not given."""
    noise: Annotated[float, Between(0, 1_000)] = 0.0
    """Standard deviation of the Gaussian noise on the sum of the changes, or on each, in multiples of `clip`."""
    unit: Literal["client", "example"] = "client"
    """What epsilon protects: a client with all its images, or one image (noise in every local step, or on sums)."""
    place: Literal["server", "client"] = "server"
    """Who clips and adds noise: a server that all clients trust, or each client, whose uploads are then private."""
    adaptive: bool = False
    """Move `clip` from round to round towards the median norm of the changes, which is counted with noise."""
    epsilon: Annotated[float | None, Between(0, 1_000_000, above=True)] = None
    """The run ends before the round that would bring its epsilon above this."""
    delta: Annotated[float, Between(0, 1, above=True, below=True)] = 1e-5
    """Probability with which epsilon may fail to hold; keep it well below 1 / number of clients."""

    def __post_init__(self) -> None:
        check_bounds(self, "privacy")
        if self.clip is None and (self.noise or self.adaptive):
            raise InputError("privacy.noise and privacy.adaptive need a norm to start from: set privacy.clip too")
        if self.epsilon is not None and not self.noise:
            raise InputError(f"privacy.epsilon={self.epsilon} cannot be kept without noise: set privacy.noise too")
        if self.adaptive and self.place == "client":
            raise InputError("privacy.adaptive counts over all clients: it needs privacy.place=server")
        if self.unit == "example" and (self.adaptive or self.place == "client" or not self.noise):
            raise InputError("privacy.unit=example: set privacy.noise, leave out privacy.place and privacy.adaptive")
        if 0 < self.noise < 0.01:  # epsilon would say nothing, or overflow
            raise InputError(f"privacy.noise must be 0, or at least 0.01, got {self.noise}")

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

    @property
    def noised_uploads(self) -> bool:
        """Whether each client adds noise to what it uploads."""
        return self.noise > 0 and (self.by_clients or self.by_steps)


@dataclass(frozen=True)
class AlgorithmConfig:
    """The algorithm's name and its own fields, which its class checks."""

    name: str = DEFAULT_ALGORITHM
    """Algorithm, by name or file (./mine.py); `fedcir algorithms NAME` lists the fields it adds to this section."""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    seed: Annotated[int, Between(0, 2**63 - 1)] = 0
    """Seed of all random choices; equal seeds give results that are equal to the bit."""
    workers: Annotated[int | None, Between(1, 1_024)] = None
    """Processes that train on a CPU; one per core if not given. Results do not depend on it."""
    threads: Annotated[int, Between(1, 1_024)] = 1
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
        check_bounds(self, "run")


@dataclass(frozen=True)
class AttackConfig:
    kind: Literal["none", "label-flip", "scale", "sign-flip", "noise", "backdoor"] = "none"
    """What bad clients do, in an experiment on one machine; never across sites."""
    clients: Annotated[int, Between(1, MAX_CLIENTS)] = 1
    """How many clients are bad; the seed draws which."""
    strength: Annotated[float | None, Between(0, 1_000_000_000, above=True)] = None
    """Factor of the update (scale: 10, sign-flip: 4, noise: 10) or share of images (label-flip: 1, backdoor: 0.5)."""

    def __post_init__(self) -> None:
        check_bounds(self, "attack")


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
    attack: AttackConfig = field(default_factory=AttackConfig)
    task: TaskConfig = field(default_factory=TaskConfig)

    def __post_init__(self) -> None:
        if self.model.freeze and self.local.augment:
            names = ",".join(self.local.augment)
            raise InputError(
                f"local.augment={names} changes images, but model.freeze=true encodes them once: leave out one"
            )
        if self.model.freeze and self.attack.kind == "backdoor":
            raise InputError("attack.kind=backdoor patches images, but model.freeze=true has features: leave one out")
        if self.privacy.by_steps and self.local.clip_norm is not None:
            raise InputError(
                "privacy.unit=example clips each image's gradient by privacy.clip: leave local.clip_norm out"
            )
        weighting = self.server.weighting
        if (self.privacy.by_server or self.privacy.by_clients) and weighting != "uniform":
            raise InputError(f"privacy.clip needs clients of one weight: set server.weighting=uniform, got {weighting}")
        if self.privacy.by_server and self.server.aggregation != "mean":
            raise InputError("privacy.clip bounds a client's share of the mean: set server.aggregation=mean")


SECTIONS: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(Config)}
