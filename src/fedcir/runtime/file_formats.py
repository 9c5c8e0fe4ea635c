"""Formats of the files in a run folder: the fields that are read, their checks, and how records are written."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from fedcir import files
from fedcir.config import MAX_IMAGE_SIZE, PATH_SETTINGS, Config, ModelConfig
from fedcir.data.domains import HashKind
from fedcir.data.encoding import read_encoding
from fedcir.data.splits import ImageHashes
from fedcir.errors import InputError
from fedcir.models.hugging_face import find_folder, hash_folder
from fedcir.plugins import find_file
from fedcir.tasks.classification import read_task
from fedcir.tasks.task import list_tasks
from fedcir.tensor_files import compute_tensor_checksum
from fedcir.text import join_names
from fedcir.types import ACCURACY, Metric, RoundRecord
from fedcir.validation import Between, build_dataclass, check_type


def find_best(records: Sequence[RoundRecord]) -> RoundRecord | None:
    """Return the first record of the best mean score, on validation examples if any; None if none was evaluated."""
    evaluated = [record for record in records if record.score_mean is not None]
    has_validation = any(record.validation for record in evaluated)

    def quality(record: RoundRecord) -> float:
        scores = list((record.validation or {}).values()) if has_validation else [record.score_mean or 0.0]
        sign = 1 if record.metric.higher_is_better else -1
        return sign * sum(scores) / len(scores) if scores else -math.inf

    return max(evaluated, key=lambda record: (quality(record), -record.round), default=None)


def round_to_save(records: Sequence[RoundRecord], keep: str) -> int:
    """Return the round whose model is saved: the last, or with keep="best" the best on validation images."""
    last = records[-1].round if records else 0
    if keep == "last":
        return last
    best = find_best([record for record in records if record.validation])
    return last if best is None else best.round


def has_stalled(records: Sequence[RoundRecord], patience: int | None) -> bool:
    """Check whether the last `patience` validations brought no better mean score."""
    validated = [record for record in records if record.validation]
    best = find_best(validated)
    return patience is not None and best is not None and len(validated) - 1 - validated.index(best) >= patience


class Scores(TypedDict):
    """Scores of a round in summary.json, where the name of the metric stands for "score"."""

    round: int
    scores: dict[str, float]
    score_mean: float | None
    score_weighted: float | None
    score_worst: float | None
    score_unseen: NotRequired[float | None]


class Guarantee(TypedDict):
    """Differential privacy of a run with noise."""

    epsilon: float
    delta: float
    unit: Literal["client", "example"]
    place: Literal["server", "client"]
    adjacency: NotRequired[Literal["zero-out", "replace-one"]]
    """Missing in runs of earlier versions, like `randomness`."""
    randomness: NotRequired[Literal["seed", "system"]]


class SavedModel(TypedDict):
    """Round of the saved model, and the rule that picked it."""

    round: int
    keep: Literal["last", "best"]


class SavedCost(TypedDict):
    peak_memory: NotRequired[int]


class Summary(TypedDict):
    """Fields of summary.json that are read."""

    algorithm: str
    dataset: str
    seed: int
    rounds: int
    final: dict[str, object] | None
    best: dict[str, object] | None
    cost: SavedCost
    saved: NotRequired[SavedModel]
    """Missing in runs of earlier versions, which saved the model of the last round."""
    privacy: NotRequired[Guarantee]
    model: NotRequired[str]
    """Checksum of model.safetensors."""


class SavedSums(TypedDict):
    """Contents of sums.json: sums of a task's metrics over the test examples of each domain."""

    round: int
    domains: dict[str, dict[str, float]]


def check_summary(summary: Mapping[str, Any]) -> None:
    """Refuse scores of wrong types, and those that are no fractions where the metric is a share."""
    metric = read_metric(summary)
    for part in ("final", "best"):
        if summary[part] is None:
            continue
        scores = check_type(metric.to_fields(summary[part]), Scores, part)
        means = {name: value for name, value in scores.items() if name.startswith("score_")}
        for name, value in {**means, **scores["scores"]}.items():
            if metric.is_share and value is not None:
                Between(0, 1).check(f"{part}.{name}", value)


def read_metric(values: Mapping[str, Any]) -> Metric:
    """Primary metric of a record or a summary, which runs of classification leave out."""
    metric: Metric = check_type(values.get("metric", ACCURACY), Metric, "metric")
    return metric


class CardMethod(TypedDict):
    name: str


class Card(TypedDict):
    """Fields that are read of the metadata in model.safetensors."""

    classes: list[str]
    """Empty for tasks without classes."""
    task: NotRequired[dict[str, object]]
    """Missing for classification."""
    model: dict[str, object]
    algorithm: CardMethod
    image_size: NotRequired[int]
    channels: NotRequired[int]
    mean: NotRequired[list[float]]
    std: NotRequired[list[float]]
    shape: NotRequired[list[int]]
    table: NotRequired[dict[str, object]]
    saved: NotRequired[SavedModel]


MAX_INPUTS = 100_000_000
"""Largest number of values of an input that is no image."""
IMAGES = ("image_size", "channels", "mean", "std")
"""Fields of a model on images; runs of fedcir.train have none of them."""


