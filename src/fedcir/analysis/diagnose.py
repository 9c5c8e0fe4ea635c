"""Do clients differ, where, and did training close the gap: of data before any training, and of runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.algorithms import make_algorithm
from fedcir.analysis.alignment import alignment
from fedcir.analysis.bound import bound
from fedcir.analysis.diagnosis import UNTRAINED, Diagnosis, Pixels
from fedcir.analysis.divergence import LEAST, NOWHERE, divergences
from fedcir.analysis.overlap import unseen_tests
from fedcir.analysis.views import SEED, data_of_run, drawn, untrained, views_of, views_under
from fedcir.analysis.words import verdict
from fedcir.config import OWN_MODELS, Config, ModelConfig
from fedcir.data.catalogue import SOURCES
from fedcir.data.domains import Domains
from fedcir.data.federation import deal, federation_from
from fedcir.data.partition.shares import Share
from fedcir.data.pictures.decode import OnFile
from fedcir.engine.trust import trusted
from fedcir.runs.run import Source, as_run
from fedcir.types import InputError

__all__ = ["Diagnosis", "Pixels", "as_json", "diagnose_data", "diagnose_run", "shift_config", "verdict"]

OnDistance = Callable[[int, int], None]

SHIFT_PIXELS = 32
"""Width and height of the images that feature shift is measured on."""
SHIFT_SAMPLES = 1000
"""Training images of each domain at most that it is measured on."""


def shift_config(config: Config) -> Config:
    """The settings that the feature shift of some data is measured under, whatever is trained on them later.

    An untrained `cnn` on images of 32 pixels, or of their own size where they come as arrays. No validation images are
    set aside, so that the measure does not depend on their share.
    """
    size = SHIFT_PIXELS if SOURCES[config.data.name].pictures is not None else None
    return replace(config, data=replace(config.data, image_size=size, val_fraction=0.0), model=ModelConfig())


def diagnose_data(
    config: Config,
    limit: int | None = SHIFT_SAMPLES,
    on_distance: OnDistance | None = None,
    on_file: OnFile | None = None,
) -> Diagnosis:
    """Data before any training, on training images of the domains that clients train on.

    It is the measure of feature shift that `init`, `recommend` and `diagnose` share, unless the config names an encoder
    or an image size of its own.
    """
    is_shift = config.model == ModelConfig() and config.data.image_size in (None, SHIFT_PIXELS)
    config = shift_config(config) if is_shift else config
    seed = config.run.seed
    everything, shares = deal(config, on_file)
    trained = {domain for share in shares for domain in share.rows}
    domains = [replace(d, test=d.train, validation=None) for d in everything if d.name in trained]
    measured = replace(everything, domains=tuple(domains))
    _check(measured, "training")
    federation = federation_from(config, measured, [share for share in shares if share.domain in trained])
    views = views_of(untrained(config, federation.task), federation, limit, seed)
    pixels = {}
    for domain in domains:
        some = domain.train.pixels(drawn(len(domain.train), 256, seed, domain.name)) / 255
        pixels[domain.name] = Pixels(float(some.mean()), float(some.std(axis=(1, 2, 3)).mean()))
    apart = divergences({view.domain: view.z for view in views}, seed, on_distance)
    names, labels = _by_client(everything, shares)
    return Diagnosis(
        config.data.name,
        everything.classes,
        views,
        apart,
        labels,
        pixels,
        encoder=UNTRAINED if is_shift else _encoder(config),
        is_shift=is_shift,
        notes=_shared(measured, names, "distances are those of the domains, on their training images"),
        seed=seed,
        domain_of=names,
        sample=views,
    )


def _encoder(config: Config) -> str:
    model, size = config.model, config.data.image_size
    pixels = "" if size is None else f" at {size} pixels"
    if model.weights is None and model.name in OWN_MODELS:
        return f"an untrained {model.name}{pixels}"
    return f"the encoder of {model.weights or model.name}{pixels}"


def diagnose_run(
    source: Source,
    data_root: str | None = None,
    limit: int | None = None,
    on_distance: OnDistance | None = None,
    trust_code: bool = False,
) -> Diagnosis:
    """A finished run, or the one at a path, on all images that it was tested on.

    Distances are of at most `limit` images of each domain. Predictions are the algorithm's own. With `trust_code`, code
    that the run names may run.
    """
    run = as_run(source, trust_code)
    run = replace(run, config=trusted(run.config, run.path, run.trust_code))
    config, domains, shares = data_of_run(run, data_root)
    domains, overlap = unseen_tests(run, domains)
    _check(domains, "test")
    federation = federation_from(config, domains, shares)
    state = run.state()
    shared = {} if state is None else state.shared
    views = views_under(run, config, federation)
    sample = [view.sample(limit, SEED) for view in views]
    measured = all(view.z.size for view in views)
    has_bound = measured and make_algorithm(config.algorithm).one_model  # it bounds the risk of one model for all
    apart = divergences({view.domain: view.z for view in sample}, SEED, on_distance) if measured else NOWHERE
    names, labels = _by_client(domains, shares)
    return Diagnosis(
        run.path.name,
        domains.classes,
        views,
        apart,
        labels,
        bound=bound([v for v in views if v.domain not in federation.unseen], apart, SEED) if has_bound else None,
        aligned=alignment(sample, shared["gaussians"], SEED) if "gaussians" in shared else None,
        encoder="its model",
        notes=(*overlap.notes, *_notes(domains, names)),
        seed=SEED,
        domain_of=names,
        sample=sample,
        unseen=federation.unseen,
    )


def _by_client(domains: Domains, shares: Sequence[Share]) -> tuple[dict[str, str], dict[str, NDArray[np.int64]]]:
    """The domain of every client that trains, and how many images of each class it has.

    Clients have the names that `fedcir data partition` shows, or their domains' where each is all of one.
    """
    labels = {domain.name: domain.train.labels for domain in domains}
    held = {number: share for number, share in enumerate(shares) if share.rows}
    apart = len({share.domain for share in held.values()}) == len(held)
    alone = apart and all(list(share.rows) == [share.domain] for share in held.values())
    names = {number: share.name or (share.domain if alone else str(number)) for number, share in held.items()}
    return (
        {names[number]: share.domain for number, share in held.items()},
        {names[number]: share.counts(labels, len(domains.classes)) for number, share in held.items()},
    )


def _check(domains: Domains, part: str) -> None:
    if len(domains) < 2:
        raise InputError(f"{domains.name} has only one domain, {domains.names[0]!r}: a distance needs two")
    for domain in domains:
        if len(domain.test) < 2 * LEAST:
            raise InputError(
                f"domain {domain.name!r} has {len(domain.test)} {part} images, "
                f"but a diagnosis needs at least {2 * LEAST}"
            )


def _shared(domains: Domains, clients: Mapping[str, str], others: str) -> tuple[str, ...]:
    """A note where clients are not the domains: label skew is of clients, and the `others` are of domains."""
    if all(client == domain for client, domain in clients.items()):
        return ()
    return (
        f"{len(clients)} clients share the training images of {len(domains)} domains: label skew is that of these "
        f"clients; {others}",
    )


def _notes(domains: Domains, clients: Mapping[str, str]) -> tuple[str, ...]:
    notes = [*_shared(domains, clients, "distances and accuracies are those of the domains, on their test images")]
    single = []
    for domain in domains:
        tested, trained = (
            np.bincount(split.labels, minlength=len(domains.classes)) for split in (domain.test, domain.train)
        )
        rare = np.flatnonzero((tested == 1) | (tested + trained == 1))
        single += [f"{domains.classes[label]} in {domain.name}" for label in rare]
    if single:
        more = f" and {len(single) - 5} more" if len(single) > 5 else ""
        named = ", ".join(single[:5])
        notes.append(f"at most one test image of {named}{more}: left out of the results by class")
    return tuple(notes)


def as_json(found: Diagnosis) -> dict[str, Any]:
    """The numbers for a program."""
    run = found.of_run
    return {
        "name": found.name,
        "classes": list(found.classes),
        "pad": {
            "pairs": {"/".join(pair): asdict(each) for pair, each in found.apart.pairs.items()},
            "to_mixture": {name: asdict(each) for name, each in found.apart.to_mixture.items()},
            "mean_pair": asdict(found.apart.mean_pair),
            "mean_to_mixture": asdict(found.apart.mean_to_mixture),
        }
        if found.measured
        else None,
        "mean_pair": found.apart.mean_pair.value if found.measured else None,
        "labels": {name: counts.tolist() for name, counts in found.labels.items()},
        "label_skew": found.skew,
        "pixels": None if found.pixels is None else {name: asdict(each) for name, each in found.pixels.items()},
        "accuracy": {view.domain: view.accuracy for view in found.views} if run else None,
        "accuracy_intervals": {name: asdict(each) for name, each in found.accuracy.items()} if run else None,
        "risk_intervals": {name: asdict(each) for name, each in found.risk.items()} if run else None,
        "bound": _bound(found),
        "alignment": _alignment(found),
        "beside_accuracy": {domain: _numbers(found.beside_accuracy(domain)) for domain in found.domains}
        if run
        else None,
        "confusion": {domain: found.confusion(domain).tolist() for domain in found.domains} if run else None,
        "notes": list(found.told),
        "verdict": verdict(found),
    }


def _numbers(found: dict[str, float]) -> dict[str, float | None]:
    """JSON has no nan."""
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def _bound(found: Diagnosis) -> dict[str, Any] | None:
    if found.bound is None:
        return None
    return {"global_risk": found.bound.global_risk, "divergence": found.bound.divergence, **asdict(found.bound)}


def _alignment(found: Diagnosis) -> dict[str, Any] | None:
    if found.aligned is None:
        return None
    generator = None if found.aligned.generator_interval is None else found.aligned.generator
    return {"clients": found.aligned.clients, "generator": generator, **asdict(found.aligned)}
