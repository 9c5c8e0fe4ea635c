"""The model of a run tested on labelled images, domain by domain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedcir.analysis.overlap import Which, select_images
from fedcir.analysis.views import data_of_run, drawn
from fedcir.config import config_from, config_tables, merged, nearest, parse_assignment
from fedcir.data.domains import Domain, Domains, Split
from fedcir.data.examples.images import Examples
from fedcir.data.federation import Client, federation_from
from fedcir.data.opening import open_dataset
from fedcir.data.pictures.decode import OnFile
from fedcir.data.pictures.square import GREY
from fedcir.engine.client import EVALUATION_BATCH
from fedcir.engine.machine import threads
from fedcir.engine.store import ClientStore
from fedcir.runs.run import Run, Source, as_run
from fedcir.types import InputError
from fedcir.use.adapt import adapted, statistics_layers
from fedcir.use.evaluation import Evaluation, Judged
from fedcir.use.trained import BATCH, UNCALIBRATED, Given, Trained, has_own_parts, open_trained

ADAPTED_ON = 1024
"""Images of a domain that its statistics are taken from, at most."""

OnDomain = Callable[[int, int], None]


def evaluate_run(
    source: Source,
    *,
    dataset: str | None = None,
    data_root: str | Path | None = None,
    split: Which = "test",
    adapt: bool = False,
    site: str | None = None,
    algorithm: Given | None = None,
    device: str = "auto",
    set: Sequence[str] = (),
    on_domain: OnDomain | None = None,
    on_file: OnFile | None = None,
    trust_code: bool = False,
) -> Evaluation:
    """Test the model of a finished run, on its own test images unless other data are named.

    Images that the run trained on or chose on are left out, unless `split` is "train" or "val".
    With `adapt`, BatchNorm statistics are first taken from each domain's images, without their labels.
    """
    if split not in get_args(Which):
        raise InputError(f"split cannot be {split!r}; {nearest(str(split), get_args(Which))}")
    run = as_run(source, trust_code)
    own = has_own_parts(run, run.method(algorithm)) and site is None
    here = {client["domain"] for client in run.manifest["clients"] if client.get("train")}

    def open_site(name: str | None) -> Trained:
        train = _train_images(run, name) if own and dataset is data_root is None and not set else None
        trained = open_trained(run, site=name, algorithm=algorithm, device=device, train=train)
        return trained.with_cached_features()

    first = open_site(min(here) if own else site)
    domains = _data(run, first, dataset, data_root, set, on_file)
    numbers = np.array([first.classes.index(name) for name in _known(domains, first)])
    selected, overlap = select_images(run, domains, split)
    notes = [*overlap.notes, *domains.notes]
    if not first.calibrated:
        notes.append(UNCALIBRATED)
    if adapt and not statistics_layers(first.network):
        notes.append("the model has no BatchNorm statistics, so there is nothing to adapt")
        adapt = False
    if own and (unknown := next((name for name in domains.names if name not in here), None)) is not None:
        raise InputError(
            f"no client of {run.path} trained on {unknown!r}, so it has no model of its own: choose one "
            f"as site, from {', '.join(sorted(here))}"
        )
    tested = []
    for number, domain in enumerate(domains, start=1):
        trained = first
        if own:
            trained = open_site(domain.name)
        if (images := selected.get(domain.name)) is not None:
            with threads(run.config.run.threads):  # as in the run's own tests, bit by bit
                tested.append(_tested(trained, domain, images, numbers, adapt, split, domain.name in here))
        if on_domain is not None:
            on_domain(number, len(domains))
    if not tested:
        raise InputError(f"{domains.name} has no images to evaluate on")
    temperature = first.calibration.temperature if first.calibrated else None
    name = run.path.resolve().name
    return Evaluation(name, domains.name, split, first.classes, tuple(tested), temperature, tuple(notes), overlap)


def _train_images(run: Run, domain: str | None) -> Examples | None:
    """The training images of a domain's first client, if it never trained: its test needs them."""
    number = next(client["id"] for client in run.manifest["clients"] if client["domain"] == domain)
    if ClientStore(run.path / "clients").load(number, run.saved_round + 1):
        return None
    client: Client = federation_from(*data_of_run(run)).clients[number]
    return client.train


def _data(
    run: Run,
    trained: Trained,
    dataset: str | None,
    data_root: str | Path | None,
    set: Sequence[str],
    on_file: OnFile | None,
) -> Domains:
    """The run's own data, or those that are named, at the size that the model takes."""
    if dataset is None and data_root is None and not set:
        return data_of_run(run)[1]
    own = dataset in (None, run.config.data.name)
    data = {**(config_tables(run.config)["data"] if own else {"name": dataset}), "image_size": trained.size}
    if trained.channels == GREY:
        data["channels"] = GREY
    tables: dict[str, Any] = {"data": data if data_root is None else {**data, "root": str(data_root)}}
    for assignment in set:
        section, _, _ = assignment.partition(".")
        if section != "data":
            raise InputError(f"set takes settings of the data only, such as data.classes=..., got {assignment!r}")
        tables = merged(tables, parse_assignment(assignment))
    asked = config_from(tables).data
    domains = open_dataset(replace(asked, val_fraction=0.0, train_per_domain=None), run.config.run.seed, on_file, False)
    height, width, channels = domains.image_shape
    if (height, width, channels) != (trained.size, trained.size, trained.channels):
        raise InputError(
            f"the model takes images of {trained.size}x{trained.size} with {trained.channels} channels, "
            f"but {domains.name} gives {height}x{width} with {channels}"
        )
    return domains


def _known(domains: Domains, trained: Trained) -> tuple[str, ...]:
    """The dataset's classes, each of which the model must know."""
    unknown = [name for name in domains.classes if name not in trained.classes]
    if unknown:
        many = "classes" if len(unknown) > 1 else "class"
        raise InputError(
            f"the model does not know the {many} {', '.join(map(repr, unknown[:5]))} of {domains.name}; it knows "
            f"{', '.join(name[:100] for name in trained.classes[:100])}: leave the others out with data.classes"
        )
    return domains.classes


def _tested(
    trained: Trained, domain: Domain, images: Split, numbers: Any, adapt: bool, split: Which, trained_on: bool
) -> Judged:
    probabilities = _probabilities(trained, images)
    before = None
    if adapt:
        before = probabilities.argmax(axis=1)
        unlabelled = domain.train if split == "test" and len(domain.train) else images
        network = adapted(trained.network, _inputs(replace(trained, features=None), unlabelled))
        probabilities = _probabilities(trained.with_network(network), images)
    return Judged(domain.name, numbers[images.labels], probabilities, trained_on, before)


def _inputs(trained: Trained, images: Split) -> Iterator[Tensor]:
    rows = drawn(len(images), ADAPTED_ON, 0, "adapt")
    for start in range(0, len(rows), BATCH):
        if len(some := rows[start : start + BATCH]) > 1 or len(rows) == 1:  # BatchNorm needs two
            yield trained.inputs(images.pixels(some))


def _probabilities(trained: Trained, images: Split) -> Any:
    parts = [
        trained.judged(images.pixels(np.arange(start, min(start + EVALUATION_BATCH, len(images)))))[0]
        for start in range(0, len(images), EVALUATION_BATCH)
    ]
    return torch.cat(parts).numpy()
