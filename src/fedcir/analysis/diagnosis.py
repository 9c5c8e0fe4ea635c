"""Diagnose feature shift and label skew: of a dataset before training, and of a finished run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcir.algorithms import make_algorithm
from fedcir.analysis.divergence import (
    LEAST,
    NO_DIVERGENCES,
    Alignment,
    Bound,
    Divergences,
    compute_bound,
    divergences,
    measure_alignment,
)
from fedcir.config import BUILTIN_MODELS, Config, ModelConfig
from fedcir.data.columns import ColumnComparison, compare_columns
from fedcir.data.decoding import OnFile
from fedcir.data.domains import CLASSIFICATION, Domains
from fedcir.data.federation import build_federation, partition_dataset
from fedcir.data.inspection import summarise_targets
from fedcir.data.opening import get_source
from fedcir.data.partition import ClientPartition
from fedcir.errors import InputError
from fedcir.inference.evaluation import DomainPredictions, build_untrained_model, predict_domains, predict_run
from fedcir.runs.evaluation_data import SEED, exclude_seen_images, open_run_data, sample_rows
from fedcir.runs.reader import RunSource, to_run
from fedcir.runs.statistics import Interval, bootstrap_mean
from fedcir.runtime.resume import use_saved_code
from fedcir.text import join_names

OnDistance = Callable[[int, int], None]
Counts = NDArray[np.int64]

UNTRAINED = "an untrained encoder"
SHIFT_PIXELS = 32
"""Width and height of the images on which feature shift is measured."""
SHIFT_SAMPLES = 1000
"""Most training images of each domain on which feature shift is measured."""


@dataclass(frozen=True)
class PixelStatistics:
    """Mean brightness and contrast of a domain's images, from 0 to 1."""

    brightness: float
    contrast: float


