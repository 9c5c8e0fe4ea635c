"""What a site says of itself."""

import json
from dataclasses import asdict, dataclass

from flwr.app import ConfigRecord, Message

from fedcir.config import build
from fedcir.flower.wire import CONFIG, ORDER

MAX_NAME = 200
MAX_INTRODUCTION = 10_000_000
MAX_IMAGES = 1_000_000_000
"""That a site may say it has. Its replies must tell of just as many."""


@dataclass(frozen=True)
class Introduction:
    """What a site says of itself: no image, no name of a file, and how many images it has but not of which class."""

    domain: str
    classes: tuple[str, ...]
    """Those that its images have."""
    train: int
    test: int
    content: str
    """A hash of its data, so that a resumed run does not go on with other data."""
    image_size: int = 0
    channels: int = 0
    validation: int = 0
    """How many images it has set aside to pick the best round on."""
    partition: int = -1
    """Its number, where it holds a share of a dataset that all have."""
    shared: bool = False
    """Whether the classes are those of that dataset, and not its own."""
    versions: str = ""

    @property
    def name(self) -> str:
        """What its client is known by from one connection to the next."""
        return str(self.partition) if self.partition >= 0 else self.domain

    def to_record(self) -> ConfigRecord:
        return ConfigRecord({ORDER: json.dumps(asdict(self))})

    @classmethod
    def from_message(cls, message: Message) -> "Introduction":
        """What a node answered, or ValueError."""
        text = str(message.content.config_records[CONFIG][ORDER])
        if len(text) > MAX_INTRODUCTION:
            raise ValueError("too long")
        made = build(cls, json.loads(text), "introduction")
        if any(len(name) > MAX_NAME or not name.isprintable() for name in (made.domain, made.versions, *made.classes)):
            raise ValueError("a name that cannot be shown")
        if not all(0 <= images <= MAX_IMAGES for images in (made.train, made.test, made.validation)):
            raise ValueError("a number of images that cannot be")
        return made
