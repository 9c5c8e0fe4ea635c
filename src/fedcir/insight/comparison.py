"""Several methods on the same data: their runs, and what these come to in tables and pictures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedcir.algorithms import asked_config
from fedcir.config import DEFAULT_COMPARISON, Asked, Config, cores, differing
from fedcir.engine.files import write
from fedcir.engine.folder import RunFolder
from fedcir.engine.resume import MAY_DIFFER
from fedcir.insight.report import tables
from fedcir.insight.report.advice import advice
from fedcir.insight.report.plots import convergence, draw
from fedcir.insight.report.write import add_report
from fedcir.runs import batch
from fedcir.runs.batch import OnNote, OnProgress, OnWork, unheard
from fedcir.runs.compare import Method, baseline_of
from fedcir.runs.compare import compare as compare_runs
from fedcir.runs.places import place_for
from fedcir.runs.request import BatchRequest, require_runs
from fedcir.runs.run import Run
from fedcir.runs.sweep import Job
from fedcir.types import InputError

REQUEST = "comparison"
"""Name of the saved request."""


@dataclass(frozen=True)
class Comparison:
    """What methods came to on the same data, over the same seeds."""

    out: Path
    """The folder that holds the runs, the tables and the pictures."""
    runs: Mapping[str, Mapping[int, Run]]
    """Those that ended well, by method and seed."""
    failures: Mapping[str, str]
    """Why the others failed, by the names of their folders."""
    methods: Sequence[Method]
    seeds: Sequence[int]
    target: float | None
    page: Path | None
    """The report, if there is one."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why methods of the usual ones, or of all, do not go with the settings, by method."""

    @property
    def baseline(self) -> str:
        """The method that others are compared with."""
        return baseline_of(self.runs)

    @property
    def failed(self) -> str:
        """What went wrong, in a line; empty if nothing did."""
        count = sum(map(len, self.runs.values())) + len(self.failures)
        return batch.told_failures(self.failures, count) if self.failures else ""

    def to_rows(self) -> list[dict[str, Any]]:
        """A dict of plain values for each method, accuracies as fractions: `pandas.DataFrame` takes them."""
        return tables.comparison_numbers(self.methods)

    def table(self) -> tables.Rows:
        """A header and a row for each method, as people read them: accuracies in per cent."""
        return tables.comparison_rows(self.methods, self.baseline, len(self.seeds), self.target)

    def advice(self) -> list[str]:
        """What to try next, in sentences."""
        return advice(self.runs, self.methods, self.baseline, lambda run: str(run.path))


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
    on_progress: OnProgress = unheard,
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
    **options: Any,
) -> Comparison:
    """Train several methods on the same data and compare them, as `fedcir compare` does.

    Without `algorithms`, these are FedAvg, the method that the file names and Centralized, or the usual four if it
    names none. Those that do not go with the settings, as Centralized with privacy, are then `left_out`; one that is
    named, and FedAvg, is refused.
    `options` are those of the command, such as dataset="pacs", data_root="data/pacs", rounds=50 or workers=2. `config`
    is a TOML file of settings, `set` any settings such as {"local.momentum": 0.5}. The runs, tables and pictures go
    into `out`, a new folder in runs/ if not given; `resume` does what is left there, with the settings of the request
    that began it unless others are given. `seeds` are (0,) if not given. `target` is an accuracy to reach,
    the baseline's last if not given. A run that fails leaves the others as they are, and is among `failures`; if all
    do, that is a RunError.
    """
    batch.check_target(target)
    place = place_for(out, Path("runs", "compare"), resume)
    request = BatchRequest(
        Asked.of(options, preset, config, set, without=("algorithm", "seed")),
        None if algorithms is None else batch.chosen_algorithms(algorithms),
        None if seeds is None else batch.chosen_seeds(seeds),
        target,
    )
    if resume:
        require_runs(place, "comparison")
        request = request.resume(place, REQUEST)
    asked, algorithms, target = request.asked, request.algorithms, request.target
    own = asked.tables().get("algorithm", {}).get("name")
    names = batch.chosen_algorithms(_usual(own) if algorithms is None else algorithms)
    needed = batch.required(([] if own is None else [own]) if algorithms is None else algorithms)
    numbers = batch.chosen_seeds(request.seeds or (0,))
    planned = {(name, seed): place / f"{Path(name).stem}-{seed}" for seed in numbers for name in names}
    every = [Job(asked_config(asked.over(algorithm=name, seed=seed)), path) for (name, seed), path in planned.items()]
    _check(place, every[0].config)
    left_out = batch.prepare(every, resume, track, needed, on_work, on_note).left_out
    jobs = [job for job in every if job.config.algorithm.name not in left_out]
    request.save(place, REQUEST)
    workers = cores() if options.get("workers") is None else options["workers"]
    ended, failures = batch.run_all(jobs, workers, resume, track, on_progress)
    runs: dict[str, dict[int, Run]] = {}
    for (name, seed), path in planned.items():
        if path.name in ended:
            runs.setdefault(Path(name).stem, {})[seed] = ended[path.name]
    methods = compare_runs(runs, baseline_of(runs), target)
    folders = [run for by_seed in runs.values() for run in by_seed.values()]
    page = add_report(folders, place / "report.html", target, on_work, on_note) if report else None
    comparison = Comparison(place, runs, failures, methods, numbers, target, page, left_out)
    _write(comparison)
    return comparison


def _usual(named: str | None) -> Sequence[str]:
    """Plain FedAvg, the method that a file names, and a ceiling."""
    return DEFAULT_COMPARISON if named is None else list(dict.fromkeys((batch.BASELINE, str(named), "centralized")))


def _write(comparison: Comparison) -> None:
    out, rows = comparison.out, comparison.table()
    draw([convergence(comparison.runs)], [out / "curves.png"])
    write(out / "comparison.md", tables.markdown(rows))
    write(out / "comparison.tex", tables.latex(rows))
    write(out / "comparison.csv", tables.comma_separated(tables.as_text(comparison.to_rows())))
    write(out / "comparison.json", json.dumps([asdict(method) for method in comparison.methods], indent=1) + "\n")


def _check(out: Path, config: Config) -> None:
    """Refuse to add to runs on other data, whose tables would be written over."""
    for path in sorted(out.glob("*/config.toml")):
        for key, (old, new) in differing(RunFolder(path.parent).config(), config).items():
            if key.startswith(("data.", "partition.")) and key not in MAY_DIFFER:
                raise InputError(f"{path.parent} was started with {key}={old}, not {new}: choose another folder")
