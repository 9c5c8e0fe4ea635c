"""The features of a frozen encoder: computed once per image, kept in the cache, and read in the place of images.

They depend on nothing but the image and the encoder: they are computed on the CPU, by one thread, in evaluation mode
and in batches of one shape.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcir.config import ModelConfig, cores
from fedcir.data.domains import Domains, Images, Indices, Split
from fedcir.data.examples import Examples, ImageExamples, Normalisation, Positions
from fedcir.data.pictures.cache import alone, cache_folder, writing
from fedcir.data.pictures.decode import OnFile
from fedcir.models.tensors import snapshot
from fedcir.models.threads import threads

VERSION = 1  # of how features are computed: another version is another cache
BATCH = 8
"""Images that the encoder sees at a time, always as many, since bits depend on it. More are no faster on a CPU."""

Values = NDArray[np.float32]


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
        return torch.from_numpy(self.split.labels)


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


def features_of(network: nn.Module, examples: Examples, positions: Positions) -> Tensor:
    """The features of these examples, at most BATCH; the encoder always sees a full batch."""
    full = np.concatenate([positions, np.repeat(positions[-1:], BATCH - len(positions))])
    x, _ = examples.batch(full, torch.device("cpu"), torch.contiguous_format)
    with torch.inference_mode():
        features: Tensor = network(x)
    return features[: len(positions)].float()


def compute(
    network: nn.Module, parts: Sequence[Examples], place: Path, workers: int = 1, on_file: OnFile | None = None
) -> None:
    """Write the features of all examples into a .npy file, by several processes where they can be forked."""
    network = network.eval()
    total = sum(len(part) for part in parts)
    with threads(1):
        width = features_of(network, parts[0], np.zeros(1, dtype=np.int64)).shape[1]
        values = np.lib.format.open_memmap(place, mode="w+", dtype=np.float32, shape=(total, width))
        if hasattr(os, "posix_fallocate"):
            with open(place, "r+b") as file:  # a full disk is an error now, not a crash later
                os.posix_fallocate(file.fileno(), 0, values.offset + values.nbytes)
        batches = list(_batches(parts))
        # Other threads might hold a lock that a forked process would wait for in vain.
        crew = min(workers, len(batches)) if hasattr(os, "fork") and threading.active_count() == 1 else 1
        shares = [batches[first::crew] for first in range(crew)]
        helpers = [_forked(network, values, share) for share in shares[1:]]
        done = 0
        for begin, part, positions in shares[0]:
            values[begin : begin + len(positions)] = features_of(network, part, positions).numpy()
            done += crew * BATCH
            if on_file is not None:
                on_file(min(done, total), total)
        for share, helper in zip(shares[1:], helpers, strict=True):
            if os.waitpid(helper, 0)[1] != 0:  # repeated here, where an error is told
                _fill(network, values, share)
        values.flush()


def _batches(parts: Sequence[Examples]) -> Iterator[tuple[int, Examples, Positions]]:
    """Positions of every part in batches, each with the row that its first has in the file."""
    begin = 0
    for part in parts:
        for start in range(0, len(part), BATCH):
            yield begin + start, part, np.arange(start, min(start + BATCH, len(part)))
        begin += len(part)


def _fill(network: nn.Module, values: Values, share: Sequence[tuple[int, Examples, Positions]]) -> None:
    for begin, part, positions in share:
        values[begin : begin + len(positions)] = features_of(network, part, positions).numpy()


def _forked(network: nn.Module, values: Values, share: Sequence[tuple[int, Examples, Positions]]) -> int:
    """A process that fills its share of the file, which both have mapped."""
    child = os.fork()
    if child:
        return child
    failed = 1
    try:
        _fill(network, values, share)
        failed = 0
    finally:
        os._exit(failed)


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
    if not (place / "features.npy").is_file():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with alone(folder / f"build-{key}.lock"):
                if not (place / "features.npy").is_file():  # another process may have built it while this one waited
                    shutil.rmtree(beside, ignore_errors=True)
                    beside.mkdir()
                    try:
                        (beside / "about.json").write_text(json.dumps(about), encoding="utf-8")
                        build(beside / "features.npy")
                        shutil.rmtree(place, ignore_errors=True)
                        os.rename(beside, place)
                    finally:
                        shutil.rmtree(beside, ignore_errors=True)
    values: Values = np.load(place / "features.npy", mmap_mode="r")
    return values
