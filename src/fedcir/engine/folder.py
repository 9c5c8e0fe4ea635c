"""The run folder: what a run writes, how it is read again, and how it is resumed.

Every file but rounds.jsonl is written beside its place and moved there, so that a kill at any moment leaves either
the old file or the new one. Nothing is pickled: safetensors, JSON and TOML.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, NotRequired, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from fedcir.config import Config, config_from, config_tables, dump_toml, read_toml, typed
from fedcir.engine.calibration import Calibration, Saved
from fedcir.engine.files import RESTORE, file_hash, naming, pack, read_json, reading, unpack, unshared, write
from fedcir.engine.store import GENERATIONS
from fedcir.types import Arrays, InputError, RoundRecord, ServerState

FORMAT = 1
NOT_ALWAYS = ("validation", "risk", "unseen", "accuracy_unseen")
LOCK_PATIENCE = 3.0
"""Seconds that the workers of a killed run are given to end: they hold its lock too, and might still write."""

REWRITE = "delete summary.json there and resume the run, which writes the summary and the model again"
REMAKE = "resume the run, which writes it again from the last checkpoint"
DROP = "delete it, and probabilities are not calibrated"
REDO = "delete this line and all lines after it and resume the run, which repeats their rounds"


class Holder(TypedDict):
    """A client in a manifest."""

    id: int
    domain: str
    train: object
    """The names of its samples, or their number where a site does not tell them."""


class Manifest(TypedDict):
    """What is relied on in manifest.json."""

    clients: list[Holder]
    hash: str
    test: NotRequired[dict[str, list[str]]]


class Scores(TypedDict):
    round: int
    accuracy_mean: float | None
    accuracy_weighted: float | None
    accuracy_worst: float | None
    accuracy: dict[str, float]


class Summary(TypedDict):
    """What is relied on in summary.json."""

    algorithm: str
    dataset: str
    seed: int
    rounds: int
    final: Scores | None
    best: Scores | None
    cost: dict[str, object]


class Card(TypedDict):
    """What is relied on in the metadata of model.safetensors."""

    classes: list[str]
    model: dict[str, object]
    algorithm: dict[str, object]


def own_files(config: Config) -> dict[str, Path]:
    """The user's files that hold the algorithm or the model, which a run keeps a copy of."""
    algorithm = Path(config.algorithm.name)
    files = {"algorithm": algorithm if algorithm.suffix == ".py" else None, "model": config.model.file}
    found = {what: file for what, file in files.items() if file is not None}
    if len({file.name for file in found.values()}) < len({file.resolve() for file in found.values()}):
        raise InputError(f"the files of algorithm and model are both called {algorithm.name}: rename one of them")
    return found


