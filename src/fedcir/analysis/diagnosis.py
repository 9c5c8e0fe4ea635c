"""What was found of one dataset or one run, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.alignment import Alignment
from fedcir.analysis.bootstrap import Interval, mean_of
from fedcir.analysis.bound import Bound
from fedcir.analysis.divergence import Divergences
from fedcir.analysis.metrics import auc, confusion, f1, macro_f1, sensitivity, specificity
from fedcir.analysis.views import View

UNTRAINED = "an untrained encoder"


@dataclass(frozen=True)
class Pixels:
    """A domain's images before any network: brightness and contrast from 0 to 1."""

    brightness: float
    contrast: float


@dataclass(frozen=True)
class Diagnosis:
    """What was found of one dataset or one run."""

    name: str
    classes: tuple[str, ...]
    views: list[View]
    """Of a run, all test images, as its accuracies are; of data before any, a sample of the training images."""
    apart: Divergences
    """Without any pair where the network gives no representations."""
    labels: dict[str, NDArray[np.int64]]
    """How many training images of each class every client has. A client that has a domain to itself has its name."""
    pixels: dict[str, Pixels] | None = None
    """Of data before any training."""
    bound: Bound | None = None
    """Of a run with one model for all, where distances could be measured."""
    aligned: Alignment | None = None
    encoder: str = UNTRAINED
    """What gave the representations, in words."""
    is_shift: bool = False
    """Whether distances are the measure of feature shift that `init`, `recommend` and `diagnose` share."""
    notes: tuple[str, ...] = ()
    """What its reader should know of the data."""
    seed: int = 0
    domain_of: dict[str, str] = field(default_factory=dict)
    """The domain of every client that has labels."""
    sample: list[View] = field(default_factory=list)
    """The images that distances, KL and pictures are of: at most so many of each domain."""
    unseen: tuple[str, ...] = ()
    """The domains that nobody trains on."""

    @property
    def of_run(self) -> bool:
        """Whether it is of a run, and not of data before any."""
        return self.pixels is None

    @property
    def measured(self) -> bool:
        """Whether there are distances."""
        return bool(self.apart.pairs)

    @property
    def unmeasured(self) -> str:
        """Why there are no distances, where there are none."""
        return "" if self.measured else "its network has no part `encoder` that returns (batch, features)"

    @property
    def told(self) -> tuple[str, ...]:
        """The notes, and why there are no distances, where there are none."""
        return self.notes if self.measured else (*self.notes, f"no distances for {self.name}: {self.unmeasured}")

    @property
    def domains(self) -> list[str]:
        return [view.domain for view in self.views]

    @property
    def seen(self) -> list[View]:
        """The domains that somebody trains on."""
        return [view for view in self.views if view.domain not in self.unseen]

    @property
    def skew(self) -> dict[str, float]:
        """Each client's total variation to the mean distribution of training labels, from 0 to 1."""
        return total_variation(self.labels)

    @property
    def test_skew(self) -> dict[str, float]:
        """The same of each domain's test labels, which the distances are subject to."""
        counts = {v.domain: np.bincount(v.labels, minlength=len(self.classes)) for v in self.views}
        return total_variation(counts)

    @property
    def shared(self) -> bool:
        """Whether clients are not the domains: several share one and its test images, or hold several."""
        return any(client != domain for client, domain in self.domain_of.items())

    @property
    def furthest(self) -> str:
        """The client that is furthest from the mixture."""
        return max(self.apart.to_mixture, key=lambda name: self.apart.to_mixture[name].value)

    @property
    def accuracy(self) -> dict[str, Interval]:
        return {v.domain: mean_of({v.domain: v.predicted == v.labels}, self.seed) for v in self.views}

    @property
    def mean_accuracy(self) -> Interval:
        """Over the domains that somebody trains on."""
        return mean_of({v.domain: v.predicted == v.labels for v in self.seen}, self.seed)

    @property
    def risk(self) -> dict[str, Interval]:
        return {v.domain: mean_of({v.domain: v.losses}, self.seed) for v in self.views}

    @property
    def recall(self) -> NDArray[np.float64]:
        """Classes by domains: the share that is right, and nan where there are not two test images of a class."""
        counts = np.stack([self.confusion(domain) for domain in self.domains], axis=-1)  # (C, C, domains)
        there = counts.sum(axis=1)
        right = np.einsum("iid->id", counts)
        return np.where(there > 1, right / np.maximum(there, 1), np.nan)

    def confusion(self, domain: str) -> NDArray[np.int64]:
        """Classes by classes: what is there, and what it was taken for."""
        view = next(view for view in self.views if view.domain == domain)
        return confusion(view.labels, view.predicted, len(self.classes))

    def beside_accuracy(self, domain: str) -> dict[str, float]:
        """Of two classes AUC, F1, sensitivity and specificity, with the second as positive; else macro F1."""
        counts = self.confusion(domain)
        if len(self.classes) > 2:
            return {"macro F1": macro_f1(counts)}
        view = next(view for view in self.views if view.domain == domain)
        found = {"AUC": auc(view.labels == 1, view.log_odds), "F1": f1(counts)}
        return {**found, "sensitivity": sensitivity(counts), "specificity": specificity(counts)}

    def mistaken(self, most: int = 3) -> list[str]:
        """The commonest mistakes, by domain and class, of classes with two test images there at least."""
        wrong = []
        for domain in self.domains:
            counts = self.confusion(domain)
            there = counts.sum(axis=1)
            np.fill_diagonal(counts, 0)
            for true, taken in np.argwhere(counts):
                if there[true] > 1:
                    some = f"{counts[true, taken]} of {there[true]}"
                    text = f"{self.classes[true]} for {self.classes[taken]} in {domain} ({some})"
                    wrong.append((counts[true, taken] / there[true], counts[true, taken], text))
        return [text for *_, text in sorted(wrong, key=lambda each: (-each[0], -each[1]))[:most]]


def total_variation(labels: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
    """How much of each one's labels would have to be others for it to be as the mean is."""
    shares = {name: counts / counts.sum() for name, counts in labels.items()}
    mean = np.mean(list(shares.values()), axis=0)
    return {name: float(np.abs(share - mean).sum() / 2) for name, share in shares.items()}
