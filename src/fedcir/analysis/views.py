"""What a network makes of every domain's test images: representations, predictions, losses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedcir.algorithms import make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config
from fedcir.data.catalogue import SOURCES
from fedcir.data.domains import Domains
from fedcir.data.federation import Federation, deal
from fedcir.data.partition.manifest import manifest_of
from fedcir.data.partition.shares import Share
from fedcir.engine.client import EVALUATION_BATCH
from fedcir.engine.machine import threads
from fedcir.engine.prediction import predict
from fedcir.engine.session import workbench
from fedcir.engine.store import ClientStore
from fedcir.models.task import Task
from fedcir.rng import numpy_rng
from fedcir.runs.restore import Restored, restore
from fedcir.runs.run import Run
from fedcir.types import InputError

Numbers = NDArray[np.float32]
Labels = NDArray[np.int64]

SEED = 0
"""Of looking at runs, whatever their own: they are seen on the same images, so that they can be paired."""


@dataclass(frozen=True)
class View:
    """One domain's test images as a network sees them."""

    domain: str
    z: Numbers  # (N, Z), and Z = 0 where the network gives no representations
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

    @property
    def log_odds(self) -> NDArray[np.float64]:
        """Of the second class, where there are two (N,): a loss is the negative logarithm of the true class's share."""
        losses = np.maximum(self.losses.astype(np.float64), 0)
        with np.errstate(divide="ignore"):  # a loss of 0 has odds of infinity
            of_truth = -losses - np.log(-np.expm1(-losses))
        return np.where(self.labels == 1, of_truth, -of_truth)


def data_of_run(run: Run, data_root: str | None = None) -> tuple[Config, Domains, Sequence[Share]]:
    """A finished run's settings, its data, which must be what it ran on, and who held what."""
    if not run.finished:
        raise InputError(f"{run.path} holds no finished run: resume it to finish it")
    config = run.config
    if config.data.name not in SOURCES:
        raise InputError(
            f"{run.path} is a run of fedcir.train on your own Datasets, which it does not keep: "
            "pass their representations to fedcir.analysis.divergences instead"
        )
    if data_root is not None:
        config = replace(config, data=replace(config.data, root=data_root))
    root = config.data.root
    if root is None and "key" in run.manifest and SOURCES[config.data.name].root == "folder":
        sites = ", ".join(dict.fromkeys(client["domain"] for client in run.manifest["clients"]))
        raise InputError(
            f"{run.path} ran across sites, which keep their images ({sites}): give data_root, a folder here that holds "
            "the images of all of them, or the name and data_root of another dataset"
        )
    if SOURCES[config.data.name].root == "folder" and root is not None and not Path(root).is_dir():
        raise InputError(f"{run.path} ran on {root}, which is no longer a folder: give its new place as data_root")
    domains, shares = deal(config)
    if "test" in run.manifest:
        same = manifest_of(domains, shares)["hash"] == run.manifest["hash"]
    else:  # of a deployment, which counts samples and does not name them
        counts = {domain.name: len(domain.test) for domain in domains}
        same = {client["domain"]: client.get("test") for client in run.manifest["clients"]} == counts
    if not same:
        raise InputError(
            f"the data at {root} are not those that {run.path} ran on: restore the folder as it was then"
            if root is not None
            else f"{config.data.name} has changed since {run.path} ran on it: use the version of fedcir that wrote it"
        )
    return config, domains, shares


def views_under(run: Run, config: Config, federation: Federation) -> list[View]:
    """What a finished run predicts on all test images of the federation that it ran on, as the run tested them."""
    restored = restore(run, config, make_algorithm(config.algorithm), federation.task)
    return views_of(restored, federation, None, SEED)


def untrained(config: Config, task: Task) -> Restored:
    """FedAvg's networks on this machine's CPU, with their first weights."""
    model, run = replace(config.model, batchnorm="average"), replace(config.run, layout="contiguous", compile=False)
    bench = workbench(replace(config, model=model, run=run), Algorithm(), task, "cpu")
    return Restored(bench, {}, ClientStore(), 0)


def views_of(restored: Restored, federation: Federation, limit: int | None, seed: int) -> list[View]:
    """Every domain under one method's networks, at most `limit` images of each, drawn at random."""
    views, bench = [], restored.bench
    with threads(1), torch.inference_mode():
        for number, domain in federation.evaluators.items():
            client = federation.clients[number]
            assert client.test is not None
            ctx = restored.load(client)
            rows = drawn(len(client.test), limit, seed, domain)
            parts = []
            for start in range(0, len(rows), EVALUATION_BATCH):
                x, y = client.test.batch(rows[start : start + EVALUATION_BATCH], bench.device, bench.layout)
                output = predict(bench.algorithm, bench.modules, x, ctx)
                losses = F.cross_entropy(output.logits, y, reduction="none")
                nothing = output.logits.new_empty(len(x), 0)
                z, sigma = (nothing if part is None else part.float() for part in (output.z, output.sigma))
                parts.append((z, sigma, y, output.logits.argmax(-1), losses))
            z, sigma, labels, predicted, lost = (_joined([part[k] for part in parts]) for k in range(5))
            views.append(View(domain, z, sigma if sigma.size else None, labels, predicted, lost))
    return views


def drawn(count: int, limit: int | None, seed: int, domain: str) -> Labels:
    """Which of a domain's images are looked at: the same whenever it is asked for."""
    if limit is None or limit >= count:
        return np.arange(count)
    return np.sort(numpy_rng(seed, "views", domain).permutation(count)[:limit])


def _joined(parts: Sequence[torch.Tensor]) -> Any:
    return torch.cat(list(parts)).numpy()
