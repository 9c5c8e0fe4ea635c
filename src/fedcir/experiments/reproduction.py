"""Reproduction of a table or figure of the paper: plan its runs, train them, and write the result."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcir.algorithms import resolve_config
from fedcir.config import Config, ConfigRequest, merge_tables
from fedcir.config.toml import list_presets
from fedcir.data.federation import Federation
from fedcir.data.opening import get_source, has_dataset
from fedcir.errors import InputError, suggest_name
from fedcir.experiments import batch
from fedcir.experiments.batch import BatchRequest, OnRunProgress
from fedcir.experiments.experiment import SCALES, Case, Experiment, Outcome, Results, estimate_seconds
from fedcir.experiments.paper import EXPERIMENTS
from fedcir.experiments.sweep import Job, longest_first
from fedcir.files import write_file
from fedcir.machine import count_cores
from fedcir.reporting.drawing import draw_charts
from fedcir.reporting.page import (
    Figure,
    Section,
    Sentences,
    Table,
    render_page,
    to_csv,
    to_latex,
    to_markdown,
    to_sentence,
)
from fedcir.reporting.run_report import write_report
from fedcir.runs.reader import Run
from fedcir.runs.statistics import check_target
from fedcir.types import ACCURACY, OnNote, OnProgress, ignore_progress

DEFAULT_SCALE = "small"


def find_experiment(id: str) -> Experiment:
    if id not in EXPERIMENTS:
        raise InputError(f"no table or figure {id!r}; {suggest_name(id, EXPERIMENTS)}")
    return EXPERIMENTS[id]


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table or figure."""

    id: str
    title: str
    outcome: Outcome
    runs: Mapping[str, Run]
    """The runs that finished, by name."""
    failures: Mapping[str, str]
    """Errors of the other runs, by name."""
    out: Path
    page: Path | None
    """The report, if it was written."""

    @property
    def failed(self) -> str:
        """One line on the runs that failed; empty if none did."""
        return batch.describe_failures(self.failures, len(self.runs) + len(self.failures))


@dataclass(frozen=True)
class ReproductionPlan:
    """The runs of a table or figure, checked and ready to start."""

    id: str
    experiment: Experiment
    cases: Sequence[Case]
    jobs: Mapping[str, Job]
    """Jobs by the name of their case."""
    data: Mapping[str, Federation]
    """Data of the unfinished runs, by the dataset's name."""
    out: Path
    workers: int
    """Number of runs at a time."""
    resume: bool
    track: str | None
    target: float | None

    @cached_property
    def unfinished(self) -> list[Job]:
        """The runs that had not finished when the plan was made, the longest first."""
        return longest_first([job for job in self.jobs.values() if not job.is_done])

    @cached_property
    def estimates(self) -> list[float]:
        """Estimated seconds of each unfinished run with one worker."""
        return estimate_seconds(self.unfinished, self.data)

    @property
    def seconds(self) -> float:
        """Estimated seconds of all unfinished runs."""
        return sum(self.estimates) / self.workers

    def write_commands(self) -> list[dict[str, Any]]:
        """Write the settings of the unfinished runs and list their commands, such as for the scheduler of a cluster.

        Each entry has a command for this working directory, its folder, and estimated seconds with one worker. Once
        the commands have run, a resumed reproduction only writes its table or figure.
        """
        entries = []
        for job, seconds in zip(self.unfinished, self.estimates, strict=True):
            job.write_settings()
            command = ["fedcir", *job.command(resume=True)]
            entries.append({"command": command, "out": str(job.out), "seconds": round(seconds, 1)})
        return entries

    def run(
        self,
        report: bool = True,
        on_progress: OnRunProgress = ignore_progress,
        on_work: OnProgress = ignore_progress,
        on_note: OnNote = ignore_progress,
    ) -> Reproduction:
        """Train the unfinished runs and write the table or figure."""
        jobs = list(self.jobs.values())
        runs, failures = batch.run_all(jobs, self.workers, self.resume, self.track, on_progress)
        results = Results(self.cases, runs, self.target)
        outcome = self.experiment.outcome(results)
        outcome = replace(outcome, notes=[*outcome.notes, *results.chance_notes()])
        _write_outcome(self.id, self.experiment.title, outcome, self.out)
        path = self.out / "report.html" if report else None
        if path is not None:
            for note in _write_report(self.id, self.experiment.title, outcome, results, path, on_work):
                on_note(f"{path.name}: {note}")
        return Reproduction(self.id, self.experiment.title, outcome, runs, failures, self.out, path)


