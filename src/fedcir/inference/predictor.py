"""Predictor: images in, classes with probabilities out."""

import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcir.data.decoding import MODES, SUFFIXES, Decoding, decode_file, to_square
from fedcir.data.domains import Split
from fedcir.data.sources.folders import open_folder
from fedcir.errors import InputError
from fedcir.inference.adaptation import MAX_IMAGES, SiteEstimate, adapt_model
from fedcir.inference.model import BATCH, AlgorithmChoice, open_model
from fedcir.machine import count_cores
from fedcir.runs.evaluation_data import sample_rows
from fedcir.runs.reader import RunSource
from fedcir.validation import Between

Pixels = NDArray[np.uint8]


def files_in(paths: Iterable[str | Path]) -> list[str]:
    """List files, and the images in folders at any depth except hidden ones.

    A file that is given by name need not look like an image.
    """
    files: list[str] = []
    for path in map(str, paths):
        if os.path.isdir(path):
            inside = [os.path.join(path, name) for name in open_folder(path).images()]
            if not inside:
                raise InputError(f"{path} holds no images; they end in {', '.join(SUFFIXES)}")
            files += inside
        elif os.path.exists(path):
            files.append(path)
        else:
            raise InputError(f"there is no file or folder {path}")
    return files


def read_file(path: str, size: int, channels: int) -> Pixels | str:
    """A file's square (H, W, C), or what is wrong with the file."""
    if not os.path.exists(path):
        return "there is no such file"
    if os.path.isfile(path) and not os.path.getsize(path):
        return "it is empty"
    look, pixels = decode_file(path, Decoding(size, _check_channels(channels)))
    return look.error or np.frombuffer(pixels, np.uint8).reshape(size, size, channels)


def to_pixels(picture: Any, size: int, channels: int) -> Pixels:
    """Convert an image or array to a square (H, W, C)."""
    if isinstance(picture, np.ndarray):
        grey = picture[..., 0] if picture.ndim == 3 and picture.shape[-1] == 1 else picture
        if picture.dtype != np.uint8 or grey.ndim not in (2, 3) or (grey.ndim == 3 and grey.shape[-1] not in (3, 4)):
            raise InputError(f"an array must be uint8 of (H, W, 3) or (H, W), got {picture.dtype}{list(picture.shape)}")
        picture = Image.fromarray(grey)
    if not isinstance(picture, Image.Image):
        raise InputError(f"an image must be a PIL image, an array or a path, got {type(picture).__name__}")
    return np.asarray(to_square(picture, size, _check_channels(channels))).reshape(size, size, channels)


def _check_channels(channels: int) -> int:
    """Refuse a number of channels that no picture has; models of grey images see the brightness of colours."""
    if channels not in MODES:
        raise InputError(f"the model takes images of {channels} channels, which no picture has: use run.model()")
    return channels


