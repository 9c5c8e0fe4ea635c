"""Features of a frozen encoder: computed once per image, kept in the cache, and read in place of images."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcir.config import ModelConfig, cores
from fedcir.data.domains import Domains, Images, Indices, Split
from fedcir.data.examples.extraction import BATCH, Values, compute
from fedcir.data.examples.feature_store import FeatureStore
from fedcir.data.examples.images import ImageExamples, Normalisation, PooledExamples, Positions
from fedcir.data.pictures.cache import alone, cache_folder, image_digests, writing
from fedcir.data.pictures.decode import OnFile
from fedcir.data.private import private_folder
from fedcir.models.tensors import snapshot

VERSION = 2  # of how features are computed and stored: another version is another store
CHUNK = 1024
"""Images whose features are stored at a time: an interrupted process loses no more."""


@dataclass(frozen=True)
class FeatureCache:
    """Features of images of one shape under one frozen encoder."""

    model: ModelConfig
    network: nn.Module
    normalisation: Normalisation
    shape: tuple[int, int, int]
    """Height, width and channels of the images."""
    workers: int | None = None
    """Processes that compute features; one per core if not given."""

    def load(self, parts: Sequence[tuple[Images, Indices]], on_file: OnFile | None = None) -> tuple[Values, Indices]:
        """Map the stored features, and give the row of each image, one part after the other.

        A part is an array of images and the rows to use. Features that are not in the cache are computed into it.
        """
        digests = np.concatenate([image_digests(images, rows) for images, rows in parts])
        values, places = self._store.find(digests)
        if (places >= 0).all():
            return values, places
        examples = PooledExamples([ImageExamples(_without_labels(*part), self.normalisation) for part in parts])
        folder = cache_folder()
        with writing(folder):
            private_folder(folder)
            with alone(folder / f"build-{self.key}.lock"):
                _, places = self._store.find(digests)  # another process may have computed them while this one waited
                missing = np.flatnonzero(places < 0)
                _, first = np.unique(digests[missing].view("S16"), return_index=True)
                missing = missing[np.sort(first)]  # an image that occurs twice is computed once
                for start in range(0, len(missing), CHUNK):
                    chunk = missing[start : start + CHUNK]

                    def report(done: int, start: int = start) -> None:
                        if on_file is not None:
                            on_file(start + done, len(missing))

                    features = compute(self.network, examples, chunk, self.workers or cores(), report)
                    self._store.append(digests[chunk], features, self._about)
                values, places = self._store.find(digests)
        assert (places >= 0).all()
        return values, places

    @cached_property
    def key(self) -> str:
        """A hash of everything that features depend on beside the image."""
        digest = hashlib.blake2b(digest_size=16)
        code = self.model.name if self.model.file is None else self.model.name.rpartition(":")[2]
        computed: list[Any] = [VERSION, BATCH, torch.__version__, torch.backends.cpu.get_cpu_capability(), self.shape]
        encoder = [code, self.model.arguments, str(self.network), self.normalisation.mean, self.normalisation.std]
        digest.update(json.dumps([*computed, *encoder], default=str).encode())
        if self.model.file is not None:
            digest.update(self.model.file.read_bytes())
        for name, tensor in snapshot(self.network).items():
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    @property
    def _store(self) -> FeatureStore:
        return FeatureStore(cache_folder() / f"features-{self.key}")

    @property
    def _about(self) -> dict[str, Any]:
        name = self.model.name if self.model.file is None else self.model.file.name
        return {"dataset": "features", "root": name, "size": self.shape[0], "channels": self.shape[2]}


class DatasetFeatures:
    """Features of all images that a dataset uses, looked up or computed when they are first needed."""

    def __init__(self, domains: Domains, cache: FeatureCache, on_file: OnFile | None = None) -> None:
        splits = [split for d in domains for split in (d.train, d.test, d.validation) if split is not None]
        by_array: dict[int, list[Split]] = {}
        for split in splits:
            by_array.setdefault(id(split.images), []).append(split)
        self._parts = {
            array: (some[0].images, np.unique(np.concatenate([split.where for split in some])))
            for array, some in by_array.items()
        }
        self._begin = dict(
            zip(by_array, np.cumsum([0, *(len(rows) for _, rows in self._parts.values())]).tolist(), strict=False)
        )
        self._cache, self._on_file = cache, on_file

    @cached_property
    def loaded(self) -> tuple[Values, Indices]:
        """The stored features, and the row of each image."""
        return self._cache.load(list(self._parts.values()), self._on_file)

    def places(self, split: Split) -> Indices:
        """The row of each sample's features."""
        array = id(split.images)
        _, places = self.loaded
        rows: Indices = places[self._begin[array] + np.searchsorted(self._parts[array][1], split.where)]
        return rows


class FeatureExamples:
    """Samples of a split, by the features of their images."""

    def __init__(self, split: Split, features: DatasetFeatures) -> None:
        self.split, self.features = split, features

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        values, _ = self.features.loaded
        chosen = torch.from_numpy(np.asarray(values[self._places[positions]]))  # (B, F)
        return chosen.to(device), torch.from_numpy(self.split.labels[positions]).to(device)

    def labels(self) -> Tensor:
        return torch.from_numpy(np.array(self.split.labels))  # a copy, since they may be a map to read only

    @cached_property
    def _places(self) -> Indices:
        return self.features.places(self.split)


def _without_labels(images: Images, rows: Indices) -> Split:
    count = len(rows)
    return Split(images, np.zeros(count, dtype=np.int64), range(count), rows)  # type: ignore[arg-type]