def reproduce(
    id: str,
    *,
    report: bool = True,
    on_progress: OnRunProgress = ignore_progress,
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
    **keywords: Any,
) -> Reproduction:
    """Reproduce a table or figure of the paper, as `fedcir reproduce` does: "table1", "fig-risk" and so on.

    `keywords` are those of `experiments.reproduction.plan_reproduction`: scale, algorithms, seeds, target, out, resume,
    preset, config, set, and the options of the command, such as dataset="pacs" or workers=2. A run that fails does not
    stop the others and is listed in `failures`; if all runs fail, a RunError is raised.
    """
    plan = plan_reproduction(id, on_work=on_work, on_note=on_note, **keywords)
    return plan.run(report, on_progress, on_work, on_note)


def plan_reproduction(
    id: str,
    *,
    scale: str | None = None,
    algorithms: Sequence[str | Path] | None = None,
    seeds: Sequence[int] | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    preview: bool = False,
    track: str | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
    **options: Any,
) -> ReproductionPlan:
    """Plan the runs of a table or figure, and raise errors before any of them starts.

    `scale` is smoke (a minute), small (hours on 2 cores; the default) or paper (its own settings, days). `resume`
    continues the runs in `out`, with their settings unless others are given. A `preview` starts nothing: `out` may hold
    some of the runs, or none. Methods and seeds default to the paper's, without methods that the settings exclude;
    `target` is an accuracy to reach (table3).
    """
    experiment = find_experiment(id)
    check_target(target, ACCURACY)
    if target is not None and id != "table3":
        raise InputError(f"only table3 takes a target, {id} does not: leave it out")
    if scale is not None and scale not in SCALES:
        raise InputError(f"no scale {scale!r}; {suggest_name(scale, SCALES)}")
    request = BatchRequest(
        ConfigRequest.from_options(options, preset, config, set, without=("algorithm", "seed")),
        None if algorithms is None else batch.check_algorithms(algorithms),
        None if seeds is None else batch.check_seeds(seeds),
        target,
        {} if scale is None else {"scale": scale},
    )
    folder = batch.choose_folder(out, Path("runs", f"{id}-{scale or DEFAULT_SCALE}"), resume or preview)
    if resume:
        batch.require_runs(folder, "runs")
        request = request.resume(folder, id)
    scale, resume = request.extra.get("scale", DEFAULT_SCALE), resume or preview
    if scale not in SCALES:
        path = batch.request_path(folder, id)
        raise InputError(f"{path} names no scale, but {scale!r}: delete the file, or restore it")
    settings = request.config.tables()
    roots = _find_datasets(settings.get("data", {}), scale, experiment.datasets, on_note)
    cases = experiment.cases(scale, list(roots), request.algorithms, request.seeds, settings)
    jobs = {case.name: Job(_case_config(request.config, case, scale, roots), folder / case.name) for case in cases}
    if len(jobs) < len(cases):
        raise InputError(f"two runs of {id} would have the same name: leave one of the methods out")
    required = batch.required_methods(experiment.algorithms if experiment.fixed else request.algorithms or ())
    data, left_out = batch.prepare_jobs(list(jobs.values()), resume, track, required, on_work, on_note)
    cases = [case for case in cases if case.algorithm not in left_out]
    jobs = {case.name: jobs[case.name] for case in cases}
    workers = count_cores() if options.get("workers") is None else options["workers"]
    if not preview:
        request.save(folder, id)
    return ReproductionPlan(id, experiment, cases, jobs, data, folder, workers, resume, track, request.target)


