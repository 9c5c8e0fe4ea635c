"""Features of a frozen encoder: computed once per image, kept in the cache, and read in place of images."""

import hashlib
import json
import mmap
import os
import shutil
import signal
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.config import HUGGING_FACE, ModelConfig
from fedcir.data.cache import cache_folder, image_digests, lock_cache
from fedcir.data.decoding import OnFile
from fedcir.data.domains import Domains, Images, Indices, Split
from fedcir.data.examples import Examples, ImageExamples, Normalisation, PooledExamples, Positions, select_targets
from fedcir.files import create_file, make_inner_folder, open_append, read_bytes, read_text
from fedcir.machine import count_cores, use_threads
from fedcir.models.hugging_face import find_folder
from fedcir.models.onnx_encoder import ConversionError, OnnxEncoder, find_onnxruntime
from fedcir.models.tensors import snapshot

BATCH = 8
"""Images in each batch. The encoder always gets full batches, since bits depend on it. More are no faster on a CPU."""

Values = NDArray[np.float32]
OnImages = Callable[[int], None]  # called with the number of images whose features are computed


def encode_batch(network: nn.Module, examples: Examples, positions: Positions) -> Tensor:
    """Compute the features of at most BATCH examples, in a batch that is padded with copies of the last one."""
    full = np.concatenate([positions, np.repeat(positions[-1:], BATCH - len(positions))])
    x, _ = examples.batch(full, torch.device("cpu"), torch.contiguous_format)
    with torch.inference_mode():
        features: Tensor = network(x)
    return features[: len(positions)].float()


def compute_features(
    network: nn.Module, examples: Examples, positions: Positions, workers: int = 1, on_images: OnImages | None = None
) -> Values:
    """Compute the features (N, F) of examples, in several processes where they can be forked."""
    network = network.eval()
    starts = range(0, len(positions), BATCH)
    children: list[int] = []
    with use_threads(1):
        first = encode_batch(network, examples, positions[:BATCH]).numpy()
        memory = mmap.mmap(-1, len(positions) * first.shape[1] * first.itemsize)  # shared with forked processes
        values = np.frombuffer(memory, np.float32).reshape(len(positions), -1)
        values[:BATCH] = first

        def fill(batch_starts: Sequence[int], report: OnImages | None = None) -> None:
            done = 0
            for start in batch_starts:
                batch = positions[start : start + BATCH]
                values[start : start + len(batch)] = encode_batch(network, examples, batch).numpy()
                done += len(batch)
                if report is not None:
                    report(min(len(first) + done * processes, len(positions)))

        # A forked process would wait forever for a lock that another thread holds.
        can_fork = hasattr(os, "fork") and threading.active_count() == 1
        processes = max(1, min(workers, len(starts) - 1)) if can_fork else 1
        local, *forked = [starts[number + 1 :: processes] for number in range(processes)]
        try:
            for batch_starts in forked:
                if (child := os.fork()) == 0:
                    failed = 1
                    try:
                        fill(batch_starts)
                        failed = 0
                    finally:
                        os._exit(failed)
                children.append(child)
            if on_images is not None:
                on_images(len(first))
            fill(local, on_images)
            for batch_starts, child in zip(forked, children, strict=True):
                if os.waitpid(child, 0)[1] != 0:  # repeat its batches here, so that an error is raised
                    fill(batch_starts)
        except BaseException:
            for child in children:
                with suppress(OSError):  # it may have ended
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            raise
    return values


ENTRY = np.dtype([("image", "S16"), ("checksum", "<u4")])
MAX_BYTES = 20_000_000_000  # maximum size of the entries of a store, enough for a billion images
Digests = NDArray[np.void]  # (N,), 16 bytes each


