"""A site's own rules, in a file that no server can change: what a run may ask of the site, and what may leave it.

They bind fedcir's own app. They do not bind another app that a server may send instead: that is code.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcir.config import PrivacyConfig, build, read_toml
from fedcir.data.catalogue import IMAGE_SIZE, named_classes
from fedcir.data.federation import Client
from fedcir.flower.wire import Order
from fedcir.types import InputError


class Refused(InputError):
    """A site's policy does not allow what a run asks for."""


@dataclass(frozen=True)
class PrivacyRules:
    """What protects an upload before it leaves the site. With this table, nothing leaves without clipping and noise."""

    min_noise: float | None = None
    """The least noise, in multiples of the clip (privacy.noise)."""
    max_clip: float | None = None
    """The largest norm of a change to the model (privacy.clip)."""
    unit: Literal["client", "example"] = "example"
    """What must be protected: all data of the site, or at least each image."""
    place: Literal["client", "server"] = "client"
    """Who must add the noise: the site itself, or else the server, which must then be trusted."""
    max_epsilon: float | None = None
    """The largest epsilon of all uploads of this site, over all runs. The site counts it in its state folder."""
    delta: float = 1e-5
    """Probability with which max_epsilon may fail to hold."""

    def __post_init__(self) -> None:
        for name in ("min_noise", "max_clip", "max_epsilon"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise InputError(f"policy.privacy.{name} must be above 0, got {value}")
        if not 0 < self.delta < 1:
            raise InputError(f"policy.privacy.delta must be between 0 and 1, got {self.delta}")
        if self.max_epsilon is not None and self.place == "server":
            raise InputError(
                "policy.privacy.max_epsilon counts noise that the site adds: leave it out, or set place to client"
            )

    def check(self, privacy: PrivacyConfig) -> None:
        """Refuse privacy settings of a run that protect less."""
        if privacy.clip is None or not privacy.noise:
            raise _refusal("asks for privacy.clip and privacy.noise", "its table [privacy] lets nothing else leave")
        if self.place == "client" and privacy.by_server:
            raise _refusal("does not allow privacy.place=server", "the site itself must add the noise")
        if self.unit == "client" and privacy.unit == "example":
            raise _refusal("does not allow privacy.unit=example", "it protects all data of the site")
        if self.min_noise is not None and privacy.noise < self.min_noise:
            raise _refusal(f"does not allow privacy.noise={privacy.noise:g}", f"it asks for at least {self.min_noise}")
        if self.max_clip is not None and privacy.clip > self.max_clip:
            raise _refusal(f"does not allow privacy.clip={privacy.clip:g}", f"it allows at most {self.max_clip}")


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
    min_steps: int = 1
    """The fewest local steps of a round: one step uploads the gradient of its images."""
    min_batch_size: int = 1
    """The fewest images of a step, and to train on."""
    max_image_size: int | None = None
    """The largest width and height of an image, in pixels."""
    min_per_class: int = 1
    """The fewest images of each class, among those to train, to validate and to test on, before anything is shared."""
    never_send: tuple[str, ...] = ()
    """Tensors that never leave the site, by the beginning of their names, such as "prototypes/" or "model/head."."""
    privacy: PrivacyRules | None = None
    """Differential privacy that the site asks for."""

    def __post_init__(self) -> None:
        positive = ("max_rounds", "max_steps", "max_batch_size", "max_image_size")
        for name in (*positive, "min_steps", "min_batch_size", "min_per_class"):
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
        for what, number, least in (
            ("local.steps", config.local.steps, self.min_steps),
            ("local.batch_size", config.local.batch_size, self.min_batch_size),
        ):
            if number < least:
                raise _refusal(f"does not allow {what}={number}", f"it asks for at least {least}")
        if self.privacy is not None:
            self.privacy.check(config.privacy)

    def narrowed(self, order: Order) -> Order:
        """The order with the classes that the policy allows, if it names none itself."""
        return order if self.classes is None or _classes(order) else replace(order, classes=self.classes)

    def shown(self, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes of this site that a server may hear of."""
        return tuple(name for name in classes if self.classes is None or name in self.classes)

    def check_data(self, client: Client) -> None:
        """Refuse to share anything if there are too few images. The server is not told of which class, nor how many."""
        if client.train is not None:
            self.check_images(len(client.train))
        if self.min_per_class > 1:  # it may take long to read labels
            parts = {"train": client.train, "validate": client.validation, "test": client.test}
            self.check_labels({what: data.labels().numpy() for what, data in parts.items() if data is not None})

    def check_images(self, images: int) -> None:
        """Refuse to train on fewer images than a step must have."""
        if images < self.min_batch_size:
            rule = f"min_batch_size is {self.min_batch_size}, and there are {images} to train on"
            raise _refusal("asks for more images to train on than the run leaves", rule)

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
        """The rules that limit something, as they are written."""
        rules = {"allow": self.allow, **_given(self)}
        if (privacy := rules.pop("privacy", None)) is not None:
            rules |= {f"privacy.{name}": value for name, value in {"place": privacy.place, **_given(privacy)}.items()}
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in rules.items())


def _given(rules: Policy | PrivacyRules) -> dict[str, Any]:
    """The fields of a table that differ from their defaults."""
    return {
        field.name: getattr(rules, field.name) for field in fields(rules) if getattr(rules, field.name) != field.default
    }


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