def _find_datasets(
    data: Mapping[str, Any], scale: str, paper_datasets: tuple[str, ...], on_note: OnNote
) -> Mapping[str, str | None]:
    """Roots of the requested datasets by name; by default the paper's, or the embedded one at smoke scale."""
    requested = [name.strip() for name in data.get("name", "").split(",") if name.strip()]
    root = data.get("root")
    if not requested and scale == "smoke" and root is None:
        return {"minidigits": None}
    if len(requested) == 1:
        return {requested[0]: root}
    names = requested or paper_datasets
    if root is None:
        raise InputError(f"data.root is missing: give a folder that holds {', '.join(names)}, or name one dataset")
    folders = find_dataset_folders(names, Path(root))
    if missing := [name for name in names if name not in folders]:
        if requested:
            raise InputError(f"{root} holds no folder for {missing[0]}")
        on_note(f"left out because {root} does not hold them: {', '.join(missing)}")
    return {name: str(path) for name, path in folders.items()}


def find_dataset_folders(names: Sequence[str], root: Path) -> dict[str, Path]:
    """Find the folders of datasets below a root by name; case and punctuation do not matter."""

    def normalise(name: str) -> str:
        return re.sub(r"[^a-z0-9]", "", name.lower())

    if not root.is_dir():
        raise InputError(f"data.root {root} is not a folder")
    folders = {normalise(path.name): path for path in sorted(root.iterdir()) if path.is_dir()}
    matches = {name: folders[normalise(name)] for name in names if normalise(name) in folders}
    if not matches:
        raise InputError(f"{root} holds no folder {' or '.join(names)}: name one dataset, and its folder as data.root")
    return matches


def _case_config(request: ConfigRequest, case: Case, scale: str, roots: Mapping[str, str | None]) -> Config:
    preset = request.preset or (case.dataset if case.dataset in list_presets() else None)
    base = {section: dict(values) for section, values in SCALES[scale].items()}
    if has_dataset(case.dataset) and not get_source(case.dataset).has_image_files:  # arrays have a size of their own
        base.get("data", {}).pop("image_size", None)
    data = {"dataset": case.dataset, "data_root": roots[case.dataset]}
    request = replace(request.with_options(**data, algorithm=case.algorithm, seed=case.seed), preset=preset)
    return resolve_config(request, merge_tables(base, case.point.settings))


def _write_outcome(id: str, title: str, outcome: Outcome, out: Path) -> None:
    notes = "".join(f"\n{note}\n" for note in outcome.notes)
    write_file(out / f"{id}.md", f"{title[0].upper()}{title[1:]}.\n\n{to_markdown(outcome.rows)}{notes}")
    write_file(out / f"{id}.tex", to_latex(outcome.rows))
    write_file(out / f"{id}.csv", to_csv(outcome.numbers))
    draw_charts(outcome.panels, [out / f"{id}.{suffix}" for suffix in ("png", "pdf", "svg")])


def _write_report(
    id: str, title: str, outcome: Outcome, results: Results, path: Path, on_work: OnProgress
) -> tuple[str, ...]:
    """Write the report of a table or figure. Returns notes on what could not be read or measured.

    The full report of the runs follows where they differ in method and seed only.
    """
    figures = [Figure(panel.title or id, {"": panel}) for panel in outcome.panels]
    words = [Sentences(tuple(outcome.notes))] if outcome.notes else []
    section = Section(id, (Table(title, outcome.rows), *words, *figures))
    runs = list(results.by_name.values())
    datasets = ", ".join(results.datasets)
    if len(results.datasets) == 1 and len(results.points) == 1:
        return write_report(
            runs, path, title=f"{id}: {datasets}", first=[section], target=results.target, on_work=on_work
        )
    rows = [["run", "test accuracy (%)"]]
    rows += [[run.path.name, f"{100 * run.final['accuracy_mean']:.2f}"] for run in runs]
    instructions = "The folder settings holds one file for each run. To repeat a run: `fedcir run FILE.toml`."
    run_list = Section("Runs", (Sentences((instructions,)), Table("After the last round, mean over domains", rows)))
    lead = to_sentence(f"{title} ({datasets}; {len(runs)} run{'' if len(runs) == 1 else 's'})")
    write_file(path, render_page(f"{id}: {datasets}", lead, [section, run_list], results.algorithms))
    return ()
