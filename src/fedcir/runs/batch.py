"""The runs that a comparison or an experiment takes: what is asked for, checked before anything starts, and done."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from fedcir.algorithms import algorithm_class, make_algorithm, names
from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import AlgorithmConfig, Config
from fedcir.data.domains import Domains
from fedcir.data.federation import Federation, deal, federation_from
from fedcir.data.partition.shares import Shares
from fedcir.data.pictures.decode import OnFile
from fedcir.engine.folder import RunFolder
from fedcir.engine.resume import check_data, check_settings, same_code
from fedcir.engine.simulate import check_run
from fedcir.runs.run import Run, load_run
from fedcir.runs.sweep import Job, Progress, sweep
from fedcir.runs.tracking import check_tracker
from fedcir.types import InputError, RunError

OnProgress = Callable[[Progress], None]
"""Told of every run that begins, of each of its rounds, and of its end."""
OnNote = Callable[[str], None]
"""Told what the user should know."""


class OnWork(Protocol):
    """Told how much is done of something that takes long: decoding images, measuring distances."""

    def __call__(self, done: int, total: int | None, what: str) -> None: ...


def unheard(*said: object, **more: object) -> None:
    """For a caller that does not listen."""


def chosen_algorithms(asked: Sequence[str | Path]) -> list[str]:
    """Algorithms by name or file; all stands for those of the package."""
    if isinstance(asked, str):
        raise InputError(f"algorithms takes a list of names, got {asked!r}")
    chosen = [each for name in map(str, asked) for each in (names() if name == "all" else [name])]
    for name in chosen:
        algorithm_class(name)
    if not chosen:
        raise InputError("algorithms is empty: name at least one, or all")
    stems = [Path(name).stem for name in chosen]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise InputError(f"algorithms names {twice!r} twice: name it once")
    return chosen


BASELINE = "fedavg"
"""Never left out: what others are compared with."""


def required(asked: Sequence[str | Path]) -> set[str]:
    """Those of a list that its user wants in any case: the ones that he names, and the baseline."""
    return {BASELINE, *map(str, asked)}


def chosen_seeds(asked: Sequence[int]) -> list[int]:
    seeds = sorted(asked)
    if not seeds or any(type(seed) is not int for seed in seeds):
        raise InputError(f"seeds takes whole numbers such as 0, 1, 2, got {list(asked)}")
    if twice := next((str(seed) for seed in seeds if seeds.count(seed) > 1), ""):
        raise InputError(f"seeds names {twice} twice: name it once")
    return seeds


def check_target(target: float | None) -> None:
    if target is not None and not 0 < target < 1:
        raise InputError(f"target is an accuracy between 0 and 1, got {target}")


class Ready(NamedTuple):
    """What was found before anything starts."""

    data: Mapping[str, Federation]
    """Of the runs that are not done yet, by the dataset's name."""
    left_out: Mapping[str, str]
    """Why methods that nobody asked for by name do not go with the settings, by method."""


def prepare(
    jobs: Sequence[Job],
    resume: bool,
    track: str | None,
    needed: Collection[str],
    on_work: OnWork = unheard,
    on_note: OnNote = unheard,
) -> Ready:
    """Find what is wrong before anything starts; open each dataset once, so that no run waits for another to do it.

    Settings that do not go with a method that is needed are refused.
    """
    check_tracker(track)
    begun = []
    for job in jobs:
        algorithm, folder = _algorithm(job.config.algorithm), RunFolder(job.out)
        if folder.exists and not resume:
            raise InputError(f"{job.out} already holds a run: resume it, or choose another folder")
        if folder.exists and not job.done:
            check_settings(folder, job.config, algorithm)
            begun.append(job)
    opener = _Opener(partial(on_work, what="preparing images"))
    data: dict[str, Federation] = {}
    left_out: dict[str, str] = {}
    for job in jobs:
        name, first = job.config.algorithm.name, job.config.run.seed == jobs[0].config.run.seed
        if (resume and job.done) or not (first or job.config.data.name not in data):
            continue
        federation = opener.federation(job.config)
        data.setdefault(job.config.data.name, federation)
        try:
            check_run(job.config, _algorithm(job.config.algorithm), federation)
        except InputError as error:
            why = str(error) if str(error).startswith(name) else f"{Path(name).stem}: {error}"
            if name in needed:
                raise InputError(why) from None
            left_out.setdefault(name, why)
        except Exception:  # a fault of the user's own method, which its run names without harm to the others
            continue
    for job in begun:  # the data may have changed since
        check_data(RunFolder(job.out), job.config, opener.federation(job.config))
    if all(job.config.algorithm.name in left_out for job in jobs):
        raise InputError(next(iter(left_out.values())))
    for federation in data.values():
        federation.load_features()
    for note in (*opener.notes, *(f"left out: {why}" for why in left_out.values())):
        on_note(note)
    return Ready(data, left_out)


class _Opener:
    """Opens the data of one run after another; runs that follow each other on the same data share them."""

    def __init__(self, on_file: OnFile) -> None:
        self.notes: dict[str, None] = {}
        """What the user should know of all that was opened, each once."""
        self._on_file = on_file
        self._last = ""
        self._dealt: tuple[Domains, Shares] | None = None
        self._by_model: dict[str, Federation] = {}

    def federation(self, config: Config) -> Federation:
        key, model = repr((config.data, config.partition, config.run.seed)), repr(config.model)
        if self._dealt is None or key != self._last:
            self._last, self._dealt, self._by_model = key, deal(config, self._on_file), {}
        if model not in self._by_model:
            self._by_model[model] = federation_from(config, *self._dealt, self._on_file)
            self.notes.update(dict.fromkeys(self._by_model[model].notes))
        return self._by_model[model]


def run_all(
    jobs: Sequence[Job], workers: int, resume: bool, track: str | None, on_progress: OnProgress = unheard
) -> tuple[dict[str, Run], dict[str, str]]:
    """Do the runs that are not done yet. Returns those that ended well, and why the others failed, by folder name.

    If all of them failed, that is a RunError.
    """
    failures = {}
    with closing(sweep(jobs, workers, resume, track)) as steps:  # so that none goes on if the caller is stopped
        for step in steps:
            if step.event == "failed":
                failures[step.job.out.name] = step.said
            on_progress(step)
    if len(failures) == len(jobs):
        raise RunError(told_failures(failures, len(jobs)))
    ended = [job for job in jobs if job.out.name not in failures]
    return {job.out.name: load_run(job.out, trust_code=same_code(job.config, job.out)) for job in ended}, failures


def told_failures(failures: Mapping[str, str], runs: int) -> str:
    """What went wrong, in a line."""
    some = "; ".join(f"{name}: {why}" for name, why in failures.items())
    return f"{len(failures)} of {runs} runs failed, resume to try them again: {some}"


def _algorithm(config: AlgorithmConfig) -> Algorithm:
    """Find a field that one of several algorithms lacks before any of them starts."""
    try:
        return make_algorithm(config)
    except InputError as error:
        raise InputError(f"{config.name}: {error}; use algorithms.NAME.FIELD to set a field of one algorithm") from None
