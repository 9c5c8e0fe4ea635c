"""The runs of a comparison or an experiment: the request, its checks before any run starts, and the training."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedcir.algorithms import find_algorithm, list_algorithms, make_algorithm
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config, ConfigRequest, dump_toml, make_paths_absolute, read_toml
from fedcir.data.decoding import OnFile
from fedcir.data.domains import Domains
from fedcir.data.federation import Federation, build_federation, partition_dataset
from fedcir.data.partition import Partition
from fedcir.errors import InputError, RunError
from fedcir.experiments.sweep import SETTINGS, Job, RunProgress, sweep
from fedcir.files import RESTORE_HINT, check_no_links, explain_read_errors, write_file
from fedcir.runs.reader import Run, load_run
from fedcir.runs.tracking import check_tracker
from fedcir.runtime.resume import check_data, check_resumed_settings, is_same_code
from fedcir.runtime.run_folder import RunFolder
from fedcir.runtime.simulation import check_run
from fedcir.types import OnNote, OnProgress, ignore_progress
from fedcir.validation import check_type

BASELINE = "fedavg"
"""The method that others are compared with; it is never left out."""

CODE_SETTINGS = (
    ("algorithms", "algorithm", "name"),
    ("model", "model", "name"),
    ("server.aggregation", "server", "aggregation"),
)
"""Options that may name code to run, with their sections and fields."""
OnRunProgress = Callable[[RunProgress], None]
"""Receives the start of every run, each of its rounds, and its end."""


@dataclass(frozen=True)
class BatchRequest:
    """Algorithms, seeds and settings of a comparison or an experiment as the user gave them; None if not given."""

    config: ConfigRequest
    algorithms: list[str] | None = None
    seeds: list[int] | None = None
    target: float | None = None
    extra: dict[str, str] = field(default_factory=dict)
    """Other options of the command, such as the scale of an experiment."""

    def save(self, folder: Path, name: str) -> None:
        """Write the request into the folder of its runs."""
        tables = make_paths_absolute(self.config.tables())
        tables["run"] = {key: value for key, value in tables.get("run", {}).items() if key != "workers"}
        values: dict[str, Any] = {"algorithms": self.algorithms, "seeds": self.seeds, "target": self.target}
        values |= {"preset": self.config.preset, "more": self.extra or None}
        given = {key: value for key, value in values.items() if value is not None}
        path = request_path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, dump_toml({"request": given, "settings": tables}))

    def resume(self, folder: Path, name: str) -> "BatchRequest":
        """Fill in what is not given from the request that started the runs in the folder.

        Code that only the folder names is refused, because the folder may come from elsewhere.
        """
        path = request_path(folder, name)
        if not path.is_file():  # of an earlier version: the user gives all options again
            return self
        with explain_read_errors(path, RESTORE_HINT):
            tables = read_toml(path)
            values = check_type(tables.get("request"), dict, "request")
            saved = BatchRequest(
                ConfigRequest(check_type(values.get("preset"), str | None, "preset")),
                check_type(values.get("algorithms"), list[str] | None, "algorithms"),
                check_type(values.get("seeds"), list[int] | None, "seeds"),
                check_type(values.get("target"), float | None, "target"),
                check_type(values.get("more", {}), dict[str, str], "more"),
            )
            settings = check_type(tables.get("settings"), dict[str, dict], "settings")  # type: ignore[type-arg]
        given = self.config.tables()
        code = [] if self.algorithms is not None else [("algorithms", name) for name in saved.algorithms or ()]
        for setting, section, key in CODE_SETTINGS:
            if given.get(section, {}).get(key) is None and (setting != "algorithms" or self.algorithms is None):
                code.append((setting, str(settings.get(section, {}).get(key, ""))))
        for setting, value in code:
            if value.endswith(".py") or ":" in value:
                reason = f"names code of its own, {value}, which was not run"
                raise InputError(f"{folder} {reason}: if it is yours, give {setting} again")
        return BatchRequest(
            replace(self.config, preset=self.config.preset or saved.config.preset, saved=settings),
            saved.algorithms if self.algorithms is None else self.algorithms,
            saved.seeds if self.seeds is None else self.seeds,
            saved.target if self.target is None else self.target,
            {**saved.extra, **self.extra},
        )


def request_path(folder: Path, name: str) -> Path:
    return folder / SETTINGS / f"{name}.request.toml"


def require_runs(folder: Path, what: str) -> None:
    """Refuse to resume where nothing was started."""
    if not _holds_runs(folder):
        raise InputError(f"{folder} holds no {what} to continue: start without resume")


def _holds_runs(folder: Path) -> bool:
    return (folder / SETTINGS).is_dir() or any(folder.glob("*/config.toml"))


def run_name(config: Config) -> str:
    return f"{config.data.name}-{Path(config.algorithm.name).stem}-{config.run.seed}"


def choose_folder(
    out: str | Path | None,
    default: Path,
    resume: bool,
    content: str = "runs",
    has_content: Callable[[Path], bool] = _holds_runs,
) -> Path:
    """Return the requested folder for runs, else the default one: a new one, or the latest to resume."""
    folder = Path(out) if out is not None else latest_path(default) if resume else unused_path(default)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose another folder")
    if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()) and not has_content(folder):
        raise InputError(f"{folder} holds other files and no {content}: choose another folder")
    check_no_links(folder)
    return folder


def unused_path(path: Path) -> Path:
    """Return the path, or the first with a number appended, that does not exist or is an empty folder."""
    return next(numbered for numbered in _number_paths(path) if not _is_used(numbered))


def latest_path(path: Path) -> Path:
    """Return the last path in use of those that `unused_path` returns, or the path itself."""
    used = list(itertools.takewhile(_is_used, _number_paths(path)))
    return used[-1] if used else path


def _number_paths(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def _is_used(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def check_algorithms(requested: Sequence[str | Path]) -> list[str]:
    """Check algorithms given by name or file, and replace "all" by those of the package."""
    if isinstance(requested, str):
        raise InputError(f"algorithms takes a list of names, got {requested!r}")
    algorithms = [name for entry in map(str, requested) for name in (list_algorithms() if entry == "all" else [entry])]
    for name in algorithms:
        find_algorithm(name)
    if not algorithms:
        raise InputError("algorithms is empty: name at least one, or all")
    _check_unique("algorithms", [Path(name).stem for name in algorithms])
    return algorithms


def required_methods(requested: Sequence[str | Path]) -> set[str]:
    """Return the methods that are never left out: those that the user names, and the baseline."""
    return {BASELINE, *map(str, requested)}


def check_seeds(requested: Sequence[int]) -> list[int]:
    seeds = sorted(requested)
    if not seeds or any(type(seed) is not int for seed in seeds):
        raise InputError(f"seeds takes whole numbers such as 0, 1, 2, got {list(requested)}")
    _check_unique("seeds", seeds)
    return seeds


def _check_unique(what: str, values: Sequence[str | int]) -> None:
    if duplicates := [value for value in values if values.count(value) > 1]:
        raise InputError(f"{what} names {duplicates[0]!r} twice: name it once")


def prepare_jobs(
    jobs: Sequence[Job],
    resume: bool,
    track: str | None,
    required: Collection[str],
    on_work: OnProgress = ignore_progress,
    on_note: OnNote = ignore_progress,
) -> tuple[dict[str, Federation], dict[str, str]]:
    """Check all jobs and prepare their data, so that no run waits for another one to decode images.

    Returns the data of the unfinished runs by the dataset's name, and the reasons why optional methods cannot run with
    the settings, by method. Such a method is left out, or refused if it is required.
    """
    check_tracker(track)
    started = []
    for job in jobs:
        algorithm, folder = _make_algorithm(job.config.algorithm), RunFolder(job.out)
        folder.check_start(resume)
        if folder.exists and not job.is_done:
            check_resumed_settings(folder, job.config, algorithm)
            started.append(job)
    opener = _DataOpener(partial(on_work, what="preparing images"))
    data: dict[str, Federation] = {}
    left_out: dict[str, str] = {}
    for job in jobs:
        name, is_first_seed = job.config.algorithm.name, job.config.run.seed == jobs[0].config.run.seed
        if (resume and job.is_done) or not (is_first_seed or job.config.data.name not in data):
            continue
        federation = opener.open_federation(job.config)
        data.setdefault(job.config.data.name, federation)
        try:
            check_run(job.config, _make_algorithm(job.config.algorithm), federation)
        except InputError as error:
            reason = str(error) if str(error).startswith(name) else f"{Path(name).stem}: {error}"
            if name in required:
                raise InputError(reason) from None
            left_out.setdefault(name, reason)
        except Exception:  # a fault of the user's own method, which its run reports without harm to the others
            continue
    for job in started:  # the data may have changed since
        check_data(RunFolder(job.out), job.config, opener.open_federation(job.config))
    if all(job.config.algorithm.name in left_out for job in jobs):
        raise InputError(next(iter(left_out.values())))
    for federation in data.values():
        federation.load_features()
    for note in (*opener.notes, *(f"left out: {reason}" for reason in left_out.values())):
        on_note(note)
    return data, left_out


class _DataOpener:
    """Opener of the data of runs; consecutive runs on the same data share them."""

    def __init__(self, on_file: OnFile) -> None:
        self.notes: dict[str, None] = {}
        """Notes for the user about all data, without duplicates."""
        self._on_file = on_file
        self._key = ""
        self._partition: tuple[Domains, Partition] | None = None
        self._by_model: dict[str, Federation] = {}

    def open_federation(self, config: Config) -> Federation:
        key, model = repr((config.task, config.data, config.partition, config.run.seed)), repr(config.model)
        if self._partition is None or key != self._key:
            self._key, self._partition, self._by_model = key, partition_dataset(config, self._on_file), {}
        if model not in self._by_model:
            self._by_model[model] = build_federation(config, *self._partition, self._on_file)
            self.notes.update(dict.fromkeys(self._by_model[model].notes))
        return self._by_model[model]


def run_all(
    jobs: Sequence[Job], workers: int, resume: bool, track: str | None, on_progress: OnRunProgress = ignore_progress
) -> tuple[dict[str, Run], dict[str, str]]:
    """Train the unfinished runs. Returns the finished runs, and the errors of the others, by folder name.

    Raises RunError if all runs failed.
    """
    failures = {}
    with closing(sweep(jobs, workers, resume, track)) as steps:  # ends the runs if the caller is interrupted
        for step in steps:
            if step.event == "failed":
                failures[step.job.out.name] = step.error
            on_progress(step)
    if len(failures) == len(jobs):
        raise RunError(describe_failures(failures, len(jobs)))
    finished = [job for job in jobs if job.out.name not in failures]
    return {job.out.name: load_run(job.out, trust_code=is_same_code(job.config, job.out)) for job in finished}, failures


def describe_failures(failures: Mapping[str, str], runs: int) -> str:
    """One line on the runs that failed; empty if none did."""
    errors = "; ".join(f"{name}: {error}" for name, error in failures.items())
    return f"{len(failures)} of {runs} runs failed, resume to try them again: {errors}" if failures else ""


def _make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Make an algorithm; the error for a field that it lacks says how to set a field of one algorithm."""
    try:
        return make_algorithm(config)
    except InputError as error:
        raise InputError(f"{config.name}: {error}; use algorithms.NAME.FIELD to set a field of one algorithm") from None