@dataclass(frozen=True)
class Diagnosis:
    """Distances, label skew and predictions of a dataset or of a run."""

    name: str
    classes: tuple[str, ...]
    predictions: list[DomainPredictions]
    """All test images of a run, or a sample of the training images of a dataset."""
    divergences: Divergences
    """Empty if the network gives no representations."""
    labels: dict[str, Counts]
    """Number of training images of each class by client; empty for tasks without classes."""
    pixels: dict[str, PixelStatistics] | None = None
    """Set for a dataset before training; empty if it holds no images."""
    bound: Bound | None = None
    """Set for runs with one model for all clients, if distances were measured."""
    alignment: Alignment | None = None
    encoder: str = UNTRAINED
    """Description of the network that gave the representations."""
    is_shift: bool = False
    """Whether distances are the feature shift that `init`, `recommend` and `diagnose` report."""
    notes: tuple[str, ...] = ()
    seed: int = 0
    client_domains: dict[str, str] = field(default_factory=dict)
    """Domain of every client in `labels`."""
    sample: list[DomainPredictions] = field(default_factory=list)
    """Images on which distances, KL and pictures are based."""
    unseen: tuple[str, ...] = ()
    """Domains that no client trains on."""
    targets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Distribution of the targets of each domain, for tasks without classes."""
    columns: tuple[ColumnComparison, ...] = ()
    """Columns of tables, as each domain holds them."""
    noun: str = "image"
    """What a sample is called."""

    @property
    def is_run(self) -> bool:
        return self.pixels is None

    @property
    def measured(self) -> bool:
        """Whether distances were measured."""
        return bool(self.divergences.pairs)

    @property
    def missing_reason(self) -> str:
        """Why distances are missing; empty if they were measured."""
        return "" if self.measured else "its network has no part `encoder` that returns (batch, features)"

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Notes on the data, and on missing distances."""
        return self.notes if self.measured else (*self.notes, f"no distances for {self.name}: {self.missing_reason}")

    @property
    def domains(self) -> list[str]:
        return [domain.domain for domain in self.predictions]

    @property
    def seen(self) -> list[DomainPredictions]:
        """Predictions on the domains that some client trains on."""
        return [domain for domain in self.predictions if domain.domain not in self.unseen]

    @property
    def skew(self) -> dict[str, float]:
        """Label skew of each client's training images."""
        return label_skew(self.labels)

    @property
    def test_skew(self) -> dict[str, float]:
        """Label skew of each domain's predicted images, which affects the distances."""
        size = len(self.classes)
        if not size:
            return {}
        return label_skew({domain.domain: np.bincount(domain.labels, minlength=size) for domain in self.predictions})

    @property
    def shared(self) -> bool:
        """Whether clients differ from domains, because several share one domain or one holds several."""
        return any(client != domain for client, domain in self.client_domains.items())

    @property
    def furthest(self) -> str:
        """Domain with the largest distance to the mixture."""
        return max(self.divergences.to_mixture, key=lambda name: self.divergences.to_mixture[name].value)

    @property
    def accuracy(self) -> dict[str, Interval]:
        return {d.domain: bootstrap_mean({d.domain: d.is_correct}, self.seed) for d in self.predictions}

    @property
    def mean_accuracy(self) -> Interval:
        """Mean over the domains that some client trains on."""
        return bootstrap_mean({d.domain: d.is_correct for d in self.seen}, self.seed)

    @property
    def risk(self) -> dict[str, Interval]:
        """Mean test loss by domain."""
        return {d.domain: bootstrap_mean({d.domain: d.losses}, self.seed) for d in self.predictions}

    @property
    def recall(self) -> NDArray[np.float64]:
        """Recall by class and domain; nan for fewer than two test images of a class."""
        counts = np.stack([domain.confusion for domain in self.predictions], axis=-1)  # (C, C, domains)
        images = counts.sum(axis=1)
        return np.where(images > 1, np.einsum("iid->id", counts) / np.maximum(images, 1), np.nan)

    def domain(self, name: str) -> DomainPredictions:
        return next(domain for domain in self.predictions if domain.domain == name)

    def confusion(self, domain: str) -> Counts:
        """Confusion matrix: rows are true classes, columns are predictions."""
        return self.domain(domain).confusion

    def class_metrics(self, domain: str) -> dict[str, float]:
        """AUC, F1, sensitivity and specificity of two classes, the second as positive; macro F1 of more."""
        return self.domain(domain).class_metrics

    def list_common_mistakes(self, limit: int = 3) -> list[str]:
        """Describe the most frequent confusions, of classes with at least two test images in a domain."""
        mistakes = []
        for domain in self.predictions:
            images = domain.confusion.sum(axis=1)
            for true, predicted in np.argwhere(domain.confusion):
                count = domain.confusion[true, predicted]
                if images[true] > 1 and true != predicted:
                    pair = f"{self.classes[true]} for {self.classes[predicted]}"
                    text = f"{pair} in {domain.domain} ({count} of {images[true]})"
                    mistakes.append((count / images[true], count, text))
        return [text for *_, text in sorted(mistakes, key=lambda mistake: (-mistake[0], -mistake[1]))[:limit]]

    def to_json(self) -> dict[str, Any]:
        distances, bound, alignment = self.divergences, self.bound, self.alignment
        pad = risk = kl = metrics = None
        if self.measured:
            pad = {
                "pairs": {"/".join(pair): asdict(interval) for pair, interval in distances.pairs.items()},
                "to_mixture": {name: asdict(interval) for name, interval in distances.to_mixture.items()},
                "mean_pair": asdict(distances.mean_pair),
                "mean_to_mixture": asdict(distances.mean_to_mixture),
            }
        if bound is not None:
            risk = {"global_risk": bound.global_risk, "divergence": bound.divergence, **asdict(bound)}
        if alignment is not None:
            generator = None if alignment.generator_interval is None else alignment.generator
            kl = {"clients": alignment.clients, "generator": generator, **asdict(alignment)}
        if self.is_run:
            metrics = {
                d.domain: {name: None if math.isnan(value) else value for name, value in d.class_metrics.items()}
                for d in self.predictions
            }
        return {
            "name": self.name,
            "classes": list(self.classes),
            "pad": pad,
            "mean_pair": distances.mean_pair.value if self.measured else None,
            "targets": self.targets,
            "columns": [asdict(column) for column in self.columns],
            "labels": {name: counts.tolist() for name, counts in self.labels.items()},
            "label_skew": self.skew,
            "pixels": None if self.pixels is None else {name: asdict(pixels) for name, pixels in self.pixels.items()},
            "accuracy": {domain.domain: domain.accuracy for domain in self.predictions} if self.is_run else None,
            "accuracy_intervals": {name: asdict(v) for name, v in self.accuracy.items()} if self.is_run else None,
            "risk_intervals": {name: asdict(v) for name, v in self.risk.items()} if self.is_run else None,
            "bound": risk,
            "alignment": kl,
            "beside_accuracy": metrics,
            "confusion": {d.domain: d.confusion.tolist() for d in self.predictions} if self.is_run else None,
            "notes": list(self.all_notes),
        }


