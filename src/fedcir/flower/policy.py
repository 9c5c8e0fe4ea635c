"""A site's own rules, in a file that no server can change: what a run may ask of the site, and what may leave it.

They bind fedcir's own app. They do not bind another app that a server may send instead: that is code.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcir.config import build, read_toml
from fedcir.data.catalogue import IMAGE_SIZE, named_classes
from fedcir.data.federation import Client
from fedcir.flower.wire import Order
from fedcir.types import InputError


class Refused(InputError):
    """A site's policy does not allow what a run asks for."""


@dataclass(frozen=True)
class Policy:
    """What a run may ask of a site. What is not given is not limited."""

    allow: bool = True
    """With false, the site takes part in no run."""
    veto: str | None = None
    """A file: while it exists, the site takes part in no run."""
    algorithms: tuple[str, ...] | None = None
    """The methods that a run may use, by name."""
    models: tuple[str, ...] | None = None
    """The networks that a run may use, by name."""
    classes: tuple[str, ...] | None = None
    """The classes that a run may use; the site names no other."""
    max_rounds: int | None = None
    """The most rounds of a run."""
    max_steps: int | None = None
    """The most local steps of a round."""
    max_batch_size: int | None = None
    """The most images of a step."""
    max_image_size: int | None = None
    """The largest width and height of an image, in pixels."""
    min_per_class: int = 1
    """The fewest images of each class, among those to train, to validate and to test on, before anything is shared."""
    never_send: tuple[str, ...] = ()
    """Tensors that never leave the site, by the beginning of their names, such as "prototypes/" or "model/head."."""

    def __post_init__(self) -> None:
        for name in ("max_rounds", "max_steps", "max_batch_size", "max_image_size", "min_per_class"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"policy.{name} must be at least 1, got {value}")

    def check_order(self, order: Order) -> None:
        """Refuse a run before anything is opened for it."""
        if not self.allow:
            raise _refusal("takes part in no run", "allow is false")
        if self.veto is not None and Path(self.veto).expanduser().exists():
            raise _refusal("takes part in no run", f"{self.veto} exists")
        config, asked = order.config, _classes(order)
        names = [("algorithm.name=", Path(config.algorithm.name).name, self.algorithms)]
        names += [("model.name=", config.model.name, self.models)]
        names += [("the class ", name, self.classes) for name in asked]
        for what, name, allowed in names:
            if allowed is not None and name not in allowed:
                raise _refusal(f"does not allow {what}{name}", f"it allows {', '.join(allowed) or 'none'}")
        for what, number, most in (
            ("server.rounds", max(config.server.rounds, order.round), self.max_rounds),
            ("local.steps", config.local.steps, self.max_steps),
            ("local.batch_size", config.local.batch_size, self.max_batch_size),
            ("data.image_size", config.data.image_size or IMAGE_SIZE, self.max_image_size),
        ):
            if most is not None and number > most:
                raise _refusal(f"does not allow {what}={number}", f"it allows at most {most}")

    def narrowed(self, order: Order) -> Order:
        """The order with the classes that the policy allows, if it names none itself."""
        return order if self.classes is None or _classes(order) else replace(order, classes=self.classes)

    def shown(self, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes of this site that a server may hear of."""
        return tuple(name for name in classes if self.classes is None or name in self.classes)

    def check_data(self, client: Client) -> None:
        """Refuse to share anything if a class has too few images. The server is not told which, nor how many."""
        if self.min_per_class > 1:  # it may take long to read labels
            parts = {"train": client.train, "validate": client.validation, "test": client.test}
            self.check_labels({what: data.labels().numpy() for what, data in parts.items() if data is not None})

    def check_labels(self, parts: Mapping[str, NDArray[np.int64]]) -> None:
        """The same for the labels of the images to train on and of others."""
        for what, labels in parts.items():
            fewest = min(Counter(labels.tolist()).values(), default=self.min_per_class)
            if fewest < self.min_per_class:
                rule = f"it asks for {self.min_per_class} of each class to {what} on, and one class has {fewest}"
                raise _refusal("asks for more images of each class than the site has", rule)

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse to send any of these tensors, `group/name`, or a whole group, `group/`."""
        for name in names:
            if any(name.startswith(rule) for rule in self.never_send):
                raise _refusal(f"never sends {name}", f"never_send is {', '.join(self.never_send)}")

    def __str__(self) -> str:
        rules = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in rules.items() if value not in (None, ()))


def read_policy(path: str) -> Policy:
    """The policy in a file, or one without limits if there is no path. A file that cannot be read allows nothing."""
    if not path:
        return Policy()
    try:
        return build(Policy, read_toml(Path(path).expanduser()), "policy")
    except InputError as error:
        raise Refused(str(error), public="its policy cannot be read") from error


def _refusal(public: str, because: str) -> Refused:
    """The server hears what is refused; only the site's own log has the rule."""
    return Refused(f"this site's policy {public}: {because}", public=f"its policy {public}")


def _classes(order: Order) -> tuple[str, ...]:
    """Those that the server names."""
    return (*order.classes, *named_classes(order.config.data))
