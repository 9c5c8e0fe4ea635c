"""Evaluate the model of a run on any labelled examples, and write a page about the result."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from fedcir.algorithms.algorithm import PERSONAL
from fedcir.client.local_update import EVALUATION_BATCH
from fedcir.client.state import ClientStore
from fedcir.config import config_from_tables, config_to_tables, merge_tables, parse_assignment
from fedcir.data.decoding import GREY
from fedcir.data.domains import Domains, Split
from fedcir.data.encoding import encode_domains
from fedcir.data.examples import Examples, select_targets
from fedcir.data.federation import Client, build_federation
from fedcir.data.opening import open_dataset
from fedcir.errors import InputError, suggest_name
from fedcir.files import check_output_folder, write_file
from fedcir.inference.adaptation import NO_STATISTICS, adapt_model, can_adapt
from fedcir.inference.evaluation import DomainPredictions, Evaluation, collect_predictions
from fedcir.inference.model import UNCALIBRATED, AlgorithmChoice, TrainedModel, has_client_parts, open_model
from fedcir.inference.task_evaluation import DomainScores, TaskEvaluation, score_domain
from fedcir.machine import use_threads
from fedcir.reporting.charts import Bars, Chart, Heatmap, Lines, Series
from fedcir.reporting.methods import mark_unseen
from fedcir.reporting.page import Figure, Rows, Section, Sentences, Table, render_page, to_sentence
from fedcir.reporting.score_report import build_score_rows, describe_scores, render_scores
from fedcir.runs.evaluation_data import SplitName, open_run_data, select_images
from fedcir.runs.reader import Run, RunSource, to_run
from fedcir.runs.statistics import Interval
from fedcir.runtime.resume import use_saved_data, use_saved_task
from fedcir.types import OnProgress, ignore_progress

MAX_CLASSES = 60
"""Largest number of classes for which matrices are drawn."""


def evaluate(
    run: RunSource,
    *,
    dataset: str | None = None,
    data_root: str | Path | None = None,
    split: SplitName = "test",
    adapt: bool = False,
    force: bool = False,
    site: str | None = None,
    algorithm: AlgorithmChoice | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    set: Sequence[str] = (),
    trust_code: bool = False,
    on_work: OnProgress = ignore_progress,
) -> Evaluation | TaskEvaluation:
    """Evaluate the model of a finished run on labelled examples: its own test data, or any other dataset.

    Images that the run trained on or chose on (equal content) are left out, unless `split` is "train" or "val".
    `adapt` first takes each domain's statistics from its images, without their labels, and refuses a domain that is
    too unlike those of training, unless `force` is set. `set` holds further data settings, such as
    "data.classes=dog,cat". With `out`, that folder gets evaluation.html and evaluation.json. A run of another task
    than classification gives a `TaskEvaluation` with the scores of that task.
    `trust_code` allows code that is stored with the run to be executed.
    """
    if split not in get_args(SplitName):
        raise InputError(f"split cannot be {split!r}; {suggest_name(str(split), get_args(SplitName))}")
    folder = None if out is None else Path(out)
    if folder is not None:
        check_output_folder(folder)
    run = to_run(run, trust_code)
    method = run.method(algorithm)
    per_client = has_client_parts(run, method) and site is None
    has_personal = PERSONAL in method.remembers and site is None
    trained_domains = {client["domain"] for client in run.manifest["clients"] if client.get("train")}

    def open_site(name: str | None) -> TrainedModel:
        train = _find_training_images(run, name) if per_client and dataset is data_root is None and not set else None
        model = open_model(run, site=name, algorithm=algorithm, device=device, train=train)
        return model.with_cached_features()

    first = open_site(min(trained_domains) if per_client else site)
    task = first.task
    domains = _open_data(run, first, dataset, data_root, set, on_work)
    class_numbers = _match_classes(domains, first) if task.has_classes else torch.empty(0)
    images_by_domain, overlap = select_images(run, domains, split)
    notes = [*overlap.notes, *domains.notes, *([] if first.calibrated or not task.has_classes else [UNCALIBRATED])]
    if adapt and not can_adapt(first):
        notes.append(NO_STATISTICS)
        adapt = False
    missing = next((name for name in domains.names if name not in trained_domains), None)
    if per_client and missing is not None:
        sites = ", ".join(sorted(trained_domains))
        raise InputError(f"no client of {run.path} trained on {missing!r}: choose another's model, of site {sites}")
    results: list[Any] = []
    for number, domain in enumerate(domains, start=1):
        if (images := images_by_domain.get(domain.name)) is not None:
            has_own = per_client or (has_personal and domain.name in trained_domains)
            model = open_site(domain.name) if has_own else first
            unlabelled = (domain.train if split == "test" and len(domain.train) else images) if adapt else None
            with use_threads(run.config.run.threads):  # the results equal those of the run's own tests, bit by bit
                if task.has_classes:
                    result: Any = _predict_images(model, domain.name, images, class_numbers, unlabelled, force)
                else:
                    result = _score_examples(model, domain.name, images, unlabelled)
            results.append(replace(result, is_trained_on=domain.name in trained_domains))
        on_work(number, len(domains), what="testing domains")
    if not results:
        raise InputError(f"{domains.name} has no examples to evaluate on")
    about: dict[str, Any] = {
        "name": run.path.resolve().name,
        "dataset": domains.name,
        "split": split,
        "noun": first.noun,
    }
    about |= {"domains": tuple(results), "notes": tuple(notes), "overlap": overlap}
    temperature = first.calibration.temperature if first.calibrated else None
    evaluation: Evaluation | TaskEvaluation = (
        Evaluation(**about, classes=first.classes, temperature=temperature)
        if task.has_classes
        else TaskEvaluation(**about, task=task)
    )
    if folder is None:
        return evaluation
    return _write_evaluation(evaluation, folder, [str(root) for root in (data_root, run.config.data.root) if root])


def _write_evaluation(
    evaluation: Evaluation | TaskEvaluation, folder: Path, hidden_paths: Sequence[str]
) -> Evaluation | TaskEvaluation:
    """Write the page, without these paths, and the numbers, and return the evaluation with the names of both."""
    folder.mkdir(parents=True, exist_ok=True)
    evaluation = replace(evaluation, page=folder / "evaluation.html", numbers=folder / "evaluation.json")
    write_file(folder / "evaluation.html", _render_evaluation(evaluation, hidden_paths))
    write_file(folder / "evaluation.json", json.dumps(evaluation.to_json(), indent=1, ensure_ascii=False) + "\n")
    return evaluation


def _find_training_images(run: Run, domain: str | None) -> Examples | None:
    """Return the training images of a domain's first client if it never trained: its evaluation needs them."""
    number = next(client["id"] for client in run.manifest["clients"] if client["domain"] == domain)
    if ClientStore(run.path / "clients").load(number, run.saved_round + 1):
        return None
    client: Client = build_federation(*open_run_data(run)).clients[number]
    return client.train