def label_skew(labels: Mapping[str, Counts]) -> dict[str, float]:
    """Compute each client's total variation to the mean label distribution, from 0 to 1."""
    if not labels:
        return {}
    shares = {name: counts / counts.sum() for name, counts in labels.items()}
    mean = np.mean(list(shares.values()), axis=0)
    return {name: float(np.abs(share - mean).sum() / 2) for name, share in shares.items()}


def shift_config(config: Config) -> Config:
    """Return the settings under which feature shift is measured, whatever is trained later.

    The encoder is an untrained `cnn` on images of 32 pixels, or of their own size for arrays. Tables and other arrays
    are measured as they are. No validation images are set aside, so that the measure does not depend on their share.
    """
    size = SHIFT_PIXELS if get_source(config.data.name).has_image_files else None
    return replace(config, data=replace(config.data, image_size=size, val_fraction=0.0), model=ModelConfig())


def diagnose_data(
    config: Config,
    limit: int | None = SHIFT_SAMPLES,
    on_distance: OnDistance | None = None,
    on_file: OnFile | None = None,
) -> Diagnosis:
    """Diagnose a dataset before training, on training examples of the domains that clients train on.

    This is the feature shift that `init`, `recommend` and `diagnose` report, unless the config names an encoder or an
    image size. Tables and arrays of floats are compared as they are, encoded and scaled as in training.
    """
    is_shift = config.model == ModelConfig() and config.data.image_size in (None, SHIFT_PIXELS)
    config = shift_config(config) if is_shift else config
    seed = config.run.seed
    dataset, partitions = partition_dataset(config, on_file)
    trained = {domain for partition in partitions for domain in partition.rows}
    domains = [replace(d, test=d.train, validation=None) for d in dataset if d.name in trained]
    training_data = replace(dataset, domains=tuple(domains))
    _check_size(training_data, "training")
    columns = compare_columns(training_data)
    targets = {} if dataset.task.has_classes else summarise_targets(training_data)
    if not dataset.task.has_classes:  # distances do not depend on targets
        training_data = _use_strata(training_data)
    if is_shift and not dataset.has_images:
        config = replace(config, model=ModelConfig("linear"))
    federation = build_federation(config, training_data, [part for part in partitions if part.domain in trained])
    predictions = predict_domains(build_untrained_model(config, federation.builder), federation, limit, seed)
    pixels = {}
    for domain in domains if dataset.has_images else ():
        images = domain.train.pixels(sample_rows(len(domain.train), 256, seed, domain.name)) / 255
        pixels[domain.name] = PixelStatistics(float(images.mean()), float(images.std(axis=(1, 2, 3)).mean()))
    clients, labels = _count_labels(dataset, partitions)
    if not dataset.task.has_classes:
        labels = {}
    measured = "distances are those of the domains, on their training"
    return Diagnosis(
        config.data.name,
        dataset.classes,
        predictions,
        divergences(_compute_representations(predictions), seed, on_distance),
        labels,
        pixels,
        encoder="" if is_shift and not dataset.has_images else UNTRAINED if is_shift else _describe_encoder(config),
        is_shift=is_shift,
        targets=targets,
        columns=columns,
        noun=dataset.noun,
        notes=tuple(_note_shared_domains(training_data, clients, measured)),
        seed=seed,
        client_domains=clients,
        sample=predictions,
    )