class RunFolder:
    """A run on disk."""

    LOCK = ".lock"

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def foreign(self) -> bool:
        """Whether the folder holds something that is no part of a run, nor of the beginning of one."""
        own = {self.LOCK, "manifest.json", "checkpoint", "clients"}
        return self.path.is_dir() and any(
            path.name not in own and not path.name.endswith(".tmp") for path in self.path.iterdir()
        )

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    def create(self, config: Config, manifest: dict[str, Any]) -> None:
        """Begin a run; config.toml comes last, so that a folder with one has all that a resume needs."""
        from fedcir import __version__

        (self.path / "checkpoint").mkdir(parents=True, exist_ok=True)
        write(self.path / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False))
        about = {"format": FORMAT, "version": __version__, "torch": torch.__version__}
        if config.model.freeze and config.model.weights is not None:  # they are in no checkpoint
            about["weights"] = file_hash(Path(config.model.weights))
        for what, source in own_files(config).items():
            about[what] = file_hash(source)
            write(self.path / source.name, source.read_bytes())
        write(self.path / "config.toml", dump_toml({"fedcir": about, **config_tables(config)}))

    def config(self) -> Config:
        tables = self._tables()
        with reading(self.path / "config.toml", RESTORE):
            return config_from(tables)

    def file_hash(self, what: str) -> str | None:
        """Of the file that holds its algorithm or model, as it was when the run began; None if no file does."""
        found: str | None = self._tables()["fedcir"].get(what)
        return found

    def _tables(self) -> dict[str, Any]:
        if not self.exists:
            raise InputError(f"{self.path} is not a run: it holds no config.toml")
        path = self.path / "config.toml"
        tables = read_toml(path)
        with reading(path, RESTORE):
            found = typed(tables.get("fedcir", {}), dict, "fedcir").get("format", "none")
        if found != FORMAT:
            raise InputError(
                f"{self.path} has run-folder format {found}, but this fedcir reads format {FORMAT}: "
                "use the version of fedcir that wrote it"
            )
        return tables

    def manifest(self) -> dict[str, Any]:
        return read_json(self.path / "manifest.json", Manifest, RESTORE)

    def summary(self) -> dict[str, Any]:
        return read_json(self.path / "summary.json", Summary, REWRITE)

    def weights(self) -> Arrays:
        """The tensors of the model that the run came to."""
        path = self.path / "model.safetensors"
        with reading(path, REMAKE):
            return load_file(path)

    def card(self) -> dict[str, Any]:
        """What its model's file says of the model."""
        path = self.path / "model.safetensors"
        with reading(path, REMAKE), safe_open(path, framework="pt") as file:
            found: dict[str, Any] = typed(json.loads((file.metadata() or {}).get("fedcir", "")), Card, "card")
        return found

    def records(self, after: int = 0) -> list[RoundRecord]:
        """The rounds after this one that were written whole.

        A line that is being written, or that a kill cut short, has no end yet and is not one of them.
        """
        path = self.path / "rounds.jsonl"
        if not path.exists():
            return []
        records: list[RoundRecord] = []
        for number, line in enumerate(path.read_bytes().split(b"\n")[after:-1], start=after + 1):
            with reading(f"line {number} of {path}", REDO):
                record = _record(line)
                if record.round != number:
                    raise InputError(f"it holds round {record.round}")
                records.append(record)
        return records

    def append(self, record: RoundRecord) -> None:
        path = self.path / "rounds.jsonl"
        with naming(path), open(path, "a", encoding="utf-8") as file:
            file.write(_line(record))

    def rewind(self, round: int) -> list[RoundRecord]:
        """Delete the rounds after this one, which will be repeated; returns the rounds that stay."""
        for leftover in (*self.path.glob(".*.tmp"), *(self.path / "checkpoint").glob(".*.tmp")):
            leftover.unlink()
        records = [record for record in self.records() if record.round <= round]
        write(self.path / "rounds.jsonl", "".join(_line(record) for record in records))
        with contextlib.suppress(FileNotFoundError):
            (self.path / "summary.json").unlink()
        return records

    def save_checkpoint(self, state: ServerState) -> None:
        folder = self.path / "checkpoint"
        kinds = {"shared": state.shared, "private": state.private}
        write(folder / f"round-{state.round:06d}.safetensors", pack(kinds, state.round))
        for old in self._checkpoints()[:-GENERATIONS]:
            old.unlink()

    def load_checkpoint(self) -> ServerState | None:
        """The newest state that reads back whole and whose rounds are all recorded; None if there is none yet."""
        recorded = len(self.records())
        for path in reversed(self._checkpoints()):
            try:
                kinds, round = unpack(path)
            except (SafetensorError, KeyError, ValueError, TypeError):
                continue
            if round <= recorded:
                return ServerState(round, kinds["shared"], kinds["private"])
        return None

    def finish(self, summary: dict[str, Any], model: Arrays, card: dict[str, Any]) -> None:
        """Write the model and then the summary, whose presence says that the run is done."""
        self.save_model(model, card)
        write(self.path / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")

    def save_model(self, model: Arrays, card: dict[str, Any]) -> None:
        # One metadata key, since safetensors writes several in no fixed order and equal runs are to be equal files.
        about = {"fedcir": json.dumps({"format": FORMAT, **card}, sort_keys=True, ensure_ascii=False)}
        write(self.path / "model.safetensors", save(unshared(model), about))

    def save_calibration(self, calibration: Calibration) -> None:
        write(self.path / "calibration.json", json.dumps(calibration.to_json(), indent=1) + "\n")

    def calibration(self) -> Calibration | None:
        """What the clients' validation images told of the last model; None where there were none."""
        path = self.path / "calibration.json"
        if not path.exists():
            return None
        values = read_json(path, Saved, DROP)
        with reading(path, DROP):
            found = Calibration.from_json(values)
        return found if found.round == self.summary()["rounds"] else None  # or of a run that was extended

    def has_model(self) -> bool:
        """Whether the model is there and whole."""
        try:
            with safe_open(self.path / "model.safetensors", framework="pt"):  # it knows how long the file must be
                return True
        except (OSError, SafetensorError):
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: two processes that train into one would destroy each other's run.

        If nothing was written in the meantime, nothing is left: no lock, and no folder that was not there before.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file: choose another folder")
        if not self.exists and self.foreign:
            raise InputError(f"{self.path} holds other files and no run: choose another folder")
        lock, new = self.path / self.LOCK, not self.path.exists()
        file = take_lock(lock, LOCK_PATIENCE)
        if file is None:
            raise InputError(f"another process is training in {self.path}: wait for it, or choose another folder")
        with file:
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # another has just begun in it
                    if list(self.path.iterdir()) == [lock]:
                        lock.unlink()
                        if new:
                            self.path.rmdir()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoint").glob("round-*.safetensors"))


def _record(line: bytes) -> RoundRecord:
    """The round of a line of rounds.jsonl. Runs of before all methods called their cross-entropy `ce` may have `fl`."""
    record: RoundRecord = typed(json.loads(line), RoundRecord, "round")
    return replace(record, losses={"ce" if name == "fl" else name: value for name, value in record.losses.items()})


def _line(record: RoundRecord) -> str:
    """A line of rounds.jsonl, without the fields that are empty in most runs, such as validation."""
    told = asdict(record).items()
    values = {name: value for name, value in told if name not in NOT_ALWAYS or value is not None}
    return json.dumps(values, ensure_ascii=False) + "\n"


def take_lock(lock: Path, patience: float) -> IO[str] | None:
    """The file of a lock that this process now holds, its folder made if need be; None if another keeps it.

    Whoever held it may have removed it in the meantime. It then locks nobody out, so the one in its place is taken.
    """
    until = time.monotonic() + patience
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(lock, "w", encoding="utf-8")  # noqa: SIM115 (the caller closes it)
        except FileNotFoundError:  # its folder was removed just now
            if time.monotonic() > until:
                raise
            continue
        if not _lock(file, until):
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        file.close()


def _lock(file: IO[str], until: float) -> bool:
    """An advisory lock that the system releases when the process and its workers have ended, however they ended."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return True
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        else:
            return True