def _open_data(
    run: Run, model: TrainedModel, dataset: str | None, root: str | Path | None, set: Sequence[str], on_work: OnProgress
) -> Domains:
    """Open the run's own data, or the named dataset at the image size of the model; tables are encoded as it was."""
    if dataset is None and root is None and not set:
        domains = open_run_data(run)[1]
        return domains if model.encoding is None else encode_domains(domains, model.encoding)
    is_own = dataset in (None, run.config.data.name)
    config = use_saved_data(run.config, run.path, run.trust_code) if dataset is None else run.config
    data: dict[str, Any] = config_to_tables(config)["data"] if is_own else {"name": dataset}
    if model.takes_images:
        data["image_size"] = model.size
        if model.channels == GREY:
            data["channels"] = GREY
    tables: dict[str, Any] = {"data": data if root is None else {**data, "root": str(root)}}
    for assignment in set:
        if assignment.partition(".")[0] != "data":
            raise InputError(f"set takes settings of the data only, such as data.classes=..., got {assignment!r}")
        tables = merge_tables(tables, parse_assignment(assignment))
    settings = replace(config_from_tables(tables).data, val_fraction=0.0, train_per_domain=None)
    saved = use_saved_task(config.task, run.path, run.trust_code).name
    task = saved if model.task.has_classes else model.task
    domains = open_dataset(settings, run.config.run.seed, partial(on_work, what="decoding images"), False, task=task)
    if domains.columns:
        if model.encoding is None:
            raise InputError(f"the model takes no tables, which {domains.name} holds: name other data")
        return encode_domains(domains, model.encoding)
    if model.encoding is not None or domains.input_shape != model.shape or domains.has_images != model.takes_images:
        takes = "tables" if model.encoding is not None else _describe_shape(model.takes_images, model.shape)
        gives = _describe_shape(domains.has_images, domains.input_shape)
        raise InputError(f"the model takes {takes}, but {domains.name} gives {gives}")
    return domains


def _describe_shape(is_image: bool, shape: Sequence[int]) -> str:
    return f"images of {shape[0]}x{shape[1]} with {shape[2]} channels" if is_image else f"floats of shape {list(shape)}"