def diagnose_run(
    source: RunSource,
    data_root: str | None = None,
    limit: int | None = None,
    on_distance: OnDistance | None = None,
    trust_code: bool = False,
) -> Diagnosis:
    """Diagnose a finished run on all its test images, with the predictions of its algorithm.

    Distances use at most `limit` images of each domain. `trust_code` allows code that is stored with the run to be
    executed.
    """
    run = to_run(source, trust_code)
    run = replace(run, config=use_saved_code(run.config, run.path, run.trust_code))
    if run.finished and not run.task.has_classes:
        fix = "`fedcir evaluate` gives its scores by site; diagnose its data with dataset and data_root"
        raise InputError(f"{run.path} is a run of {run.task.name}, and diagnose takes runs of classification: {fix}")
    config, domains, partitions = open_run_data(run, data_root)
    domains, overlap = exclude_seen_images(run, domains)
    _check_size(domains, "test")
    columns = compare_columns(domains)
    federation = build_federation(config, domains, partitions)
    state = run.state()
    shared = {} if state is None else state.shared
    predictions = predict_run(run, config, federation)
    sample = [domain.sample(limit, SEED) for domain in predictions]
    is_measured = all(domain.z is not None for domain in predictions)
    has_bound = is_measured and make_algorithm(config.algorithm).one_model  # it bounds the risk of one model for all
    distances = divergences(_compute_representations(sample), SEED, on_distance) if is_measured else NO_DIVERGENCES
    seen = [domain for domain in predictions if domain.domain not in federation.unseen]
    clients, labels = _count_labels(domains, partitions)
    measured = "distances and accuracies are those of the domains, on their test"
    return Diagnosis(
        run.path.name,
        domains.classes,
        predictions,
        distances,
        labels,
        bound=compute_bound(seen, distances, SEED) if has_bound else None,
        alignment=measure_alignment(sample, shared["gaussians"], SEED) if "gaussians" in shared else None,
        encoder="its model",
        notes=(*overlap.notes, *_note_shared_domains(domains, clients, measured), *_note_rare_classes(domains)),
        seed=SEED,
        client_domains=clients,
        sample=sample,
        unseen=federation.unseen,
        columns=columns,
        noun=domains.noun,
    )


def _use_strata(domains: Domains) -> Domains:
    """Replace the targets of a task without classes by the strata of its examples."""
    count = 1 + max(int(split.labels.max()) for domain in domains for split in domain.splits)
    classes = tuple(f"stratum {number}" for number in range(max(2, count)))
    without = replace(domains, classes=classes, task=CLASSIFICATION)
    return without.map_splits(lambda split: replace(split, targets=None))


def _compute_representations(predictions: Sequence[DomainPredictions]) -> dict[str, NDArray[np.float32]]:
    return {domain.domain: domain.z for domain in predictions if domain.z is not None}


def _describe_encoder(config: Config) -> str:
    model, size = config.model, config.data.image_size
    pixels = "" if size is None else f" at {size} pixels"
    if model.weights is None and model.name in BUILTIN_MODELS:
        return f"an untrained {model.name}{pixels}"
    return f"the encoder of {model.weights or model.name}{pixels}"


def _count_labels(domains: Domains, partitions: Sequence[ClientPartition]) -> tuple[dict[str, str], dict[str, Counts]]:
    """Return the domain and the class counts of every client that trains.

    Clients have the names that `fedcir data partition` shows, or those of their domains if each holds one domain.
    """
    labels = {domain.name: domain.train.labels for domain in domains}
    trained = {number: partition for number, partition in enumerate(partitions) if partition.rows}
    is_alone = len({part.domain for part in trained.values()}) == len(trained) and all(
        list(part.rows) == [part.domain] for part in trained.values()
    )
    names = {number: part.name or (part.domain if is_alone else str(number)) for number, part in trained.items()}
    return (
        {names[number]: part.domain for number, part in trained.items()},
        {names[number]: part.counts(labels, len(domains.classes)) for number, part in trained.items()},
    )


def _check_size(domains: Domains, part: str) -> None:
    if len(domains) < 2:
        raise InputError(f"{domains.name} has only one domain, {domains.names[0]!r}: a distance needs two")
    for domain in domains:
        if len(domain.test) < 2 * LEAST:
            images = f"{len(domain.test)} {part} {domains.noun}s"
            raise InputError(f"domain {domain.name!r} has {images}, but a diagnosis needs at least {2 * LEAST}")


def _note_shared_domains(domains: Domains, clients: Mapping[str, str], measured: str) -> list[str]:
    """Say that label skew concerns clients, and what was `measured` concerns domains, if the two differ."""
    if all(client == domain for client, domain in clients.items()):
        return []
    shared = f"{len(clients)} clients share the training {domains.noun}s of {len(domains)} domains"
    skew = "label skew is that of these clients; " if len(domains.classes) else ""
    return [f"{shared}: {skew}{measured} {domains.noun}s"]


def _note_rare_classes(domains: Domains) -> list[str]:
    rare = []
    for domain in domains:
        splits = (domain.test, domain.train)
        tested, trained = (np.bincount(split.labels, minlength=len(domains.classes)) for split in splits)
        labels = np.flatnonzero((tested == 1) | (tested + trained == 1))
        rare += [f"{domains.classes[label]} in {domain.name}" for label in labels]
    return [f"at most one test {domains.noun} of {join_names(rare)}: left out of the results by class"] if rare else []
