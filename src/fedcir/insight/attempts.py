"""The folder of a search: settings.toml says what was asked, trials.jsonl has a line for each trial that has ended."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fedcir.config import Config, absolute_paths, config_from, config_tables, dump_toml, read_toml, typed
from fedcir.data.private import check_no_links, open_to_append
from fedcir.engine.files import RESTORE, naming, reading, write
from fedcir.engine.lock import LOCK_PATIENCE, take_lock
from fedcir.types import InputError


@dataclass(frozen=True)
class Attempt:
    """A trial that has ended."""

    number: int
    """From 1."""
    settings: dict[str, object]
    """What was tried, by name."""
    state: Literal["done", "stopped", "failed"]
    """It ran all its rounds, was stopped early, or went wrong."""
    rounds: list[int]
    """Those after which it was tested."""
    accuracy: list[float]
    """After each of them, on validation images: the mean over domains."""
    worst: float | None
    """The worst domain after the last of them."""
    why: str = ""
    """What went wrong."""

    @property
    def score(self) -> float:
        """The accuracy after its last round; 0 if it has none."""
        return self.accuracy[-1] if self.accuracy else 0.0


@dataclass(frozen=True)
class Plan:
    """What a search was asked to do."""

    config: Config
    """What all trials share, and the settings that the first one tries."""
    space: dict[str, str]
    trials: int
    data: str
    """The hash of its manifest: on other data, earlier trials say nothing."""


class Book:
    """The folder, which may be left at any moment: a trial that had not ended is repeated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._plan, self._trials = path / "settings.toml", path / "trials.jsonl"

    @property
    def exists(self) -> bool:
        return self._plan.is_file()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, which must be a new one or that of a search."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file: choose another folder")
        if not self.exists and self.path.is_dir() and any(p.name[0] != "." for p in self.path.iterdir()):
            raise InputError(f"{self.path} holds other files and no trials: choose another folder")
        check_no_links(self.path)
        file = take_lock(self.path / ".lock", LOCK_PATIENCE)
        if file is None:
            raise InputError(f"another process is tuning in {self.path}: wait for it, or choose another folder")
        with file:
            try:
                yield
            finally:
                if not self.exists:  # nothing came of it
                    with contextlib.suppress(OSError):
                        (self.path / ".lock").unlink()
                        self.path.rmdir()

    def plan(self) -> Plan:
        tables = read_toml(self._plan)
        with reading(self._plan, RESTORE):
            about = typed(tables.get("fedcir", {}), dict, "fedcir")
            space = typed(about.get("space"), dict[str, str], "fedcir.space")
            trials = typed(about.get("trials"), int, "fedcir.trials")
            return Plan(config_from(tables), space, trials, typed(about.get("data"), str, "fedcir.data"))

    def save(self, plan: Plan) -> None:
        from fedcir import __version__

        about = {"version": __version__, "trials": plan.trials, "data": plan.data, "space": plan.space}
        write(self._plan, dump_toml({"fedcir": about, **absolute_paths(config_tables(plan.config))}))

    def attempts(self) -> list[Attempt]:
        """The trials on record; a line that a kill cut short is not one, and is removed."""
        if not self._trials.exists():
            return []
        *lines, rest = self._trials.read_bytes().split(b"\n")
        if rest:
            write(self._trials, b"".join(line + b"\n" for line in lines))
        found = []
        for number, line in enumerate(lines, start=1):
            with reading(f"line {number} of {self._trials}", "delete this line and all lines after it, and resume"):
                found.append(typed(json.loads(line), Attempt, "trial"))
        return found

    def add(self, attempt: Attempt) -> None:
        with naming(self._trials), open_to_append(self._trials) as file:
            file.write(f"{json.dumps(asdict(attempt), ensure_ascii=False)}\n".encode())