def _match_classes(domains: Domains, model: TrainedModel) -> Tensor:
    """Map the dataset's classes to those of the model, by name."""
    unknown = [name for name in domains.classes if name not in model.classes]
    if unknown:
        noun = "classes" if len(unknown) > 1 else "class"
        raise InputError(
            f"the model does not know the {noun} {', '.join(map(repr, unknown[:5]))} of {domains.name}; it knows "
            f"{', '.join(name[:100] for name in model.classes[:100])}: leave the others out with data.classes"
        )
    return torch.tensor([model.classes.index(name) for name in domains.classes])


def _predict_images(
    model: TrainedModel, domain: str, images: Split, class_numbers: Tensor, unlabelled: Split | None, force: bool
) -> DomainPredictions:
    """Predict a domain's images, after adapting the model to the `unlabelled` images if there are any."""
    if unlabelled is None:
        return _predict_split(model, domain, images, class_numbers)
    adapted, estimate = adapt_model(model, unlabelled)
    if estimate is not None and not force:
        estimate.check(domain)
    before = _predict_split(model, domain, images, class_numbers).predicted
    result = _predict_split(adapted, domain, images, class_numbers)
    return replace(result, predicted_before=before, estimate=estimate)


def _score_examples(model: TrainedModel, domain: str, examples: Split, unlabelled: Split | None) -> DomainScores:
    """Score a domain's examples by the task, after adapting the model to the `unlabelled` ones if there are any."""
    adapted = model if unlabelled is None else adapt_model(model, unlabelled)[0]
    return score_domain(domain, model.task, _compute_outputs(adapted, examples))


