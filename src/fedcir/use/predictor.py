"""Predictor: images in, classes with probabilities out."""

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fedcir.config import Between, cores
from fedcir.runs.run import Source
from fedcir.types import InputError
from fedcir.use.pictures import Pixels, one_by_one, read_file, squared
from fedcir.use.trained import BATCH, Given, Trained, open_trained

UNFAMILIAR = 0.9
"""From this value of `unlike` on, check an image by eye: one in ten of the images set aside in training has it."""


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image."""

    label: str
    """The most probable class."""
    probability: float
    unlike: float
    """From 0 to 1, the share of the images set aside in training that are less unlike anything seen.

    From 0.9 on (`UNFAMILIAR`), do not trust the class without a look at the image.
    """
    top: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities, the first of which is `label`."""


class Predictor:
    """The model of a finished run, ready to use: `Predictor("runs/mine")(images)`.

    `site` names a domain where each client has a part of the model for itself. A run of an algorithm of your own needs
    it as `algorithm`. With `trust_code`, code that the run names may run. Each prediction lists the `top` most probable
    classes.
    """

    def __init__(
        self,
        path: Source,
        *,
        site: str | None = None,
        algorithm: Given | None = None,
        device: str = "auto",
        top: int = 3,
        batch_size: int = BATCH,
        trust_code: bool = False,
    ) -> None:
        Between(1, 1_000_000).check("top", top)
        Between(1, 65_536).check("batch_size", batch_size)
        self.trained: Trained = open_trained(path, site=site, algorithm=algorithm, device=device, trust_code=trust_code)
        self.top, self.batch_size = top, batch_size

    @property
    def classes(self) -> tuple[str, ...]:
        return self.trained.classes

    @property
    def calibrated(self) -> bool:
        """Whether the clients set images aside, from which a temperature was fitted."""
        return self.trained.calibrated

    def __call__(self, images: Any) -> list[Prediction]:
        """Of PIL images, arrays (H, W, 3) of bytes or paths, in a list; of a batch (N, H, W, 3); or of a single one."""
        size, channels = self.trained.size, self.trained.channels

        def read(picture: Any) -> Pixels:
            if not isinstance(picture, str | Path):
                return squared(picture, size, channels)
            pixels = read_file(str(picture), size, channels)
            if isinstance(pixels, str):
                raise InputError(f"cannot read {picture}: {pixels}")
            return pixels

        return [each for _, each in self._predicted(one_by_one(images), read) if isinstance(each, Prediction)]

    def files(self, paths: Iterable[str]) -> Iterator[tuple[str, Prediction | str]]:
        """Of files, a batch at a time: each with its prediction, or with what is wrong with it."""
        size, channels = self.trained.size, self.trained.channels
        yield from self._predicted(paths, lambda path: read_file(path, size, channels))

    def _predicted(self, pictures: Iterable[Any], read: Any) -> Iterator[tuple[Any, Prediction | str]]:
        """One batch is predicted while threads read the next."""
        left = iter(pictures)
        with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
            warnings.simplefilter("ignore")  # large images are welcome, and odd metadata does no harm
            ready: list[tuple[Any, Future[Pixels | str]]] = []
            try:
                while some := list(islice(left, self.batch_size)):
                    coming = [(picture, pool.submit(read, picture)) for picture in some]
                    yield from self._batch(ready)
                    ready = coming
                yield from self._batch(ready)
            finally:
                pool.shutdown(cancel_futures=True)  # after Ctrl-C nobody waits for the rest

    def _batch(self, ready: list[tuple[Any, "Future[Pixels | str]"]]) -> list[tuple[Any, Prediction | str]]:
        given = [(picture, future.result()) for picture, future in ready]
        pixels = [each for _, each in given if not isinstance(each, str)]
        said = iter(self._of_pixels(np.stack(pixels)) if pixels else ())
        return [(picture, each if isinstance(each, str) else next(said)) for picture, each in given]

    def _of_pixels(self, pixels: Pixels) -> list[Prediction]:
        probabilities, unlike = self.trained.judged(pixels)
        values, places = probabilities.topk(min(self.top, len(self.classes)), dim=-1)
        found = []
        for some, which, share in zip(values.tolist(), places.tolist(), unlike.tolist(), strict=True):
            top = tuple((self.classes[place], value) for place, value in zip(which, some, strict=True))
            found.append(Prediction(*top[0], share, top))
        return found
