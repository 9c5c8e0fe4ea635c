"""The features of a frozen encoder: computed once per image, kept in the cache, and read in the place of images."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcir.config import ModelConfig, cores
from fedcir.data.domains import Domains, Images, Indices, Split
from fedcir.data.examples.extraction import Values, compute
from fedcir.data.examples.images import Examples, ImageExamples, Normalisation, Positions
from fedcir.data.pictures.cache import alone, cache_folder, writing
from fedcir.data.pictures.decode import OnFile
from fedcir.data.private import inner_folder, new_file, private_folder
from fedcir.models.tensors import snapshot

VERSION = 1  # of how features are computed: another version is another cache


class FeatureExamples:
    """Samples of a split, by the features of their images."""

    def __init__(self, split: Split, values: Values, places: Indices) -> None:
        self.split, self.values, self.places = split, values, places

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, positions: Positions, device: torch.device, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(np.asarray(self.values[self.places[positions]]))  # (B, F)
        return chosen.to(device), torch.from_numpy(self.split.labels[positions]).to(device)

    def labels(self) -> Tensor:
        return torch.from_numpy(np.array(self.split.labels))  # a copy, since they may be a map to read only


@dataclass(frozen=True)
class Used:
    """The rows of one array of images that a dataset uses."""

    images: Images
    rows: Indices

    def content(self) -> str:
        """A hash of these images, or the name of the prepared folder that holds them and is a hash itself."""
        if isinstance(self.images, np.memmap) and self.images.filename is not None:
            name = Path(self.images.filename).parent.name
            if name.startswith("prepared-"):
                return name
        digest = hashlib.blake2b(str(self.images.shape).encode(), digest_size=16)
        for some in np.array_split(self.rows, max(1, len(self.rows) // 1024)):
            digest.update(np.ascontiguousarray(self.images[some]).data)
        return digest.hexdigest()


def feature_examples(
    domains: Domains,
    model: ModelConfig,
    network: nn.Module,
    normalisation: Normalisation,
    workers: int | None = None,
    on_file: OnFile | None = None,
) -> Callable[[Split], Examples]:
    """What makes examples of a dataset's splits, by features from the cache, or computed into it now."""
    splits = [split for d in domains for split in (d.train, d.test, d.validation) if split is not None]
    held: dict[int, list[Split]] = {}
    for split in splits:
        held.setdefault(id(split.images), []).append(split)
    used = [Used(some[0].images, np.unique(np.concatenate([s.where for s in some]))) for some in held.values()]
    about = {
        "dataset": domains.name,
        "root": f"features of {model.name}",
        "images": sum(len(each.rows) for each in used),
        "size": domains.image_shape[0],
    }
    parts = [ImageExamples(_unlabelled(each), normalisation) for each in used]
    key = _key(used, model, network, normalisation)
    values = _kept(key, about, lambda place: compute(network, parts, place, workers or cores(), on_file))
    begin = dict(zip(held, np.cumsum([0, *(len(each.rows) for each in used)]).tolist(), strict=False))
    rows = dict(zip(held, (each.rows for each in used), strict=True))

    def examples(split: Split) -> Examples:
        its = id(split.images)
        return FeatureExamples(split, values, begin[its] + np.searchsorted(rows[its], split.where))

    return examples


def _unlabelled(used: Used) -> Split:
    count = len(used.rows)
    return Split(used.images, np.zeros(count, dtype=np.int64), range(count), used.rows)  # type: ignore[arg-type]


def _key(used: Sequence[Used], model: ModelConfig, network: nn.Module, normalisation: Normalisation) -> str:
    """Of everything that features depend on."""
    digest = hashlib.blake2b(digest_size=16)
    told: list[Any] = [VERSION, torch.__version__, str(network), model.name, model.arguments]
    told += [normalisation.mean, normalisation.std, [each.content() for each in used]]
    digest.update(json.dumps(told, default=str).encode())
    if model.file is not None:
        digest.update(model.file.read_bytes())
    for name, tensor in snapshot(network).items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    for each in used:
        digest.update(each.rows.tobytes())
    return digest.hexdigest()


def _kept(key: str, about: dict[str, Any], build: Callable[[Path], None]) -> Values:
    """The features of this key, mapped from the cache; built beside and moved there if they are not in it."""
    folder = cache_folder()
    place, beside = folder / f"features-{key}", folder / f"build-{key}"
    if (values := _read(place)) is not None:
        return values
    with writing(folder):
        private_folder(folder)
        with alone(folder / f"build-{key}.lock"):
            if _read(place) is None:  # another process may have built it while this one waited
                shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
                inner_folder(beside)
                try:
                    new_file(beside / "about.json").write_text(json.dumps(about), encoding="utf-8")
                    build(new_file(beside / "features.npy"))
                    shutil.rmtree(place, ignore_errors=True)  # of a disk that lost something
                    os.rename(beside, place)
                finally:
                    shutil.rmtree(beside, ignore_errors=True)
    values = _read(place)
    assert values is not None
    return values


def _read(place: Path) -> Values | None:
    """What lies there, if all of it does."""
    try:
        values: Values = np.load(place / "features.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return values
