"""What a network makes of every domain's test images: representations, predictions, losses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file

from fedcir.algorithms import make_algorithm
from fedcir.data.examples import Examples
from fedcir.federation import Federation, open_federation
from fedcir.local import EVALUATION_BATCH
from fedcir.machine import threads
from fedcir.models.encoder import Classifier, GaussianClassifier
from fedcir.records import RunFolder
from fedcir.rng import numpy_rng
from fedcir.types import InputError

Numbers = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class View:
    """One domain's test images as a network sees them."""

    domain: str
    z: Numbers  # (N, Z)
    sigma: Numbers | None  # (N, Z), where the encoder is Gaussian
    labels: Labels  # (N,)
    predicted: Labels  # (N,)
    losses: Numbers  # (N,)

    @property
    def accuracy(self) -> float:
        return float((self.predicted == self.labels).mean())

    @property
    def risk(self) -> float:
        return float(self.losses.mean())


def views_of_run(folder: RunFolder, data_root: str | None = None, limit: int | None = None) -> list[View]:
    """A finished run's model on the data that it was tested on; `data_root` says where those are now."""
    if not folder.finished:
        raise InputError(f"{folder.path} holds no finished run: finish it with --resume")
    config = folder.config()
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=data_root))
    federation = open_federation(config)
    model = make_algorithm(config.algorithm).build(federation.task)["model"]
    arrays = load_file(folder.path / "model.safetensors")
    if missing := sorted(model.state_dict().keys() - arrays.keys()):
        raise InputError(
            f"{folder.path}/model.safetensors lacks {missing[0]}: with model.batchnorm=local each site has its own"
        )
    model.load_state_dict(arrays)
    return list(views_of(model, federation, limit, config.run.seed))


def views_of(model: torch.nn.Module, federation: Federation, limit: int | None, seed: int) -> Iterator[View]:
    """Every domain under one network, at most `limit` images of each, drawn at random."""
    model.eval()
    with threads(1), torch.inference_mode():
        for number, domain in federation.evaluators.items():
            test = federation.clients[number].test
            rows = np.arange(len(test))
            if limit is not None and limit < len(test):
                rows = np.sort(numpy_rng(seed, "views", domain).permutation(len(test))[:limit])
            parts = [_look(model, test, rows[i : i + EVALUATION_BATCH]) for i in range(0, len(rows), EVALUATION_BATCH)]
            z, sigma, labels, predicted, losses = (_joined([part[k] for part in parts]) for k in range(5))
            yield View(domain, z, sigma if sigma.size else None, labels, predicted, losses)


def _look(model: torch.nn.Module, data: Examples, rows: Labels) -> Sequence[torch.Tensor]:
    x, y = data.batch(rows, torch.device("cpu"), torch.contiguous_format)
    if isinstance(model, GaussianClassifier):
        z, sigma = model.encoder(x)
    else:
        assert isinstance(model, Classifier)
        z, sigma = model.encoder(x), torch.empty(len(x), 0)
    logits = model.head(z)
    return z, sigma, y, logits.argmax(-1), F.cross_entropy(logits, y, reduction="none")


def _joined(parts: Sequence[torch.Tensor]) -> Any:
    return torch.cat(list(parts)).numpy()


def run_folders(paths: Sequence[Path]) -> list[RunFolder]:
    """The runs at these paths, each a run or a folder of runs."""
    found = []
    for path in paths:
        inside = [path] if RunFolder(path).exists else sorted(each.parent for each in path.glob("*/config.toml"))
        if not inside:
            raise InputError(f"{path} holds no run: give a folder that `fedcir run` or `fedcir compare` wrote")
        found += [RunFolder(each) for each in inside]
    return found
