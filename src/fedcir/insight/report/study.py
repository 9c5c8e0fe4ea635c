"""Runs that belong together: on the same data, by method and seed, each method under a name that tells it apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcir.config import PATHS, config_tables
from fedcir.engine.folder import RunFolder
from fedcir.engine.resume import MAY_DIFFER
from fedcir.insight.experiments.experiment import METHODS
from fedcir.runs.compare import baseline_of
from fedcir.types import InputError


@dataclass(frozen=True)
class Study:
    """Finished runs to be told of together."""

    dataset: str
    runs: Mapping[str, Mapping[int, RunFolder]]
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
    def one_of_each(self) -> dict[str, RunFolder]:
        """A run of each method, of one seed where there is one that all have."""
        seed = self.common_seed
        return {name: by_seed[min(by_seed) if seed is None else seed] for name, by_seed in self.runs.items()}


def study_of(folders: Sequence[RunFolder]) -> Study:
    """Those of these runs that are finished and can be read, which must be on the same data."""
    faults = {folder.path: fault for folder in folders if (fault := _fault(folder)) is not None}
    finished = [folder for folder in folders if folder.path not in faults]
    if not finished:
        raise InputError(next(iter(faults.values())))
    _same_data(finished)
    finished.sort(key=_rank)
    settings = {folder.path: _settings(folder) for folder in finished}
    names = _names(settings)
    runs: dict[str, dict[int, RunFolder]] = {}
    for folder in finished:
        name, seed = names[folder.path], folder.config().run.seed
        if seed in (by_seed := runs.setdefault(name, {})):
            raise InputError(
                f"{by_seed[seed].path} and {folder.path} are the same run, {name} with seed {seed}: leave one out"
            )
        by_seed[seed] = folder
    notes = [f"left out: {fault}" for fault in faults.values()]
    if differing := [key for key in _differing(list(settings.values())) if not key.startswith("algorithm.")]:
        notes.append(f"these runs differ in {', '.join(differing)}, not only in the method")
    return Study(finished[0].config().data.name, runs, tuple(notes))


def _fault(folder: RunFolder) -> str | None:
    """Why a run cannot be told of, if it cannot."""
    if not folder.finished:
        return f"{folder.path} holds no finished run: resume it to finish it"
    try:
        folder.config(), folder.manifest()
        summary, recorded = folder.summary(), len(folder.records())
    except InputError as error:
        return str(error)
    if recorded < summary["rounds"]:
        return f"{folder.path / 'rounds.jsonl'} holds {recorded} of {summary['rounds']} rounds, the rest is damaged"
    if summary["final"] is None:
        return f"{folder.path} was never tested, since no client had a test Dataset"
    return None


def _rank(folder: RunFolder) -> int:
    """The paper's order of methods, so that each has one place and colour in all reports; others come after."""
    name = folder.config().algorithm.name
    return METHODS.index(name) if name in METHODS else len(METHODS)


def _same_data(folders: Sequence[RunFolder]) -> None:
    first = folders[0]
    for other in folders[1:]:
        for what, one, two in (
            ("datasets", first.config().data.name, other.config().data.name),
            ("data", first.manifest().get("content"), other.manifest().get("content")),
        ):
            if one != two and not (what == "data" and _drawn_anew(first, other)):
                names = f" ({one} and {two})" if what == "datasets" else ""
                raise InputError(f"{first.path} and {other.path} ran on different {what}{names}: report on each alone")


def _drawn_anew(first: RunFolder, other: RunFolder) -> bool:
    """Whether training images were drawn by seeds that differ, of data that are tested on the same images."""
    one, two = first.config(), other.config()
    drawn = one.data.train_per_domain is not None or one.data.val_fraction > 0
    return drawn and one.run.seed != two.run.seed and first.manifest().get("test") == other.manifest().get("test")


def shareable(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """A run's settings for others to read: of files only their names, and nothing of where its data lie."""
    tables = config_tables(folder.config())
    tables["algorithm"]["name"] = Path(tables["algorithm"]["name"]).name
    for section, name in (key.split(".") for key in PATHS):
        if name in tables[section] and section == "data":
            del tables[section][name]
        elif name in tables[section]:
            tables[section][name] = Path(tables[section][name]).name
    return tables


def _settings(folder: RunFolder) -> dict[str, Any]:
    """All that makes a run what it is, but for its seed: by section.field."""
    flat = {
        f"{section}.{name}": value for section, values in shareable(folder).items() for name, value in values.items()
    }
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