def check_card(card: Mapping[str, Any]) -> None:
    """Refuse a card whose values have the right types but cannot belong to a model."""
    if str(card.get("task", {}).get("name")) in list_tasks():
        read_task(card)
    if len(set(card["classes"])) < max("task" not in card, len(card["classes"])):
        raise InputError("card.classes must name each class once, and at least one")
    present = [name for name in IMAGES if name in card]
    if "shape" in card:
        _check_shape(card)
    if not present:
        return
    if missing := sorted(set(IMAGES) - set(present)):
        raise InputError(f"card.{missing[0]} is missing")
    for name in ("image_size", "channels"):
        Between(1, MAX_IMAGE_SIZE).check(f"card.{name}", card[name])
    for name, between in (("mean", Between(-1_000, 1_000)), ("std", Between(0, 1_000, above=True))):
        if len(card[name]) != card["channels"]:
            raise InputError(f"card.{name} must have a number for each of {card['channels']} channels")
        for value in card[name]:
            between.check(f"card.{name}", value)
    build_dataclass(ModelConfig, card["model"], "card.model")


def _check_shape(card: Mapping[str, Any]) -> None:
    """Refuse a shape of inputs that no model takes, and an encoding of tables that does not give it."""
    for size in card["shape"]:
        Between(1, MAX_INPUTS).check("card.shape", size)
    Between(1, MAX_INPUTS).check("card.shape", math.prod(card["shape"]))
    if "table" in card and [len(read_encoding(card["table"]).features)] != card["shape"]:
        raise InputError("card.table does not give features of card.shape")
    build_dataclass(ModelConfig, card["model"], "card.model")


OPTIONAL_FIELDS = ("validation", "risk", "unseen", "score_unseen", "epsilon", "metrics", "metric")
"""Fields of a record that are left out of rounds.jsonl where they have their default."""
HASHED_SPLITS = ("train", "validation")
"""Tensors of image_hashes.safetensors: sorted hashes of images, as 64-bit integers."""


def compute_settings_checksum(tables: Mapping[str, Any]) -> str:
    """Checksum of all settings except paths, which a user may edit after moving the data."""
    return files.compute_checksum(
        {
            section: {name: value for name, value in values.items() if f"{section}.{name}" not in PATH_SETTINGS}
            for section, values in tables.items()
            if isinstance(values, Mapping)
        }
    )


def parse_record(line: bytes) -> RoundRecord:
    """Parse a line of rounds.jsonl. Older runs may name the cross-entropy `fl` instead of `ce`."""
    values = check_type(json.loads(line), dict, "round")
    bare = {name: value for name, value in values.items() if name != files.CHECKSUM_KEY}
    record: RoundRecord = check_type(read_metric(bare).to_fields(bare), RoundRecord, "round")
    files.verify_checksum(values, dict, "round")
    return replace(record, losses={"ce" if name == "fl" else name: value for name, value in record.losses.items()})


def format_record(record: RoundRecord) -> str:
    """Format a line of rounds.jsonl."""
    return json.dumps(files.add_checksum(_record_values(record)), ensure_ascii=False) + "\n"


def _record_values(record: RoundRecord) -> dict[str, Any]:
    """Values of a record by their names in files, without optional ones that have their default."""
    optional = (field for field in fields(record) if field.name in OPTIONAL_FIELDS)
    omitted = {record.metric.name_in_files(f.name) for f in optional if getattr(record, f.name) == f.default}
    return {name: value for name, value in record.to_values().items() if name not in omitted}


def compute_record_checksum(record: RoundRecord) -> str:
    return files.compute_checksum(_record_values(record))


def pack_image_hashes(hashes: ImageHashes) -> bytes:
    tensors = {split: torch.from_numpy(getattr(hashes, split).view(np.int64)) for split in HASHED_SPLITS}
    metadata = {"kind": hashes.kind, files.CHECKSUM_KEY: compute_tensor_checksum({"kind": hashes.kind}, tensors)}
    return save(tensors, {"fedcir": json.dumps(metadata)})


def read_image_hashes(path: Path) -> ImageHashes:
    hint = "delete it, and resume the run, which writes it again"
    with files.explain_read_errors(path, hint), safe_open(files.check_regular_file(path), framework="pt") as file:
        metadata = check_type(json.loads((file.metadata() or {}).get("fedcir", "")), dict, "metadata")
        kind: HashKind = check_type(metadata.get("kind"), HashKind, "kind")
        tensors = {split: file.get_tensor(split) for split in HASHED_SPLITS}
        if any(tensor.dtype != torch.int64 or tensor.ndim != 1 for tensor in tensors.values()):
            raise InputError("its hashes are not whole numbers of 64 bits")
        files.compare_checksums(metadata.get(files.CHECKSUM_KEY), compute_tensor_checksum({"kind": kind}, tensors))
    return ImageHashes(kind, *(np.sort(tensors[split].numpy().view(np.uint64)) for split in HASHED_SPLITS))


def hash_weights(model: ModelConfig) -> str | None:
    """Hash of an encoder's folder, or of the weights of a frozen one, which no checkpoint holds; else None."""
    if (folder := find_folder(model)) is not None:
        return hash_folder(folder)
    has_weights = model.frozen_by is not None and model.weights is not None
    return files.hash_file(Path(str(model.weights))) if has_weights else None


def find_custom_files(config: Config) -> dict[str, Path]:
    """Find the user's files that define the algorithm, the model or the task. A run saves a copy of them."""
    names = {"algorithm": config.algorithm.name, "model": config.model.name, "task": config.task.name or ""}
    custom = {role: file for role, name in names.items() if (file := find_file(name)) is not None}
    if len({file.name for file in custom.values()}) < len({file.resolve() for file in custom.values()}):
        raise InputError(f"the files of {join_names([*custom])} have one name: rename one of them")
    return custom
