"""What is relied on in the files of a run folder."""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from fedcir.config import LARGEST, Between, ModelConfig, build
from fedcir.types import InputError


class Holder(TypedDict):
    """A client in a manifest."""

    id: int
    domain: str
    train: object
    """The names of its samples, or their number where a site does not tell them."""


class Manifest(TypedDict):
    """What is relied on in manifest.json."""

    clients: list[Holder]
    hash: str
    test: NotRequired[dict[str, list[str]]]


class Scores(TypedDict):
    round: int
    accuracy_mean: float | None
    accuracy_weighted: float | None
    accuracy_worst: float | None
    accuracy: dict[str, float]
    accuracy_unseen: NotRequired[float | None]


class Guarantee(TypedDict):
    """Differential privacy of a run with noise."""

    epsilon: float
    delta: float
    unit: Literal["client", "example"]
    place: Literal["server", "client"]
    adjacency: NotRequired[Literal["zero-out", "replace-one"]]
    """Not in runs of earlier versions, as the next."""
    randomness: NotRequired[Literal["seed", "system"]]


class SavedModel(TypedDict):
    """Which round's model a run saved."""

    round: int
    keep: Literal["last", "best"]


class Cost(TypedDict):
    peak_memory: NotRequired[int]


class Summary(TypedDict):
    """What is relied on in summary.json."""

    algorithm: str
    dataset: str
    seed: int
    rounds: int
    final: Scores | None
    best: Scores | None
    cost: Cost
    saved: NotRequired[SavedModel]
    """Not in runs of earlier versions, which saved the last round's."""
    privacy: NotRequired[Guarantee]
    model: NotRequired[str]
    """The checksum of model.safetensors, which cannot hold its own: equal models are equal files."""


def check_summary(summary: Mapping[str, Any]) -> None:
    """Refuse accuracies that are not fractions."""
    for part in ("final", "best"):
        scores = summary[part] or {"accuracy": {}}
        means = {name: value for name, value in scores.items() if name.startswith("accuracy_")}
        for name, value in {**means, **scores["accuracy"]}.items():
            if value is not None:
                Between(0, 1).check(f"{part}.{name}", value)


class CardMethod(TypedDict):
    name: str


class Card(TypedDict):
    """What is relied on in the metadata of model.safetensors."""

    classes: list[str]
    model: dict[str, object]
    algorithm: CardMethod
    image_size: NotRequired[int]
    channels: NotRequired[int]
    mean: NotRequired[list[float]]
    std: NotRequired[list[float]]
    saved: NotRequired[SavedModel]


IMAGES = ("image_size", "channels", "mean", "std")
"""Fields of a card of a model on images; runs of fedcir.train have none of them."""


def check_card(card: Mapping[str, Any]) -> None:
    """Refuse a card whose values are of the right types, but not those of any model."""
    if len(set(card["classes"])) < max(1, len(card["classes"])):
        raise InputError("card.classes must name each class once, and at least one")
    given = [name for name in IMAGES if name in card]
    if not given:
        return
    if missing := sorted(set(IMAGES) - set(given)):
        raise InputError(f"card.{missing[0]} is missing")
    for name in ("image_size", "channels"):
        Between(1, LARGEST).check(f"card.{name}", card[name])
    for name, between in (("mean", Between(-1_000, 1_000)), ("std", Between(0, 1_000, above=True))):
        if len(card[name]) != card["channels"]:
            raise InputError(f"card.{name} must have a number for each of {card['channels']} channels")
        for value in card[name]:
            between.check(f"card.{name}", value)
    build(ModelConfig, card["model"], "card.model")