@dataclass(frozen=True)
class FeatureStore:
    """Rows of features on disk, found by a hash of the image; each row has a checksum."""

    folder: Path

    def find(self, digests: Digests) -> tuple[Values, Indices]:
        """Map all rows (M, F), and return the row of each image (N,): -1 if it is missing or damaged."""
        values, entries = self._read()
        rows = np.full(len(digests), -1)
        if not len(entries):
            return values, rows
        hashes = digests.view("S16")
        order = np.argsort(entries["image"], kind="stable")
        last = np.searchsorted(entries["image"], hashes, side="right", sorter=order) - 1  # the newest of its rows
        newest = order[np.maximum(last, 0)]
        for number in np.flatnonzero(entries["image"][newest] == hashes):
            row = newest[number]
            if _compute_checksum(digests[number], values[row]) == entries["checksum"][row]:
                rows[number] = row
        return values, rows

    def append(self, digests: Digests, features: Values, about: Mapping[str, Any]) -> None:
        """Append a row for each image, while the caller holds the lock of the store. A damaged store is replaced."""
        values, entries = self._read()
        if values.shape[1] != features.shape[1]:
            shutil.rmtree(self.folder, ignore_errors=True)
            make_inner_folder(self.folder)
            text = json.dumps({**about, "width": features.shape[1]})
            create_file(self.folder / "about.json").write_text(text, encoding="utf-8")
            entries = entries[:0]
        new = np.zeros(len(digests), ENTRY)
        new["image"] = digests.view("S16")
        new["checksum"] = [_compute_checksum(digest, row) for digest, row in zip(digests, features, strict=True)]
        for name, rows in (("features", features), ("images", new)):
            with open_append(self.folder / name) as file:
                file.truncate(len(entries) * rows[0].nbytes)  # drop what an interrupted process may have left
                file.write(rows.tobytes())
                file.flush()
                os.fsync(file.fileno())

    def _read(self) -> tuple[Values, NDArray[np.void]]:
        """Map the rows and read their entries; both are empty if the store is missing or damaged."""
        try:
            features = self.folder / "features"
            width = json.loads(read_text(self.folder / "about.json", MAX_BYTES))["width"]
            if type(width) is not int or width < 1 or not features.is_file():
                raise ValueError(f"width is {width!r}")
            content = read_bytes(self.folder / "images", MAX_BYTES)
            entries = np.frombuffer(content[: len(content) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)
            rows = min(len(entries), features.stat().st_size // (4 * width))
            if rows:
                values: Values = np.memmap(features, np.float32, "r", shape=(rows, width))
                return values, entries[:rows]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            width = 0
        return np.empty((0, width), np.float32), np.empty(0, ENTRY)


def _compute_checksum(digest: np.void, row: Values) -> int:
    return zlib.crc32(row.tobytes(), zlib.crc32(digest.tobytes()))


VERSION = 2  # of how features are computed and stored: another version is another store
CHUNK = 1024  # images whose features are stored at once; an interrupted process loses at most these


@dataclass(frozen=True)
class FeatureCache:
    """Features of images of one shape under one frozen encoder."""

    model: ModelConfig
    network: nn.Module
    normalisation: Normalisation
    shape: tuple[int, int, int]  # height, width and channels of the images
    workers: int | None = None  # number of processes that compute features; one per core if not given

    def load(self, parts: Sequence[tuple[Images, Indices]], on_file: OnFile | None = None) -> tuple[Values, Indices]:
        """Map the stored features, and return the row of each image, one part after the other.

        A part is an array of images and the rows to use. Missing features are computed and stored: by ONNX Runtime
        where it is installed and can, otherwise by PyTorch.
        """
        runtime = find_onnxruntime()
        if runtime is not None:
            with suppress(ConversionError):
                return self._load(parts, on_file, runtime)
        return self._load(parts, on_file, "torch")

    def _load(
        self, parts: Sequence[tuple[Images, Indices]], on_file: OnFile | None, runtime: str
    ) -> tuple[Values, Indices]:
        store = FeatureStore(cache_folder() / f"features-{self.key(runtime)}")
        digests = np.concatenate([image_digests(images, used) for images, used in parts])
        values, rows = store.find(digests)
        if (rows >= 0).all():
            return values, rows
        splits = [Split(images, np.zeros(len(used), dtype=np.int64), "", used) for images, used in parts]
        examples = PooledExamples([ImageExamples(split, self.normalisation) for split in splits])
        name = self.model.name if self.model.file is None else self.model.file.name
        about = {"dataset": "features", "root": name, "size": self.shape[0], "channels": self.shape[2]}
        network = self.network.eval()
        if runtime != "torch":
            height, width, channels = self.shape
            network = OnnxEncoder(network, torch.zeros(BATCH, channels, height, width))
        with lock_cache(self.key(runtime)):
            _, rows = store.find(digests)  # another process may have computed them in the meantime
            missing = np.flatnonzero(rows < 0)
            _, first = np.unique(digests[missing].view("S16"), return_index=True)
            missing = missing[np.sort(first)]  # an image that occurs twice is computed once
            for start in range(0, len(missing), CHUNK):
                chunk = missing[start : start + CHUNK]

                def report(done: int, start: int = start) -> None:
                    if on_file is not None:
                        on_file(start + done, len(missing))

                features = compute_features(network, examples, chunk, self.workers or count_cores(), report)
                store.append(digests[chunk], features, about)
            values, rows = store.find(digests)
        assert (rows >= 0).all()
        return values, rows

    def key(self, runtime: str) -> str:
        """Hash of everything that features depend on besides the image."""
        digest = hashlib.blake2b(digest_size=16)
        model = self.model
        code = model.name if model.file is None else model.name.rpartition(":")[2]
        if model.name == HUGGING_FACE or find_folder(model) is not None:  # str(network) holds the settings
            code, model = HUGGING_FACE, replace(model, arguments={})
        computed: list[Any] = [VERSION, BATCH, torch.__version__, torch.backends.cpu.get_cpu_capability(), self.shape]
        encoder = [code, model.arguments, str(self.network), self.normalisation.mean, self.normalisation.std]
        computed += [runtime] * (runtime != "torch")
        digest.update(json.dumps([*computed, *encoder], default=str).encode())
        if self.model.file is not None:
            digest.update(self.model.file.read_bytes())
        for name, tensor in snapshot(self.network).items():
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


class DatasetFeatures:
    """Features of all images in use of a dataset, loaded or computed when they are first needed."""

    def __init__(self, domains: Domains, cache: FeatureCache, on_file: OnFile | None = None) -> None:
        self._cache, self._on_file = cache, on_file
        splits = [split for domain in domains for split in domain.splits]
        self._parts: dict[int, tuple[Images, Indices]] = {}  # by array: the images, and their rows in use
        for array, images in {id(split.images): split.images for split in splits}.items():
            used = [split.where for split in splits if split.images is images]
            self._parts[array] = images, np.unique(np.concatenate(used))

    @cached_property
    def loaded(self) -> tuple[Values, dict[int, Indices]]:
        """The stored features, and by array the row of each image in use."""
        values, rows = self._cache.load(list(self._parts.values()), self._on_file)
        ends = np.cumsum([len(used) for _, used in self._parts.values()])
        return values, dict(zip(self._parts, np.split(rows, ends[:-1]), strict=True))

    def find_rows(self, split: Split) -> Indices:
        """Return the row of each sample's features."""
        array = id(split.images)
        rows: Indices = self.loaded[1][array][np.searchsorted(self._parts[array][1], split.where)]
        return rows


class FeatureExamples:
    """Samples of a split, with features of a frozen encoder as inputs."""

    def __init__(self, split: Split, features: DatasetFeatures) -> None:
        self.split, self.features = split, features

    def __len__(self) -> int:
        return len(self.split)

    @cached_property
    def _rows(self) -> Indices:
        return self.features.find_rows(self.split)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        values, _ = self.features.loaded
        chosen = torch.from_numpy(np.asarray(values[self._rows[positions]]))  # (B, F)
        return chosen.to(device), select_targets(self.split, positions).to(device)

    def labels(self) -> Tensor:
        return torch.from_numpy(np.array(self.split.labels))  # a copy, since a memory map may be read-only
