"""Do clients differ, where, and did training close the gap: numbers first, then the words that they support."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcir.analysis.alignment import Alignment, alignment, gaussians_of
from fedcir.analysis.bound import Bound, bound
from fedcir.analysis.divergence import Divergences, divergences
from fedcir.analysis.views import View, views_of, views_of_run
from fedcir.config import Config
from fedcir.federation import deal, federation_from
from fedcir.records import RunFolder
from fedcir.types import InputError

SHIFT = ((0.5, "small"), (1.2, "moderate"), (2.01, "large"))
"""Words for a proxy A-distance."""
SKEW = ((0.1, "small"), (0.3, "moderate"), (1.01, "large"))
"""Words for a total variation between label distributions."""


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
    apart: Divergences
    labels: dict[str, NDArray[np.int64]]
    """How many test images of each class every domain has."""
    pixels: dict[str, Pixels] | None = None
    """Of data before any training."""
    bound: Bound | None = None
    """Of a run."""
    aligned: Alignment | None = None

    @property
    def skew(self) -> dict[str, float]:
        """Each domain's total variation to the mean label distribution, from 0 to 1."""
        shares = {domain: counts / counts.sum() for domain, counts in self.labels.items()}
        mean = np.mean(list(shares.values()), axis=0)
        return {domain: float(np.abs(share - mean).sum() / 2) for domain, share in shares.items()}

    @property
    def furthest(self) -> str:
        """The client that is furthest from the mixture."""
        return max(self.apart.to_mixture, key=lambda name: self.apart.to_mixture[name].value)

    def confusion(self, domain: str) -> NDArray[np.int64]:
        """Classes by classes: what is there, and what it was taken for."""
        view = next(view for view in self.views if view.domain == domain)
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (view.labels, view.predicted), 1)
        return counts

    def mistaken(self, most: int = 3) -> list[str]:
        """The commonest mistakes, by domain and class."""
        wrong = []
        for view in self.views:
            counts = self.confusion(view.domain)
            np.fill_diagonal(counts, 0)
            for true, taken in np.argwhere(counts):
                share = counts[true, taken] / max(1, self.labels[view.domain][true])
                wrong.append((share, f"{self.classes[true]} for {self.classes[taken]} at {view.domain} ({share:.0%})"))
        return [text for _, text in sorted(wrong, key=lambda each: -each[0])[:most]]


def same_data(folders: Sequence[RunFolder]) -> None:
    """Refuse to compare runs on different data."""
    names = {folder.path: folder.manifest().get("hash") for folder in folders}
    if len(set(names.values())) > 1:
        one, other = folders[0], next(f for f in folders if names[f.path] != names[folders[0].path])
        raise InputError(
            f"{one.path} ({one.config().data.name}) and {other.path} ({other.config().data.name}) ran on different "
            "data, seeds or clients: compare runs of one seed on the same"
        )


def diagnose_data(config: Config, limit: int | None = None) -> Diagnosis:
    """Data before any training, under an encoder that has learned nothing (or model.weights)."""
    domains, shares = deal(config)
    federation = federation_from(config, domains, shares)
    views = list(views_of(federation.task.classifier(), federation, limit, config.run.seed))
    pixels = {}
    for domain in domains:
        some = domain.test.pixels(np.arange(min(len(domain.test), 256))) / 255
        pixels[domain.name] = Pixels(float(some.mean()), float(some.std(axis=(1, 2, 3)).mean()))
    apart = divergences({view.domain: view.z for view in views}, config.run.seed)
    return Diagnosis(config.data.name, domains.classes, views, apart, _labels(views, len(domains.classes)), pixels)


def diagnose_run(folder: RunFolder, data_root: str | None = None, limit: int | None = None) -> Diagnosis:
    """A finished run's model on the images that it was tested on."""
    views = views_of_run(folder, data_root, limit)
    classes = tuple(folder.classes())
    apart = divergences({view.domain: view.z for view in views}, folder.config().run.seed)
    gaussians = gaussians_of(folder)
    aligned = None if gaussians is None else alignment(views, gaussians)
    labels = _labels(views, len(classes))
    return Diagnosis(folder.path.name, classes, views, apart, labels, None, bound(views, apart), aligned)


def verdict(found: Diagnosis, other: Diagnosis | None = None) -> list[str]:
    """Sentences, each with the numbers it rests on. `other` is a second run that the first is compared with."""
    shift, skew = found.apart.mean_pair, max(found.skew.values())
    far = found.apart.to_mixture[found.furthest]
    under = "an untrained encoder" if found.bound is None else "its model"
    said = [
        f"Feature shift is {_word(shift, SHIFT)}: under {under} two clients have a proxy A-distance of {shift:.2f} on "
        "average, where 0 cannot be told apart and 2 always can.",
        f"Label skew is {_word(skew, SKEW)}: up to {skew:.0%} of a client's labels are not as the mean has them.",
        f"Furthest from the mixture of all is {found.furthest}: {far.value:.2f} ({far.low:.2f} to {far.high:.2f}).",
    ]
    if skew >= SKEW[0][0]:
        said.append("Where labels are skewed, part of the distance is theirs and not the images'.")
    if found.bound is not None:
        worst = min(found.views, key=lambda view: view.accuracy)
        said.append(
            f"Least accurate is {worst.domain}: {worst.accuracy:.1%}. The two terms of the bound: average risk "
            f"{found.bound.risk:.3f}, divergence to the mixture {found.bound.divergence:.2f}."
        )
    if other is not None:
        said += _compared(found, other)
    return said


def _compared(found: Diagnosis, other: Diagnosis) -> list[str]:
    before, after = found.apart.pairs, other.apart.pairs
    nearer = sum(after[pair].value < before[pair].value for pair in before)
    change = other.apart.mean_pair - found.apart.mean_pair
    apart = [pair for pair in before if after[pair].high < before[pair].low or after[pair].low > before[pair].high]
    sure = f"{len(apart)} of them beyond their intervals" if apart else "none of them beyond its interval"
    way = "nearer" if change < 0 else "further apart"
    accuracy = [float(np.mean([view.accuracy for view in each.views])) for each in (found, other)]
    return [
        f"From {found.name} to {other.name} clients are {way} by {abs(change):.2f}: {nearer} of {len(before)} pairs "
        f"came nearer, {sure}.",
        f"Mean accuracy went from {accuracy[0]:.1%} to {accuracy[1]:.1%}.",
    ]


def _labels(views: Sequence[View], classes: int) -> dict[str, NDArray[np.int64]]:
    return {view.domain: np.bincount(view.labels, minlength=classes) for view in views}


def _word(value: float, words: Sequence[tuple[float, str]]) -> str:
    return next(word for below, word in words if value < below)


def as_json(found: Diagnosis) -> dict[str, object]:
    """The numbers for a program."""

    def told(values: Mapping[object, object]) -> dict[str, object]:
        return {"/".join(key) if isinstance(key, tuple) else str(key): vars(value) for key, value in values.items()}

    return {
        "name": found.name,
        "classes": list(found.classes),
        "pad": {"pairs": told(found.apart.pairs), "to_mixture": told(found.apart.to_mixture)},  # type: ignore[arg-type]
        "mean_pair": found.apart.mean_pair,
        "label_skew": found.skew,
        "pixels": None if found.pixels is None else told(found.pixels),  # type: ignore[arg-type]
        "accuracy": None if found.bound is None else {view.domain: view.accuracy for view in found.views},
        "bound": None if found.bound is None else vars(found.bound),
        "alignment": None if found.aligned is None else vars(found.aligned),
        "verdict": verdict(found),
    }
