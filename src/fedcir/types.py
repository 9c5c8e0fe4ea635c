"""The types that packages exchange. State is a value: a function takes one and returns a new one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # so that settings and errors do not wait for it
    import numpy as np
    import torch
    from torch import Tensor

Tensors = dict[str, "Tensor"]
"""A bag of named tensors, shaped like a state_dict; on the CPU wherever it crosses a boundary."""

Groups = dict[str, Tensors]
"""Named bags: "model", "generator", "gaussians", "prototypes"."""

Modules = dict[str, Any]
"""The networks (nn.Module) that an algorithm builds once per process; tensors are loaded into and read out of them."""


@dataclass(frozen=True)
class ServerState:
    """Server state between rounds."""

    round: int
    shared: Groups
    """The broadcast: nothing else reaches a client."""
    private: Groups = field(default_factory=dict)
    """State that stays on the server, such as that of its optimisers, or one group for each client."""


@dataclass(frozen=True)
class ClientReply:
    """Reply of one client to a training or evaluation request."""

    client_id: int
    num_examples: int
    tensors: Groups
    metrics: Mapping[str, float]

    @property
    def arrays(self) -> Groups:
        """Former name of `tensors`, for one version."""
        return self.tensors


@dataclass(frozen=True)
class DroppedReply:
    """A client of the cohort whose reply could not be used, and the reason."""

    client_id: int
    reason: str


def _refuse_labels() -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.int64)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class ExampleNoise:
    """Noise that a client adds to sums over its examples."""

    clip: float
    """L2 norm that the features of an example may not exceed."""
    multiplier: float
    """Standard deviation of the noise, in multiples of what one example can change."""


@dataclass(frozen=True)
class LocalContext:
    """Context of a client in a round, besides its data."""

    round: int
    total_rounds: int
    num_classes: int
    """Width of the head's outputs: the number of classes, where the task has any."""
    batch_size: int
    broadcast: Groups
    rng: torch.Generator
    client_state: Groups = field(default_factory=dict)
    """What `local_finish` returned when this client last trained; empty before that."""
    steps: int = 0
    """SGD steps of a client in this round."""
    lr: float = 0.0
    """Learning rate of these steps."""
    momentum: float = 0.0
    """Momentum of these steps, which starts at zero."""
    labels: Callable[[], Tensor] = _refuse_labels
    """Class of each example of the client's training set, (N,), read when called."""
    loss: Callable[[Tensor, Tensor], Tensor] = _cross_entropy
    """The task's mean loss of outputs and targets; cross-entropy is corrected as local.prior or local.balance says."""
    loss_name: str = "ce"
    """Name of this loss in records."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which losses are computed, with the precision of the run."""
    client: int = 0
    """Number of the client."""
    domain: str = ""
    """Name of the client's domain; empty where a model is used for no domain in particular."""
    validation: Callable[[], Iterable[tuple[Tensor, Tensor]]] | None = None
    """Goes once over the client's validation examples in batches; None in a run without any, or with noise."""
    noise: ExampleNoise | None = None
    """Noise that `local_summary` must add to what it sums over examples, from `noise_rng`; None without any."""
    noise_rng: np.random.Generator | None = None

    @property
    def cross_entropy(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss, by its name in methods that need classes."""
        return self.loss

    @property
    def received(self) -> Groups:
        """Former name of `broadcast`, for one version."""
        return self.broadcast

    @property
    def kept(self) -> Groups:
        """Former name of `client_state`, for one version."""
        return self.client_state

    @cached_property
    def class_counts(self) -> Tensor:
        """Training samples of the client by class, (C,). They stay on the client unless the method sends them."""
        return self.labels().bincount(minlength=self.num_classes)


class Aggregator(ABC):
    """Combines the models of one round's replies; each subclass is one rule, and each round has its own object."""

    uses_weights: ClassVar[bool] = True
    """Whether replies count by `server.weighting`; otherwise all count alike."""
    averages: ClassVar[bool] = True
    """Whether the variances that model.batchnorm=pooled needs can be computed from the result."""
    chosen: int | None = None
    """Index of the reply that stands for all, where the rule selects one; set by `value`."""

    def __init__(self, broadcast: Tensors, settings: Any) -> None:
        """Start a round: `broadcast` is what clients started from, `settings` the section [server] of the config."""
        self.broadcast, self.settings = broadcast, settings

    @classmethod
    def min_clients(cls, settings: Any) -> int:
        """Return how many clients a round needs."""
        return 1

    @abstractmethod
    def add(self, tensors: Tensors, weight: float) -> None:
        """Take in the model of one reply. Replies come in client order."""

    @abstractmethod
    def value(self) -> Tensors:
        """Return the combined model, with the names, dtypes and shapes of the replies."""


def _count_one(images: int) -> int:
    return 1


@dataclass(frozen=True)
class ServerContext:
    """Context of the server in a round, besides its state and the replies."""

    round: int
    total_rounds: int
    num_classes: int
    batch_size: int
    weighting: str
    batchnorm: str
    rng: torch.Generator
    clients: int = 0
    """Number of clients that train in this run; in a round only some of them may reply."""
    broadcast: Groups = field(default_factory=dict)
    """What this round's clients were sent."""
    make_aggregator: Callable[[Tensors], Aggregator] | None = None
    """Makes the round's aggregator from the tensors that clients started from; None is the mean."""
    domain_of: Callable[[int], str] = str
    """Returns the name of a client's domain."""
    noise: ExampleNoise | None = None
    """Noise that clients add to sums over examples."""
    count_steps: Callable[[int], int] = _count_one
    """Returns the local steps in a round of a client with so many training images."""
    momentum: float = 0.0
    """Momentum of local steps."""

    @property
    def sent(self) -> Groups:
        """Former name of `broadcast`, for one version."""
        return self.broadcast

    def weigh_reply(self, reply: ClientReply) -> float:
        """Weight of a client's reply in means over clients."""
        return float(reply.num_examples) if self.weighting == "samples" else 1.0


@dataclass(frozen=True)
class Losses:
    """The weighted total that is minimised, and its terms by name, unweighted."""

    total: Tensor
    terms: Tensors


def format_number(value: float, digits: int, sign: str = "") -> str:
    """Format a number with so many significant digits, and with an exponent only if it is very large or small."""
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:{sign}.{digits}g}"
    return f"{value:{sign}.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


