"""What a network makes of every domain's test images: representations, predictions, losses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedcir.algorithms import make_algorithm
from fedcir.config import Config
from fedcir.data.domains import Domains
from fedcir.data.examples import Examples
from fedcir.data.federation import Federation, deal, manifest_of
from fedcir.data.partition import Share
from fedcir.data.sources import SOURCES
from fedcir.engine.client import EVALUATION_BATCH
from fedcir.engine.folder import REWRITE, RunFolder
from fedcir.engine.machine import threads
from fedcir.models.encoder import Classifier, GaussianClassifier
from fedcir.models.tensors import difference
from fedcir.rng import numpy_rng
from fedcir.types import InputError

Numbers = NDArray[np.float32]
Labels = NDArray[np.int64]

SEED = 0
"""Of looking at runs, whatever their own: they are seen on the same images, so that they can be paired."""


@dataclass(frozen=True)
class View:
    """One domain's test images as a network sees them."""

    domain: str
    z: Numbers  # (N, Z)
    sigma: Numbers | None  # (N, Z), where the encoder is Gaussian
    labels: Labels  # (N,)
    predicted: Labels  # (N,)
    losses: Numbers  # (N,)

    def sample(self, limit: int | None, seed: int) -> "View":
        """At most so many of its images, drawn at random."""
        rows = drawn(len(self.labels), limit, seed, self.domain)
        sigma = None if self.sigma is None else self.sigma[rows]
        return View(self.domain, self.z[rows], sigma, self.labels[rows], self.predicted[rows], self.losses[rows])

    @property
    def accuracy(self) -> float:
        return float((self.predicted == self.labels).mean())

    @property
    def risk(self) -> float:
        return float(self.losses.mean())


def data_of_run(folder: RunFolder, data_root: str | None = None) -> tuple[Config, Domains, list[Share]]:
    """A finished run's settings, its data, which must be what it ran on, and who held what."""
    if not folder.finished:
        raise InputError(f"{folder.path} holds no finished run: resume it to finish it")
    config = folder.config()
    if config.data.name not in SOURCES:
        raise InputError(
            f"{folder.path} is a run of fedcir.train on Datasets of its caller, which are not kept in it: "
            "give fedcir.analysis.divergences their representations instead"
        )
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=data_root))
    root = config.data.root
    if root is None and "key" in folder.manifest() and SOURCES[config.data.name].root == "folder":
        raise InputError(
            f"{folder.path} ran across sites, which keep their images: give data_root if a folder here holds them all"
        )
    if SOURCES[config.data.name].root == "folder" and root is not None and not Path(root).is_dir():
        raise InputError(f"{folder.path} ran on {root}, which is no folder now: give data_root, where it is")
    domains, shares = deal(config)
    manifest = folder.manifest()
    if "test" in manifest:
        same = manifest_of(domains, shares)["hash"] == manifest["hash"]
    else:  # of a deployment, which counts samples and does not name them
        counts = {domain.name: len(domain.test) for domain in domains}
        same = {client["domain"]: client.get("test") for client in manifest["clients"]} == counts
    if not same:
        raise InputError(
            f"the data at {root} are not what {folder.path} ran on: give those as data_root"
            if root is not None
            else f"{config.data.name} is not what {folder.path} ran on: use the fedcir that wrote it"
        )
    return config, domains, shares


def views_under(folder: RunFolder, config: Config, federation: Federation) -> list[View]:
    """What a finished run's model makes of all test images of the federation that it ran on."""
    model = make_algorithm(config.algorithm).build(federation.task)["model"]
    arrays = folder.weights()
    if config.model.batchnorm == "local" and (missing := sorted(model.state_dict().keys() - arrays.keys())):
        raise InputError(
            f"{folder.path}/model.safetensors lacks {missing[0]}: with model.batchnorm=local each site has its own"
        )
    if fault := difference({"model": arrays}, {"model": model.state_dict()}):
        raise InputError(f"{folder.path}/model.safetensors is not of this run: {fault}; {REWRITE}")
    model.load_state_dict(arrays)
    return list(views_of(model, federation, None, SEED))


def views_of(model: torch.nn.Module, federation: Federation, limit: int | None, seed: int) -> Iterator[View]:
    """Every domain under one network, at most `limit` images of each, drawn at random."""
    model.eval()
    with threads(1), torch.inference_mode():
        for number, domain in federation.evaluators.items():
            test = federation.clients[number].test
            assert test is not None
            rows = drawn(len(test), limit, seed, domain)
            parts = [_look(model, test, rows[i : i + EVALUATION_BATCH]) for i in range(0, len(rows), EVALUATION_BATCH)]
            z, sigma, labels, predicted, losses = (_joined([part[k] for part in parts]) for k in range(5))
            yield View(domain, z, sigma if sigma.size else None, labels, predicted, losses)


def drawn(count: int, limit: int | None, seed: int, domain: str) -> Labels:
    """Which of a domain's images are looked at: the same whenever it is asked for."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(numpy_rng(seed, "views", domain).permutation(count)[:limit])


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
