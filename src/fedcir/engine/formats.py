"""What is relied on in the files of a run folder."""

from typing import Literal, NotRequired, TypedDict


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


class Guarantee(TypedDict):
    """Differential privacy of a run with noise."""

    epsilon: float
    delta: float
    unit: Literal["client", "example"]
    place: Literal["server", "client"]
    adjacency: NotRequired[Literal["zero-out", "replace-one"]]
    """Not in runs of earlier versions, as the next."""
    randomness: NotRequired[Literal["seed", "system"]]


class Summary(TypedDict):
    """What is relied on in summary.json."""

    algorithm: str
    dataset: str
    seed: int
    rounds: int
    final: Scores | None
    best: Scores | None
    cost: dict[str, object]
    privacy: NotRequired[Guarantee]
    model: NotRequired[str]
    """The checksum of model.safetensors, which cannot hold its own: equal models are equal files."""


class Card(TypedDict):
    """What is relied on in the metadata of model.safetensors."""

    classes: list[str]
    model: dict[str, object]
    algorithm: dict[str, object]