@dataclass(frozen=True)
class Metric:
    """A number that judges predictions."""

    name: str
    """Prefix of its keys in records, such as "accuracy" of `accuracy_mean`."""
    title: str
    """Its name in tables and charts."""
    higher_is_better: bool = True
    is_share: bool = True
    """Whether it lies between 0 and 1, and is shown in per cent."""

    @property
    def label(self) -> str:
        """Title with its unit, for the head of a table or an axis."""
        return f"{self.title} (%)" if self.is_share else self.title

    @property
    def scale(self) -> float:
        """Factor from a value to the number that is shown."""
        return 100.0 if self.is_share else 1.0

    def format(self, value: float | None, digits: int = 1) -> str:
        """Format a value for a table whose head is `label`."""
        if value is None:
            return ""
        return f"{self.scale * value:.{digits}f}" if self.is_share else format_number(value, digits + 2)

    def show(self, value: float) -> str:
        """Format a value with its unit, for a line of text."""
        return f"{value:.1%}" if self.is_share else format_number(value, 4)

    def format_change(self, change: float, digits: int = 1) -> str:
        """Format a difference of two values, in points if they are shown in per cent."""
        return f"{100 * change:+.{digits}f}" if self.is_share else format_number(change, 3, "+")

    def show_gap(self, change: float) -> str:
        """Format a difference of two values with its unit and without its sign."""
        return f"{100 * abs(change):.1f} points" if self.is_share else format_number(abs(change), 3)

    def gain(self, value: float, other: float) -> float:
        """How much better a value is than another one; negative if it is worse."""
        return value - other if self.higher_is_better else other - value

    def find_best(self, values: Iterable[float]) -> float | None:
        return (max if self.higher_is_better else min)(values, default=None)

    def find_worst(self, values: Iterable[float]) -> float | None:
        return (min if self.higher_is_better else max)(values, default=None)

    def is_better(self, value: float, other: float) -> bool:
        return self.gain(value, other) > 0

    def to_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rename scores by their names in files to the fields of RoundRecord."""
        names = {self.name_in_files(field): field for field in SCORES}
        return {names.get(name, name): value for name, value in values.items()}

    def name_in_files(self, field: str) -> str:
        """Name of a field of RoundRecord in files: "accuracy" of `scores`, "accuracy_mean" of `score_mean`."""
        return self.name + field.removeprefix("scores").removeprefix("score") if field in SCORES else field


ACCURACY = Metric("accuracy", "accuracy")
SCORES = ("scores", "score_mean", "score_weighted", "score_worst", "score_unseen")
"""Fields of RoundRecord that hold the primary metric, whose name stands for "score" in files."""


def _alias_of_classification(field: str) -> property:
    """Name of a score in records of classification; None in those of other tasks."""
    return property(lambda record: getattr(record, field) if record.metric == ACCURACY else None)


@dataclass(frozen=True)
class RoundRecord:
    """One line of rounds.jsonl. Scores are values of the primary metric, None in a round without evaluation."""

    round: int
    losses: dict[str, float]
    scores: dict[str, float] | None
    """By domain, where the test examples define one."""
    score_mean: float | None
    score_weighted: float | None
    """Of the test examples of all domains together."""
    score_worst: float | None
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: dict[str, float]
    dropped: dict[str, str]
    validation: dict[str, float] | None = None
    """Score by domain on the examples that were set aside to pick the best round on."""
    risk: dict[str, float] | None = None
    """Mean loss by domain on its test examples, where a round was evaluated."""
    unseen: list[str] | None = None
    """Domains of `scores` that no client trains on, if any. The other means and the worst leave them out."""
    score_unseen: float | None = None
    """The plain mean over them."""
    epsilon: float | None = None
    """Differential privacy of all rounds so far, at `privacy.delta`; None where no noise is added."""
    metrics: dict[str, dict[str, float]] | None = None
    """Further metrics of the task by name and domain."""
    metric: Metric = ACCURACY
    """The primary metric, which is accuracy if the task is classification."""

    accuracy = _alias_of_classification("scores")
    accuracy_mean = _alias_of_classification("score_mean")
    accuracy_weighted = _alias_of_classification("score_weighted")
    accuracy_worst = _alias_of_classification("score_worst")
    accuracy_unseen = _alias_of_classification("score_unseen")

    def to_values(self) -> dict[str, Any]:
        """Return the fields by their names in files."""
        return {self.metric.name_in_files(name): value for name, value in asdict(self).items()}

    def describe_scores(self) -> str:
        """Describe the mean, the worst and the unseen score in a line; empty without evaluation."""
        title = "acc" if self.metric == ACCURACY else self.metric.title
        scores = {title: self.score_mean, "worst": self.score_worst, "unseen": self.score_unseen}
        return ", ".join(f"{name} {self.metric.show(value)}" for name, value in scores.items() if value is not None)

    @property
    def risk_mean(self) -> float | None:
        """The plain mean over the domains that somebody trains on."""
        seen = [value for domain, value in (self.risk or {}).items() if domain not in (self.unseen or ())]
        return sum(seen) / len(seen) if seen else None


OnNote = Callable[[str], None]
"""Callback for a note to the user."""


class OnProgress(Protocol):
    """Callback for the progress of long work, such as decoding images or measuring distances."""

    def __call__(self, done: int, total: int | None, what: str) -> None: ...


def ignore_progress(*values: object, **named: object) -> None:
    """Discard notes and progress."""
