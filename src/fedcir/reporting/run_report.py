"""Write the report of finished runs as one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.analysis.diagnosis import Diagnosis, diagnose_run
from fedcir.errors import InputError
from fedcir.files import check_output_file, write_file
from fedcir.reporting import client_sections, sections
from fedcir.reporting.methods import list_advice
from fedcir.reporting.page import Section, Sentences, render_page, to_sentence
from fedcir.reporting.sections import Study, open_study
from fedcir.runs.reader import RunSource, find_runs, get_run_path
from fedcir.runs.statistics import check_target, compare_methods
from fedcir.types import ACCURACY, OnNote, OnProgress, ignore_progress

SAMPLES = 250
"""Test images of each domain on which distances and pictures are based."""


@dataclass(frozen=True)
class Page:
    """A report that was written."""

    path: Path
    notes: tuple[str, ...]
    """What could not be read or measured."""


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    out: str | Path = "report.html",
    target: float | None = None,
    samples: int = SAMPLES,
    data_root: str | Path | None = None,
    trust_code: bool = False,
    on_work: OnProgress = ignore_progress,
) -> Page:
    """Write one page about finished runs on the same data.

    `runs` are folders of runs, or folders that contain them. `target` is a score to reach (default: FedAvg's last).
    Distances use at most `samples` test images of each domain; 0 skips them. `data_root` is the new folder of the data,
    if they were moved. `trust_code` allows code that is stored with a run to be executed, which distances need.
    """
    check_target(target)
    path = Path(out)
    if samples and samples < 8:
        raise InputError(f"samples must be at least 8, or 0 for none, got {samples}")
    check_output_file(path)
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    folders = list({folder.resolve(): folder for folder in find_runs(paths)}.values())
    keywords: dict[str, Any] = {"samples": samples, "data_root": None if data_root is None else str(data_root)}
    notes = write_report(folders, path, target=target, trust_code=trust_code, on_work=on_work, **keywords)
    return Page(path, notes)


def try_report(
    runs: Sequence[RunSource],
    path: Path,
    target: float | None = None,
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
) -> Path | None:
    """Write the report of runs that this process has just trained; problems become notes instead of errors."""
    try:
        notes = write_report(runs, path, target=target, on_work=on_work, trust_code=True)
    except (InputError, OSError) as error:
        on_note(f"no {path.name}: {error}")
        return None
    for note in notes:
        on_note(f"{path.name}: {note}")
    return path


def write_report(
    runs: Sequence[RunSource],
    path: Path,
    *,
    title: str | None = None,
    first: Sequence[Section] = (),
    target: float | None = None,
    samples: int = SAMPLES,
    data_root: str | None = None,
    on_work: OnProgress = ignore_progress,
    trust_code: bool = False,
) -> tuple[str, ...]:
    """Write the report of finished runs on the same data, and return notes on what could not be read or measured.

    The caller's sections `first` come before all others. Without `trust_code`, distances are not measured in runs with
    their own algorithm or model code.
    """
    study = open_study(runs, trust_code)
    methods = compare_methods(study.runs, study.baseline, target)
    is_measured = samples and study.metric == ACCURACY
    diagnoses, reasons = _diagnose_runs(study, samples, data_root, on_work) if is_measured else ({}, [])
    roots = [data_root, *(run.config.data.root for run in study.one_of_each.values())]
    hidden = {path: path.name for path in map(get_run_path, runs)} | {Path(root): "DIR" for root in roots if root}

    def clean_note(note: str) -> str:
        """Make a sentence of a note without paths of this machine."""
        for hidden_path in sorted(hidden, key=lambda path: -len(str(path))):
            if len(hidden_path.parts) > 1:
                note = note.replace(str(hidden_path), hidden[hidden_path])
        return to_sentence(note)

    missing = list(map(clean_note, reasons)) if samples else ["Not measured, because the number of samples is 0."]
    sentences = list_advice(study.runs, methods, study.baseline)
    contents = [
        *first,
        Section("What to do next", (Sentences(tuple(sentences)),)) if sentences else None,
        sections.build_results(study, methods, list(map(clean_note, study.notes))),
        sections.build_training(study, methods),
        client_sections.build_domains(study, methods, diagnoses),
        client_sections.build_survival(study),
        client_sections.build_distances(study, diagnoses, samples, missing) if study.metric == ACCURACY else None,
        sections.build_costs(study, methods, target),
        client_sections.build_clients(diagnoses),
        sections.build_settings(study),
    ]
    shown = [section for section in contents if section is not None]
    write_file(path, render_page(title or f"{study.dataset}: report", _summarise_study(study), shown, list(study.runs)))
    return *study.notes, *(f"distances {reason}" for reason in reasons)


def _summarise_study(study: Study) -> str:
    """Count methods, clients, rounds, seeds and runs in one line."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    run = next(iter(study.one_of_each.values()))
    trained = sum(bool(client.get("train")) for client in run.manifest["clients"])
    rounds = f"{count(run.config.server.rounds, 'round')} of {run.config.local.work}"
    seeds = f"{count(len(study.seeds), 'seed')}, {count(sum(map(len, study.runs.values())), 'run')}"
    return f"{count(len(study.runs), 'method')} on {study.dataset}; {count(trained, 'client')}; {rounds}; {seeds}."


def _diagnose_runs(
    study: Study, samples: int, data_root: str | None, on_work: OnProgress
) -> tuple[dict[str, dict[int, Diagnosis]], list[str]]:
    """Diagnose every run whose data are available, and say for which runs that failed and why."""
    diagnoses: dict[str, dict[int, Diagnosis]] = {}
    failures: dict[str, list[tuple[str, str]]] = {}
    runs = [(name, seed, run) for name, by_seed in study.runs.items() for seed, run in by_seed.items()]
    for finished, (name, seed, run) in enumerate(runs, start=1):
        try:
            diagnosis = diagnose_run(run, data_root, samples)
            diagnoses.setdefault(name, {})[seed] = diagnosis
            reason = diagnosis.missing_reason
        except (InputError, OSError) as error:
            reason = str(error)
        if reason:
            same = reason.replace(str(run.path), "")  # equal reasons are stated once
            failures.setdefault(same, []).append((run.path.name, reason))
        on_work(finished, len(runs), what="measuring distances in runs")
    reasons = []
    for failed in failures.values():
        names = "" if len(failed) == len(runs) else f" for {', '.join(name for name, _ in failed)}"
        reasons.append(f"not measured{names}: {failed[0][1]}")
    return diagnoses, reasons