UNFAMILIAR = 0.9
"""From this novelty on, check an image by eye: one in ten of the images set aside in training has it."""


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image."""

    label: str
    """The most probable class."""
    probability: float
    novelty: float
    """From 0 to 1, the share of the images set aside in training with a lower novelty score.

    From 0.9 on (`UNFAMILIAR`), do not trust the class without a look at the image.
    """
    top: tuple[tuple[str, float], ...]
    """The most probable classes with their probabilities, the first of which is `label`."""

    @property
    def unlike(self) -> float:
        """The former name of `novelty`, kept for one version."""
        return self.novelty


class Predictor:
    """The model of a finished run, ready to use: `Predictor("runs/mine")(images)`.

    `site` names a domain where each client has a part of the model for itself. A run of an algorithm of your own needs
    it as `algorithm`. With `trust_code`, code that the run names may run. Each prediction lists the `top` most probable
    classes.

    The model is adapted to `site_images`, unlabelled images or folders of a new site. A site that is too unlike those
    of training is refused unless `force` is set; `estimate` says what to expect there.
    """

    def __init__(
        self,
        path: RunSource,
        *,
        site: str | None = None,
        algorithm: AlgorithmChoice | None = None,
        device: str = "auto",
        top: int = 3,
        batch_size: int = BATCH,
        trust_code: bool = False,
        site_images: Iterable[str | Path] | None = None,
        force: bool = False,
    ) -> None:
        Between(1, 1_000_000).check("top", top)
        Between(1, 65_536).check("batch_size", batch_size)
        self.trained = open_model(path, site=site, algorithm=algorithm, device=device, trust_code=trust_code)
        self.top, self.batch_size = top, batch_size
        self.estimate: SiteEstimate | None = None
        if site_images is not None:
            self.trained, self.estimate = adapt_model(self.trained, self._read_site(files_in(site_images)))
            if self.estimate is not None and not force:
                self.estimate.check("the site")

    def _read_site(self, files: list[str]) -> Split:
        """Read a random choice of a site's images. Files that cannot be read are left out unless all are such."""
        files = [files[row] for row in sample_rows(len(files), MAX_IMAGES, 0, "site")]
        with warnings.catch_warnings(), ThreadPoolExecutor(count_cores()) as pool:
            warnings.simplefilter("ignore")
            results = list(pool.map(lambda path: read_file(path, self.trained.size, self.trained.channels), files))
        pixels = [result for result in results if not isinstance(result, str)]
        if not pixels:
            raise InputError(f"none of the {len(files):,} site images can be read, such as {files[0]}: {results[0]}")
        return Split(np.stack(pixels), np.zeros(len(pixels), np.int64), "")

    @property
    def classes(self) -> tuple[str, ...]:
        return self.trained.classes

    @property
    def calibrated(self) -> bool:
        """Whether the clients set images aside, from which a temperature was fitted."""
        return self.trained.calibrated

    def __call__(self, images: Any) -> list[Prediction]:
        """Predict a list of PIL images, byte arrays (H, W, 3) or paths, a batch (N, H, W, 3), or a single image."""
        size, channels = self.trained.size, self.trained.channels

        def read(picture: Any) -> Pixels:
            if not isinstance(picture, str | Path):
                return to_pixels(picture, size, channels)
            pixels = read_file(str(picture), size, channels)
            if isinstance(pixels, str):
                raise InputError(f"cannot read {picture}: {pixels}")
            return pixels

        if isinstance(images, Image.Image | str | Path) or (isinstance(images, np.ndarray) and images.ndim != 4):
            images = [images]
        return [answer for _, answer in self._predict(images, read) if isinstance(answer, Prediction)]

    def files(self, paths: Iterable[str]) -> Iterator[tuple[str, Prediction | str]]:
        """Predict files batch by batch. Yields each path with its prediction, or with its error."""
        size, channels = self.trained.size, self.trained.channels
        yield from self._predict(paths, lambda path: read_file(path, size, channels))

    def _predict(self, pictures: Iterable[Any], read: Any) -> Iterator[tuple[Any, Prediction | str]]:
        """Predict one batch while threads read the next."""
        remaining = iter(pictures)
        with warnings.catch_warnings(), ThreadPoolExecutor(count_cores()) as pool:
            warnings.simplefilter("ignore")  # large images are welcome, and odd metadata does no harm
            ready: list[tuple[Any, Future[Pixels | str]]] = []
            try:
                while batch := list(islice(remaining, self.batch_size)):
                    coming = [(picture, pool.submit(read, picture)) for picture in batch]
                    yield from self._batch(ready)
                    ready = coming
                yield from self._batch(ready)
            finally:
                pool.shutdown(cancel_futures=True)  # after Ctrl-C nobody waits for the rest

    def _batch(self, ready: list[tuple[Any, "Future[Pixels | str]"]]) -> Iterator[tuple[Any, Prediction | str]]:
        """Predict the pictures of a batch that could be read."""
        results = [(picture, future.result()) for picture, future in ready]
        rows: Iterator[tuple[list[float], list[int], float]] = iter(())
        if pixels := [result for _, result in results if not isinstance(result, str)]:
            probabilities, novelty = self.trained.predict(np.stack(pixels))
            values, labels = probabilities.topk(min(self.top, len(self.classes)), dim=-1)
            rows = zip(values.tolist(), labels.tolist(), novelty.tolist(), strict=True)
        for picture, result in results:
            if isinstance(result, str):
                yield picture, result
            else:
                shares, indices, share = next(rows)
                top = tuple((self.classes[index], value) for index, value in zip(indices, shares, strict=True))
                yield picture, Prediction(*top[0], share, top)