def _compute_outputs(model: TrainedModel, examples: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and targets batch by batch."""
    for start in range(0, len(examples), EVALUATION_BATCH):
        rows = np.arange(start, min(start + EVALUATION_BATCH, len(examples)))
        yield model.compute(examples.pixels(rows)).logits.cpu(), select_targets(examples, rows)


def _predict_split(model: TrainedModel, domain: str, images: Split, class_numbers: Tensor) -> DomainPredictions:
    labels = class_numbers[torch.from_numpy(np.asarray(images.labels, np.int64))]
    parts = np.split(np.arange(len(images)), range(EVALUATION_BATCH, len(images), EVALUATION_BATCH))
    batches = ((replace(model.compute(images.pixels(rows)), z=None, sigma=None), labels[rows]) for rows in parts)
    return collect_predictions(domain, batches, model.calibration.temperature)


def build_domain_rows(evaluation: Evaluation | TaskEvaluation) -> Rows:
    """Build a table with a row for each domain and one for all, with 95 % intervals; shares are in per cent."""
    if isinstance(evaluation, TaskEvaluation):
        return build_score_rows(evaluation)
    is_adapted, has_several = evaluation.mean_before is not None, len(evaluation.domains) > 1
    metrics = list(evaluation.all.class_metrics)
    header = [
        "domain",
        evaluation.noun,
        *(["before"] if is_adapted else []),
        "accuracy (95 %)",
        "log-loss",
        "ECE",
        *metrics,
    ]
    rows = [header]
    for domain in [*evaluation, *([evaluation.all] if has_several else [])]:
        before = [f"{100 * (domain.accuracy_before or 0.0):.1f}"] if is_adapted else []
        values = [f"{domain.log_loss:.3f}", f"{domain.calibration_error:.3f}"]
        values += ["-" if math.isnan(value) else f"{value:.3f}" for value in domain.class_metrics.values()]
        rows.append([_label(domain), f"{len(domain):,}", *before, _format_percent(domain.accuracy_interval), *values])
    if has_several:
        before = [f"{100 * (evaluation.mean_before or 0.0):.1f}"] if is_adapted else []
        rows.append(["mean over domains", "", *before, _format_percent(evaluation.mean), *[""] * (2 + len(metrics))])
    return rows


def describe_evaluation(evaluation: Evaluation | TaskEvaluation) -> list[str]:
    """Summarise an evaluation in sentences."""
    if isinstance(evaluation, TaskEvaluation):
        return describe_scores(evaluation)
    sentences = []
    if len(evaluation.domains) > 1:
        worst = evaluation.worst
        sentences.append(f"The mean accuracy over domains is {_format_percent(evaluation.mean)} %.")
        sentences.append(f"The weakest domain is {worst.domain}, with {_format_percent(worst.accuracy_interval)} %.")
    if evaluation.mean_before is not None:
        change = 100 * (evaluation.mean.value - evaluation.mean_before)
        sentences.append(
            f"With statistics of each domain's own images, the mean accuracy went from "
            f"{100 * evaluation.mean_before:.1f} % to {100 * evaluation.mean.value:.1f} % ({change:+.1f} points)."
        )
    estimates = [f"{domain.domain}: {domain.estimate.text}" for domain in evaluation if domain.estimate is not None]
    if estimates:
        sentences.append(f"Expected from images without labels: {'; '.join(estimates)}.")
    if evaluation.temperature is not None:
        sentences.append(f"Probabilities are calibrated by a temperature of {evaluation.temperature:.2f}.")
    recalls = zip(evaluation.classes, evaluation.all.recall, strict=True)
    if missing := [name for name, recall in recalls if recall is None]:
        sentences.append(f"None of the {evaluation.noun} is of {', '.join(missing)}, so these classes are not tested.")
    return sentences


def _label(domain: DomainPredictions) -> str:
    return mark_unseen(domain.domain, not domain.is_trained_on)


def _format_percent(interval: Interval) -> str:
    return f"{interval.scaled(100):.1f}"


def _render_evaluation(evaluation: Evaluation | TaskEvaluation, hidden_paths: Sequence[str]) -> str:
    notes = list(evaluation.notes)
    for path in sorted(hidden_paths, key=len, reverse=True):
        notes = [note.replace(path, "DIR") for note in notes]
    if isinstance(evaluation, TaskEvaluation):
        return render_scores(evaluation, notes)
    names = tuple(_label(domain) for domain in evaluation)
    intervals = [domain.accuracy_interval.scaled(100) for domain in evaluation]
    bars = Bars("", "accuracy (%)", names, (Series.from_intervals(evaluation.name, intervals),))
    caption = f"Intervals: Wilson by domain and for all {evaluation.noun}, the bootstrap for the mean"
    blocks = (
        Sentences((*describe_evaluation(evaluation), *map(to_sentence, notes))),
        Table(caption, build_domain_rows(evaluation)),
        Figure("Accuracy by domain", {"": bars}, "Whiskers show 95 % intervals."),
    )
    lead = (
        f"{evaluation.name} on {len(evaluation.all):,} {evaluation.noun} of {evaluation.dataset} ({evaluation.split})."
    )
    sections = [Section("Results", blocks), _build_calibration(evaluation), _build_classes(evaluation)]
    return render_page(f"{evaluation.dataset}: evaluation", lead, sections)


def _build_calibration(evaluation: Evaluation) -> Section:
    charts: dict[str, Chart] = {}
    for domain in (evaluation.all, *evaluation):
        confidences, accuracies, _ = zip(*domain.reliability(), strict=True)
        series = Series(evaluation.name, confidences, accuracies)
        ideal = Series("perfectly calibrated", (0.0, 1.0), (0.0, 1.0))
        charts[_label(domain)] = Lines("", "probability of the predicted class", "accuracy", (series, ideal))
    note = "Below the diagonal the model is overconfident, above it underconfident. Empty bins are left out."
    error = (
        f"The expected calibration error (ECE) over all {evaluation.noun} is {evaluation.all.calibration_error:.3f}: "
        "on average, the probability of the predicted class differs by this much from the share of correct answers."
    )
    return Section("Calibration", (Sentences((error,)), Figure("Reliability", charts, note)))


def _build_classes(evaluation: Evaluation) -> Section:
    classes, all_images = evaluation.classes, evaluation.all
    rows = [["class", evaluation.noun, "recall (%, 95 %)"]]
    for name, counts, recall in zip(classes, all_images.confusion, all_images.recall, strict=True):
        rows.append([name, f"{counts.sum():,}", "" if recall is None else _format_percent(recall)])
    table = Table("Recall of each class, with Wilson intervals", rows)
    if len(classes) > MAX_CLASSES:
        return Section("Classes", (table,))
    recalls = zip(*(domain.recall for domain in evaluation), strict=True)
    cells = tuple(tuple(None if recall is None else 100 * recall.value for recall in row) for row in recalls)
    names = tuple(_label(domain) for domain in evaluation)
    charts: dict[str, Chart] = {"by class and domain": Heatmap("recall (%)", classes, names, cells, 0.0, 100.0)}
    for domain in (all_images, *evaluation):
        charts[f"confusion, {_label(domain)}"] = Heatmap.from_counts(domain.confusion, classes, classes)
    note = "In a confusion matrix, rows are true classes and columns are predictions."
    return Section("Classes", (table, Figure("Class by class", charts, note)))
