"""Predictor: images, rows of a table or arrays in; classes with probabilities, or what else the task predicts, out."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedcir.data.decoding import MODES, SUFFIXES, Decoding, decode_file, to_square
from fedcir.data.domains import Split
from fedcir.data.encoding import TableEncoding
from fedcir.data.sources.csv import encode_rows
from fedcir.data.sources.folders import open_folder
from fedcir.data.sources.site_tables import CsvRow, SiteTable, read_table
from fedcir.errors import InputError
from fedcir.inference.adaptation import MAX_IMAGES, SiteEstimate, adapt_model
from fedcir.inference.model import BATCH, AlgorithmChoice, open_model
from fedcir.machine import count_cores
from fedcir.runs.evaluation_data import sample_rows
from fedcir.runs.reader import RunSource
from fedcir.validation import Between

Pixels = NDArray[np.uint8]
Named = tuple[str, Any]
"""Name of an example, and the example."""


def files_in(paths: Iterable[str | Path], endings: Sequence[str] = SUFFIXES) -> list[str]:
    """List files, and the images in folders at any depth except hidden ones; other `endings` directly in folders.

    A file that is given by name need not look like an image.
    """
    files: list[str] = []
    for path in map(str, paths):
        if os.path.isdir(path):
            names = open_folder(path).images() if endings is SUFFIXES else sorted(os.listdir(path))
            inside = [os.path.join(path, name) for name in names if name.lower().endswith(tuple(endings))]
            if not inside:
                kind = "images; they end" if endings is SUFFIXES else "files that end"
                raise InputError(f"{path} holds no {kind} in {', '.join(endings)}")
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


def read_rows(path: str, encoding: TableEncoding) -> list[Named]:
    """Read and encode the rows of a CSV file, which are named by their lines."""
    table = read_table(Path(path))
    return [(f"{path}:{row.line}", x) for row, x in zip(table.rows, encode_rows(table, encoding), strict=True)]


def to_table(rows: Sequence[Mapping[str, Any]]) -> SiteTable:
    """Convert rows as dictionaries, such as `DataFrame.to_dict("records")`, to a table; None is a missing cell."""
    header = tuple(dict.fromkeys(str(name) for row in rows for name in row))
    cells = [["" if row.get(name) is None else str(row[name]).strip() for name in header] for row in rows]
    return SiteTable("rows", Path("rows"), header, [CsvRow(number, row) for number, row in enumerate(cells, start=1)])


def read_arrays(path: str, shape: Sequence[int]) -> list[Named]:
    """Read the examples of an .npy file of floats (N, ...), which are named by their numbers."""
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not a readable .npy file: {error}") from error
    return [(f"{path}:{number}", x) for number, x in enumerate(_check_floats(values, shape, path))]


def _check_floats(values: Any, shape: Sequence[int], where: str) -> NDArray[np.float32]:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu" or list(values.shape[1:]) != list(shape):
        kind = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
        raise InputError(f"{where} must hold numbers of the shape {['N', *shape]}, got {kind}".replace("'", ""))
    floats = values.astype(np.float32)
    if not np.isfinite(floats).all():
        raise InputError(f"{where} holds numbers that are not finite, or too large for single precision")
    return floats


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


@dataclass(frozen=True)
class TaskPrediction:
    """Prediction of another task than classification for one example."""

    values: Mapping[str, float]
    """Probability of each label, value of each target column, risk, or share of the pixels of each class."""
    mask: NDArray[np.uint8] | None = None
    """Class of each pixel (H, W), for segmentation."""


Answer = Prediction | TaskPrediction


class Predictor:
    """The model of a finished run, ready to use: `Predictor("runs/mine")(images)`.

    A model of tables takes CSV files, or rows as dictionaries; a model of arrays takes arrays and .npy files. Classes
    give a `Prediction`, other tasks a `TaskPrediction`.

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
            if not self.trained.takes_images:
                raise InputError("site_images adapts to images, and the model takes none: leave it out")
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

    @cached_property
    def endings(self) -> tuple[str, ...]:
        """Endings of the files that the model takes."""
        return SUFFIXES if self.trained.takes_images else (".npy",) if self.trained.encoding is None else (".csv",)

    def __call__(self, images: Any) -> list[Answer]:
        """Predict a list of PIL images, byte arrays (H, W, 3) or paths, a batch (N, H, W, 3), or a single image.

        A model of tables takes a list of dictionaries, or the path of a CSV file. A model of arrays takes an array of
        floats (N, ...), or the path of an .npy file.
        """
        if not self.trained.takes_images:
            examples = self._list_examples(images)
            return [answer for _, answer in self._predict(examples, _get_example) if not isinstance(answer, str)]
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
        return [answer for _, answer in self._predict(images, read) if not isinstance(answer, str)]

    def _list_examples(self, source: Any) -> list[Named]:
        """List the examples of a CSV or .npy file, of rows as dictionaries, or of an array."""
        encoding, shape = self.trained.encoding, self.trained.shape
        if isinstance(source, str | Path):
            return read_arrays(str(source), shape) if encoding is None else read_rows(str(source), encoding)
        if encoding is None:
            return [(str(number), x) for number, x in enumerate(_check_floats(source, shape, "the array"))]
        rows = [source] if isinstance(source, Mapping) else source
        if not (isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows)):
            raise InputError(f"rows must be dictionaries or the path of a CSV file, got {type(source).__name__}")
        return [(str(number), x) for number, x in enumerate(encode_rows(to_table(rows), encoding))] if rows else []

    def files(self, paths: Iterable[str]) -> Iterator[tuple[str, Answer | str]]:
        """Predict files batch by batch. Yields each path with its prediction, or with its error.

        Rows of a table and examples of an array are named by their file and number, as in new.csv:2.
        """
        if not self.trained.takes_images:
            for path in paths:
                for (name, _), answer in self._predict(self._list_examples(path), _get_example):
                    yield name, answer
            return
        size, channels = self.trained.size, self.trained.channels
        yield from self._predict(paths, lambda path: read_file(path, size, channels))

    def _predict(self, pictures: Iterable[Any], read: Any) -> Iterator[tuple[Any, Answer | str]]:
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

    def _batch(self, ready: list[tuple[Any, "Future[Pixels | str]"]]) -> Iterator[tuple[Any, Answer | str]]:
        """Predict the pictures of a batch that could be read."""
        results = [(picture, future.result()) for picture, future in ready]
        answers: Iterator[Answer] = iter(())
        if pixels := [result for _, result in results if not isinstance(result, str)]:
            predictions, novelty = self.trained.predict(np.stack(pixels))
            answers = (
                self._rank_classes(predictions, novelty) if self.trained.task.has_classes else self._name(predictions)
            )
        for picture, result in results:
            yield picture, result if isinstance(result, str) else next(answers)

    def _rank_classes(self, probabilities: Tensor, novelty: Tensor) -> Iterator[Prediction]:
        values, labels = probabilities.topk(min(self.top, len(self.classes)), dim=-1)
        for shares, indices, share in zip(values.tolist(), labels.tolist(), novelty.tolist(), strict=True):
            top = tuple((self.classes[index], value) for index, value in zip(indices, shares, strict=True))
            yield Prediction(*top[0], share, top)

    def _name(self, predictions: Tensor) -> Iterator[TaskPrediction]:
        """Name the columns of predictions (B, T); of pixels (B, C, H, W), give the most probable class and shares."""
        names = self.trained.task.predicted_names
        for prediction in predictions:
            mask = None
            values = prediction
            if prediction.ndim > 1:
                classes = prediction.argmax(0)
                mask = classes.numpy().astype(np.uint8)
                values = classes.flatten().bincount(minlength=len(names)) / classes.numel()
            yield TaskPrediction(dict(zip(names, values.tolist(), strict=True)), mask)


def _get_example(named: Named) -> Any:
    return named[1]
