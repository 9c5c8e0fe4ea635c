"""The few types that everything else is written in. State is a value: take one, return a new one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that settings and errors do not wait for it
    import torch
    from torch import Tensor, nn

Arrays = dict[str, "Tensor"]
"""A bag of named tensors, shaped like a state_dict; on the CPU wherever it crosses a boundary."""

Groups = dict[str, Arrays]
"""Named bags: "model", "generator", "gaussians", "prototypes"."""

Modules = dict[str, "nn.Module"]
"""What an algorithm builds once per process; arrays are loaded into it and read out of it."""


def _line(text: str) -> str:
    """Text with names from anywhere as one line that a terminal can show."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


class FedcirError(Exception):
    """An error that ends a task with one line, which names the value and the fix."""

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(_line(message))
        self.public = public
        """The same without names of files or images, which a site may tell the server; empty if there is none."""


class InputError(FedcirError, ValueError):
    """What the user gave is wrong."""


class RunError(FedcirError, RuntimeError):
    """What the user gave may be right, but a run went wrong."""


@dataclass(frozen=True)
class ServerState:
    """All that a run is between two rounds."""

    round: int
    shared: Groups
    """The broadcast: nothing else reaches a client."""
    private: Groups = field(default_factory=dict)
    """What stays on the server, such as the state of its optimisers, or one for each client under a name of its own."""


@dataclass(frozen=True)
class ClientReply:
    """What one client sends back from training or from evaluation."""

    client_id: int
    num_examples: int
    arrays: Groups
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Dropped:
    """A client of the cohort whose reply could not be used, and why."""

    client_id: int
    reason: str


def _no_labels() -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.int64)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class LocalContext:
    """What a client knows in a round beside its own data."""

    round: int
    total_rounds: int
    num_classes: int
    batch_size: int
    received: Groups
    rng: torch.Generator
    kept: Groups = field(default_factory=dict)
    """What `local_finish` gave when this client last trained; empty before that."""
    steps: int = 0
    """SGD steps of a client in this round."""
    lr: float = 0.0
    """Their learning rate."""
    momentum: float = 0.0
    """Their momentum, which starts at zero."""
    labels: Callable[[], Tensor] = _no_labels
    """Those of the client's training set, (N,), read only when asked for."""
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = _cross_entropy
    """Of logits (B, C) on the client's own data and their labels; corrected as local.prior or local.balance says."""

    @cached_property
    def class_counts(self) -> Tensor:
        """The client's training samples by class, (C,). They stay with it unless the method sends them."""
        return self.labels().bincount(minlength=self.num_classes)


@dataclass(frozen=True)
class ServerContext:
    """What the server knows in a round beside its state and the replies."""

    round: int
    total_rounds: int
    num_classes: int
    batch_size: int
    weighting: str
    batchnorm: str
    rng: torch.Generator
    clients: int = 0
    """How many clients train in this run; in a round only some of them may reply."""
    sent: Groups = field(default_factory=dict)
    """What this round's clients were sent."""
    aggregation: str = "mean"
    """How replies become one model; what follows are settings of its forms."""
    trim: float = 0.25
    byzantine: int | None = None
    clip: float | None = None


@dataclass(frozen=True)
class Losses:
    """The weighted total that is minimised, and its terms by name, unweighted."""

    total: Tensor
    terms: Arrays


@dataclass(frozen=True)
class RoundRecord:
    """One line of rounds.jsonl. Accuracies are fractions, None in a round without evaluation."""

    round: int
    losses: dict[str, float]
    accuracy: dict[str, float] | None
    accuracy_mean: float | None
    accuracy_weighted: float | None
    accuracy_worst: float | None
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: dict[str, float]
    dropped: dict[str, str]
    validation: dict[str, float] | None = None
    """Accuracy by domain on the images that were set aside to pick the best round on."""
    risk: dict[str, float] | None = None
    """Mean loss by domain on its test images, where a round was evaluated."""
    unseen: list[str] | None = None
    """The domains of `accuracy` that nobody trains on, if any. The other means and the worst leave them out."""
    accuracy_unseen: float | None = None
    """The plain mean over them."""
    epsilon: float | None = None
    """Differential privacy of all rounds so far, at `privacy.delta`; None where no noise is added."""

    @property
    def risk_mean(self) -> float | None:
        """The plain mean over the domains that somebody trains on."""
        seen = [value for domain, value in (self.risk or {}).items() if domain not in (self.unseen or ())]
        return sum(seen) / len(seen) if seen else None
