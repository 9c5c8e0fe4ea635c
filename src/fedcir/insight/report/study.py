"""Runs that belong together: on the same data, by method and seed, each method under a name that tells it apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.config import PATHS, config_tables
from fedcir.engine.resume import MAY_DIFFER
from fedcir.insight.experiments.paper import METHODS
from fedcir.runs.compare import baseline_of
from fedcir.runs.run import Run, Source, as_run, same_data
from fedcir.types import InputError


@dataclass(frozen=True)
class Study:
    """Finished runs to be told of together."""

    dataset: str
    runs: Mapping[str, Mapping[int, Run]]
    """By the method's name and the seed."""
    notes: tuple[str, ...] = ()
    """What its reader should know of them, and which runs are left out."""

    @property
    def baseline(self) -> str:
        return baseline_of(self.runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for by_seed in self.runs.values() for seed in by_seed})

    @property
    def common_seed(self) -> int | None:
        """The first that every method was run with."""
        both = set.intersection(*(set(by_seed) for by_seed in self.runs.values()))
        return min(both, default=None)

    @property
    def one_of_each(self) -> dict[str, Run]:
        """A run of each method, of one seed where there is one that all have."""
        seed = self.common_seed
        return {name: by_seed[min(by_seed) if seed is None else seed] for name, by_seed in self.runs.items()}


def study_of(sources: Sequence[Source], trust_code: bool = False) -> Study:
    """Those of these runs that are finished and can be read, which must be on the same data."""
    finished: list[Run] = []
    faults = []
    for source in sources:
        try:
            finished.append(_finished(as_run(source, trust_code)))
        except InputError as error:
            faults.append(str(error))
    if not finished:
        raise InputError(faults[0])
    same_data(finished)
    finished.sort(key=_rank)
    settings = {run.path: _settings(run) for run in finished}
    names = _names(settings)
    runs: dict[str, dict[int, Run]] = {}
    for run in finished:
        name, seed = names[run.path], run.config.run.seed
        if seed in (by_seed := runs.setdefault(name, {})):
            raise InputError(f"{by_seed[seed].path} and {run.path} are both {name} with seed {seed}: leave one out")
        by_seed[seed] = run
    notes = [f"left out: {fault}" for fault in faults]
    if differing := [key for key in _differing(list(settings.values())) if not key.startswith("algorithm.")]:
        notes.append(f"these runs differ not only in the method, but also in {', '.join(differing)}")
    return Study(finished[0].config.data.name, runs, tuple(notes))


def _finished(run: Run) -> Run:
    """The run, of which all can be told."""
    _ = run.final
    rounds = run.summary["rounds"] if run.summary is not None else 0
    if len(run.records) < rounds:
        raise InputError(f"{run.path / 'rounds.jsonl'} holds {len(run.records)} of {rounds} rounds; the rest is lost")
    return run


def _rank(run: Run) -> tuple[int, str]:
    """The paper's order of methods, so that each has one place in all reports; others come after, by name."""
    name = run.config.algorithm.name
    return (METHODS.index(name), "") if name in METHODS else (len(METHODS), Path(name).stem)


def shareable(run: Run) -> dict[str, dict[str, Any]]:
    """A run's settings for others to read: of files only their names, and nothing of where its data lie."""
    tables = config_tables(run.config)
    tables["algorithm"]["name"] = Path(tables["algorithm"]["name"]).name
    for section, name in (key.split(".") for key in PATHS):
        if name in tables[section] and section == "data":
            del tables[section][name]
        elif name in tables[section]:
            tables[section][name] = Path(tables[section][name]).name
    return tables


def _settings(run: Run) -> dict[str, Any]:
    """All that makes a run what it is, but for its seed: by section.field."""
    flat = {f"{section}.{name}": value for section, values in shareable(run).items() for name, value in values.items()}
    flat["algorithm.name"] = Path(flat["algorithm.name"]).stem
    apart = MAY_DIFFER - {"server.rounds"} | {"run.seed"}
    return {key: value for key, value in flat.items() if key not in apart}


def _names(settings: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """A method's name, with what differs between runs of the same method."""
    names = {}
    for path, own in settings.items():
        alike = [each for each in settings.values() if each["algorithm.name"] == own["algorithm.name"]]
        told = [f"{key.partition('.')[2]}={own.get(key)}" for key in _differing(alike)]
        names[path] = " ".join([own["algorithm.name"], *told])
    return names


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = sorted({key for each in settings for key in each})
    return [key for key in keys if len({repr(each.get(key)) for each in settings}) > 1]
