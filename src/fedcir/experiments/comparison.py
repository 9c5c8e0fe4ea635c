"""Compare several methods on the same data: train their runs, and write tables and pictures of the results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedcir.algorithms import resolve_config
from fedcir.config import DEFAULT_COMPARISON, Config, ConfigRequest, find_differences
from fedcir.errors import InputError
from fedcir.experiments import batch
from fedcir.experiments.batch import BatchRequest, OnRunProgress
from fedcir.experiments.recommendation import ONE_MESSAGE
from fedcir.experiments.sweep import Job
from fedcir.files import write_file
from fedcir.machine import count_cores
from fedcir.reporting.charts import convergence_chart
from fedcir.reporting.drawing import draw_charts
from fedcir.reporting.methods import comparison_numbers, comparison_rows, list_advice
from fedcir.reporting.page import Rows, to_csv, to_latex, to_markdown, to_text_rows
from fedcir.reporting.run_report import try_report
from fedcir.runs.reader import Run
from fedcir.runs.statistics import MethodResult, check_target, choose_baseline, compare_methods
from fedcir.runtime.resume import MAY_DIFFER
from fedcir.runtime.run_folder import RunFolder
from fedcir.types import OnNote, OnProgress, ignore_progress

REQUEST = "comparison"
"""Name of the file of the saved request."""


@dataclass(frozen=True)
class Comparison:
    """Results of methods on the same data, over the same seeds."""

    out: Path
    """Folder of the runs, the tables and the pictures."""
    runs: Mapping[str, Mapping[int, Run]]
    """The finished runs, by method and seed."""
    failures: Mapping[str, str]
    """Errors of the other runs, by the names of their folders."""
    methods: Sequence[MethodResult]
    seeds: Sequence[int]
    target: float | None
    page: Path | None
    """The report, if it was written."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons why optional methods cannot run with the settings, by method."""

    @property
    def baseline(self) -> str:
        return choose_baseline(self.runs)

    @property
    def failed(self) -> str:
        """One line on the runs that failed; empty if none did."""
        return batch.describe_failures(self.failures, sum(map(len, self.runs.values())) + len(self.failures))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a dict of plain values for each method, shares as fractions: `pandas.DataFrame` takes them."""
        return comparison_numbers(self.methods)

    def table(self) -> Rows:
        """Return a header and a row of text for each method: shares in per cent."""
        return comparison_rows(self.methods, self.baseline, len(self.seeds), self.target)

    def advice(self) -> list[str]:
        """Advise in sentences what to try next."""
        return list_advice(self.runs, self.methods, self.baseline, lambda run: str(run.path))


def compare(
    *,
    algorithms: Sequence[str | Path] | None = None,
    seeds: Sequence[int] | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    report: bool = True,
    track: str | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    set: Sequence[str] | Mapping[str, Any] = (),
    on_progress: OnRunProgress = ignore_progress,
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
    **options: Any,
) -> Comparison:
    """Train several methods on the same data and compare them, as `fedcir compare` does.

    The default `algorithms` are FedAvg, the method that the file names and Centralized, or four methods if it names
    none; with a frozen encoder FedCiROne too. Those of them that cannot run with the settings, such as Centralized
    with privacy, are `left_out`; FedAvg and methods that are named raise an error instead.
    `options` are those of the command, such as dataset="pacs", data_root="data/pacs", rounds=50 or workers=2. `config`
    is a TOML file of settings, `set` any settings such as {"local.momentum": 0.5}. The runs, tables and pictures go
    into `out`, by default a new folder in runs/; `resume` continues there, with the saved settings unless others are
    given. The default `seeds` are (0,). `target` is a score to reach, by default the baseline's
    last. A run that fails does not stop the others and is listed in `failures`; if all runs fail, a RunError is raised.
    """
    check_target(target)
    folder = batch.choose_folder(out, Path("runs", "compare"), resume)
    request = BatchRequest(
        ConfigRequest.from_options(options, preset, config, set, without=("algorithm", "seed")),
        None if algorithms is None else batch.check_algorithms(algorithms),
        None if seeds is None else batch.check_seeds(seeds),
        target,
    )
    if resume:
        batch.require_runs(folder, "comparison")
        request = request.resume(folder, REQUEST)
    named = request.config.tables().get("algorithm", {}).get("name")
    required = ([] if named is None else [named]) if request.algorithms is None else request.algorithms
    defaults = _default_methods(named, request.config.resolve().model.freeze)
    names = batch.check_algorithms(defaults if request.algorithms is None else request.algorithms)
    checked_seeds, target = batch.check_seeds(request.seeds or (0,)), request.target
    jobs = {
        (name, seed): Job(
            resolve_config(request.config.with_options(algorithm=name, seed=seed)), folder / f"{Path(name).stem}-{seed}"
        )
        for seed in checked_seeds
        for name in names
    }
    _check_folder(folder, next(iter(jobs.values())).config)
    needed = batch.required_methods(required)
    data, left_out = batch.prepare_jobs(list(jobs.values()), resume, track, needed, on_work, on_note)
    for federation in data.values():
        check_target(target, federation.builder.task.primary)
    request.save(folder, REQUEST)
    workers = count_cores() if options.get("workers") is None else options["workers"]
    chosen = [job for (name, _), job in jobs.items() if name not in left_out]
    finished, failures = batch.run_all(chosen, workers, resume, track, on_progress)
    runs: dict[str, dict[int, Run]] = {}
    for (name, seed), job in jobs.items():
        if job.out.name in finished:
            runs.setdefault(Path(name).stem, {})[seed] = finished[job.out.name]
    methods = compare_methods(runs, choose_baseline(runs), target)
    all_runs = [run for by_seed in runs.values() for run in by_seed.values()]
    page = try_report(all_runs, folder / "report.html", target, on_work, on_note) if report else None
    comparison = Comparison(folder, runs, failures, methods, checked_seeds, target, page, left_out)
    rows = comparison.table()
    draw_charts([convergence_chart(runs)], [folder / "curves.png"])
    write_file(folder / "comparison.md", to_markdown(rows))
    write_file(folder / "comparison.tex", to_latex(rows))
    write_file(folder / "comparison.csv", to_csv(to_text_rows(comparison.to_rows())))
    write_file(folder / "comparison.json", json.dumps([asdict(method) for method in methods], indent=1) + "\n")
    return comparison


def _default_methods(named: str | None, frozen: bool) -> Sequence[str]:
    """FedAvg, the method that a file names, FedCiROne on a frozen encoder, and Centralized as a ceiling."""
    methods = DEFAULT_COMPARISON if named is None else (batch.BASELINE, str(named), "centralized")
    return list(dict.fromkeys((*methods[:-1], *((ONE_MESSAGE,) if frozen else ()), methods[-1])))


def _check_folder(out: Path, config: Config) -> None:
    """Refuse to add to runs on other data, whose tables would be written over."""
    for path in sorted(out.glob("*/config.toml")):
        for key, (old, new) in find_differences(RunFolder(path.parent).config(), config).items():
            if key.startswith(("data.", "partition.")) and key not in MAY_DIFFER:
                raise InputError(f"{path.parent} was started with {key}={old}, not {new}: choose another folder")
