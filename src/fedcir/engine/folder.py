"""The run folder: what a run writes, how it is read again, and how it is resumed.

Every file but rounds.jsonl is written beside its place and moved there, so that a kill at any moment leaves either
the old file or the new one. Nothing is pickled: safetensors, JSON and TOML.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from fedcir.algorithms import add_new_fields
from fedcir.config import PATHS, Config, absolute_paths, config_from, config_tables, dump_toml, read_toml, typed
from fedcir.config.bounds import shown
from fedcir.data.domains import Kind
from fedcir.data.hashes import ImageHashes
from fedcir.data.partition.pieces import indented
from fedcir.data.private import check_no_links, open_to_append, private_folder
from fedcir.engine import packed
from fedcir.engine.best import best_of
from fedcir.engine.calibration import Calibration, Saved
from fedcir.engine.files import (
    CHECKSUM,
    RESTORE,
    check,
    checksum,
    content,
    file_hash,
    naming,
    pack,
    read_json,
    reading,
    regular,
    sealed,
    tensors_checksum,
    unpack,
    unsealed,
    unshared,
    write,
)
from fedcir.engine.formats import Card, Manifest, Summary, check_card, check_summary
from fedcir.engine.hits import Hits, SavedHits
from fedcir.engine.lock import LOCK_PATIENCE, take_lock
from fedcir.engine.store import GENERATIONS, NAME
from fedcir.types import Arrays, InputError, RoundRecord, ServerState

FORMAT = 1
NAMED = "round-{:06d}.safetensors"
IMAGE_HASHES = "image_hashes.safetensors"
HASHED = ("train", "validation")
"""Its tensors: sorted hashes of images, as 64-bit integers."""
NOT_ALWAYS = ("validation", "risk", "unseen", "accuracy_unseen", "epsilon")

REWRITE = "delete summary.json there and resume the run, which writes the summary and the model again"
REMAKE = "resume the run, which writes it again from the last checkpoint"
DROP = "delete it, and probabilities are not calibrated"
HASH_AGAIN = "delete it, and resume the run, which writes it again"
DROP_HITS = "delete it, and intervals rest on counts of test images"
REDO = "delete this line and all lines after it and resume the run, which repeats their rounds"


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

    def __init__(self, path: Path, identity: str | None = None) -> None:
        self.path = path
        self.identity = identity
        """Identity of the run that trains in it; None for one who only reads."""

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def foreign(self) -> bool:
        """Whether the folder holds something that is no part of a run, nor of the beginning of one."""
        own = {self.LOCK, "manifest.json", IMAGE_HASHES, "checkpoint", "clients", "releases"}
        return self.path.is_dir() and any(
            path.name not in own and not path.name.endswith(".tmp") for path in self.path.iterdir()
        )

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    def create(self, config: Config, manifest: dict[str, Any], hashes: ImageHashes | None = None) -> None:
        """Begin a run; config.toml comes last, so that a folder with one has all that a resume needs."""
        from fedcir import __version__

        for folder in (self.path, self.path / "checkpoint"):
            private_folder(folder)
        write(self.path / "manifest.json", indented(sealed(manifest)))
        if hashes is not None:
            self._save_image_hashes(hashes)
        about = {"format": FORMAT, "version": __version__, "torch": torch.__version__}
        if config.model.freeze and config.model.weights is not None:  # they are in no checkpoint
            about["weights"] = file_hash(Path(config.model.weights))
        for what, source in own_files(config).items():
            about[what] = file_hash(source)
            write(self.path / source.name, source.read_bytes())
        tables = {"fedcir": about, **absolute_paths(config_tables(config))}
        about[CHECKSUM] = _settings_checksum(tables)
        write(self.path / "config.toml", dump_toml(tables))

    def config(self) -> Config:
        check_no_links(self.path)
        tables = self._tables()
        with reading(self.path / "config.toml", RESTORE):
            config = config_from(tables)
            return replace(config, algorithm=add_new_fields(config.algorithm))

    def file_hash(self, what: str) -> str | None:
        """Of the file that holds its algorithm or model, as it was when the run began; None if no file does."""
        found: str | None = self._tables()["fedcir"].get(what)
        return found

    def _tables(self) -> dict[str, Any]:
        if not self.exists:
            raise InputError(f"{self.path} is not a run: it holds no config.toml")
        path = self.path / "config.toml"
        with reading(path, RESTORE):
            tables = read_toml(path)
            about = typed(tables.get("fedcir", {}), dict, "fedcir")
            found, said = about.get("format", "none"), about.pop(CHECKSUM, None)
            if said is not None and found == FORMAT:
                check(said, _settings_checksum(tables))
        if found != FORMAT:
            raise InputError(
                f"{self.path} has run-folder format {shown(found)}, but this fedcir reads format {FORMAT}: "
                "use the version of fedcir that wrote it"
            )
        return tables

    def manifest(self) -> dict[str, Any]:
        """Which client holds what; the clients of a large one are decoded when they are asked for."""
        path = self.path / "manifest.json"
        with reading(path, RESTORE):
            if regular(path).stat().st_size > packed.LARGE:
                return packed.packed_manifest(content(path))
        return read_json(path, Manifest, RESTORE)

    def _save_image_hashes(self, hashes: ImageHashes) -> None:
        arrays = {part: torch.from_numpy(getattr(hashes, part).view(np.int64)) for part in HASHED}
        about = {"kind": hashes.kind, CHECKSUM: tensors_checksum({"kind": hashes.kind}, arrays)}
        write(self.path / IMAGE_HASHES, save(arrays, {"fedcir": json.dumps(about)}))

    def image_hashes(self) -> ImageHashes | None:
        """Hashes of the images that the run trained and chose on; None where it keeps none."""
        path = self.path / IMAGE_HASHES
        if not path.exists():
            return None
        with reading(path, HASH_AGAIN), safe_open(regular(path), framework="pt") as file:
            about = typed(json.loads((file.metadata() or {}).get("fedcir", "")), dict, "metadata")
            kind: Kind = typed(about.get("kind"), Kind, "kind")
            arrays = {part: file.get_tensor(part) for part in HASHED}
            if any(tensor.dtype != torch.int64 or tensor.ndim != 1 for tensor in arrays.values()):
                raise InputError("its hashes are not whole numbers of 64 bits")
            check(about.get(CHECKSUM), tensors_checksum({"kind": kind}, arrays))
        return ImageHashes(kind, *(np.sort(arrays[part].numpy().view(np.uint64)) for part in HASHED))

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        found = read_json(path, Summary, REWRITE)
        with reading(path, REWRITE):
            check_summary(found)
        return found

    def weights(self) -> Arrays:
        """The tensors of the model that the run came to."""
        path = self.path / "model.safetensors"
        with reading(path, REMAKE):
            arrays = load_file(regular(path))
            if self.finished and (said := self.summary().get("model")) is not None:
                check(said, tensors_checksum(self._card(), arrays))
        return arrays

    def card(self) -> dict[str, Any]:
        """What its model's file says of the model."""
        with reading(self.path / "model.safetensors", REMAKE):
            found: dict[str, Any] = typed(self._card(), Card, "card")
            check_card(found)
        return found

    def _card(self) -> Any:
        with safe_open(regular(self.path / "model.safetensors"), framework="pt") as file:
            return json.loads((file.metadata() or {}).get("fedcir", ""))

    def records(self, after: int = 0) -> list[RoundRecord]:
        """The rounds after this one that were written whole.

        A line that is being written, or that a kill cut short, has no end yet and is not one of them.
        """
        path = self.path / "rounds.jsonl"
        if not path.exists():
            return []
        records: list[RoundRecord] = []
        with reading(path, RESTORE):
            lines = content(path).split(b"\n")[after:-1]
        for number, line in enumerate(lines, start=after + 1):
            with reading(f"line {number} of {path}", REDO):
                record = _record(line)
                if record.round != number:
                    raise InputError(f"it holds round {record.round}")
                records.append(record)
        return records

    def append(self, record: RoundRecord) -> None:
        path = self.path / "rounds.jsonl"
        with naming(path), open_to_append(path) as file:
            file.write(_line(record).encode())

    def rewind(self, round: int, aside: bool = False) -> list[RoundRecord]:
        """Delete the rounds after this one, which will be repeated; returns the rounds that stay.

        With `aside`, the file of all rounds so far is kept under another name: they may not come out the same again.
        """
        for leftover in (*self.path.glob(".*.tmp"), *(self.path / "checkpoint").glob(".*.tmp")):
            leftover.unlink()
        every = self.records()
        records = [record for record in every if record.round <= round]
        if aside and len(records) < len(every):
            write(self._unused(f"rounds-{len(every)}"), content(self.path / "rounds.jsonl"))
        write(self.path / "rounds.jsonl", "".join(_line(record) for record in records))
        for name in ("summary.json", *(f"checkpoint/{NAMED.format(each)}" for each in self.saved() if each > round)):
            (self.path / name).unlink(missing_ok=True)
        return records

    def _unused(self, stem: str) -> Path:
        numbers = ("", *(f"-{number}" for number in range(2, 10**6)))
        return next(path for each in numbers if not (path := self.path / f"{stem}{each}.old.jsonl").exists())

    def save_checkpoint(
        self,
        state: ServerState,
        records: Sequence[RoundRecord] = (),
        kept: Mapping[int, int] | None = None,
        record: RoundRecord | None = None,
    ) -> None:
        """Save a state. The last two are kept, and the one whose round was the best so far of `records`.

        `kept` says in which round each client kept what belongs to it, and `record` is that of the state's round.
        """
        kinds = {"shared": state.shared, "private": state.private}
        belongs = None if record is None else _record_checksum(record)
        data = pack(kinds, state.round, kept, self.identity, belongs)
        write(self.path / "checkpoint" / NAMED.format(state.round), data)
        rounds = self.saved()
        best = best_of([record for record in records if record.round in rounds])
        for old in rounds[:-GENERATIONS]:
            if best is None or old != best.round:
                (self.path / "checkpoint" / NAMED.format(old)).unlink()

    def saved(self) -> list[int]:
        """The rounds that have a checkpoint."""
        found = [NAME.fullmatch(path.name) for path in (self.path / "checkpoint").glob("round-*")]
        return sorted(int(each[1]) for each in found if each)

    def load_checkpoint(self) -> ServerState | None:
        """The newest state that reads back whole and whose rounds are all recorded; None if there is none yet."""
        return next((state for state, _ in self.states()), None)

    def states(
        self, on_damage: Callable[[str], None] = lambda fault: None
    ) -> Iterator[tuple[ServerState, Mapping[int, int]]]:
        """All states that read back whole and whose rounds are all recorded, the newest first.

        Each with the rounds in which clients kept what belongs to it. One that belongs to another run is an error.
        """
        records = self.records()
        for round in reversed([each for each in self.saved() if each <= len(records)]):
            path = self.path / "checkpoint" / NAMED.format(round)
            try:
                kinds, about = unpack(path, "shared", "private")
                if about.round != round:
                    raise InputError(f"{path} holds round {about.round}")
            except InputError as error:
                on_damage(str(error).removesuffix(f"; {RESTORE}"))
                continue
            if None not in (about.run, self.identity) and about.run != self.identity:
                raise InputError(f"{path} was saved by a run with other settings or data: {RESTORE}")
            if about.record not in (None, _record_checksum(records[round - 1])):
                raise InputError(f"{path} does not belong to line {round} of rounds.jsonl: {RESTORE}")
            kept = {int(client): each for client, each in (about.kept or {}).items()}
            yield ServerState(round, kinds["shared"], kinds["private"]), kept

    def finish(self, summary: dict[str, Any], model: Arrays, card: dict[str, Any]) -> None:
        """Write the model and then the summary, whose presence says that the run is done."""
        said = {**summary, "model": self.save_model(model, card)}
        write(self.path / "summary.json", json.dumps(sealed(said), indent=1, ensure_ascii=False) + "\n")

    def save_model(self, model: Arrays, card: dict[str, Any]) -> str:
        """Write the model; gives its checksum."""
        # One metadata key, since safetensors writes several in no fixed order and equal runs are to be equal files.
        about, arrays = json.dumps({"format": FORMAT, **card}, sort_keys=True, ensure_ascii=False), unshared(model)
        write(self.path / "model.safetensors", save(arrays, {"fedcir": about}))
        return tensors_checksum(json.loads(about), arrays)

    def save_calibration(self, calibration: Calibration) -> None:
        write(self.path / "calibration.json", json.dumps(sealed(calibration.to_json()), indent=1) + "\n")

    def calibration(self) -> Calibration | None:
        """What the clients' validation images told of the saved model; None where there were none."""
        path = self.path / "calibration.json"
        if not path.exists():
            return None
        values = read_json(path, Saved, DROP)
        with reading(path, DROP):
            found = Calibration.from_json(values)
        summary = self.summary()
        saved = summary["saved"]["round"] if "saved" in summary else summary["rounds"]
        return found if found.round == saved else None  # or of a run that was extended

    def save_hits(self, hits: Hits) -> None:
        write(self.path / "hits.json", json.dumps(sealed(hits.to_json()), indent=1, ensure_ascii=False) + "\n")

    def hits(self) -> Hits | None:
        """Results of the last test image by image; None where they were not kept."""
        path = self.path / "hits.json"
        if not path.exists():
            return None
        values = read_json(path, SavedHits, DROP_HITS)
        with reading(path, DROP_HITS):
            hits = Hits.from_json(cast(SavedHits, values))
        return (
            hits if self.finished and hits.round == self.summary()["rounds"] else None
        )  # or of a run that was extended

    def has_model(self) -> bool:
        """Whether the model is there and whole."""
        try:
            self.card(), self.weights()
        except InputError:
            return False
        return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: two processes that train into one would destroy each other's run.

        If nothing was written in the meantime, nothing is left: no lock, and no folder that was not there before.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file: choose another folder")
        if not self.exists and self.foreign:
            raise InputError(f"{self.path} holds other files and no run: choose another folder")
        check_no_links(self.path)
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


def _settings_checksum(tables: Mapping[str, Any]) -> str:
    """But for places on this machine: whoever moves data may say so in the file."""
    return checksum(
        {
            section: {name: value for name, value in values.items() if f"{section}.{name}" not in PATHS}
            for section, values in tables.items()
            if isinstance(values, Mapping)
        }
    )


def _record(line: bytes) -> RoundRecord:
    """The round of a line of rounds.jsonl. Runs of before all methods called their cross-entropy `ce` may have `fl`."""
    record: RoundRecord = unsealed(json.loads(line), RoundRecord, "round")
    return replace(record, losses={"ce" if name == "fl" else name: value for name, value in record.losses.items()})


def _line(record: RoundRecord) -> str:
    """A line of rounds.jsonl."""
    return json.dumps(sealed(_record_values(record)), ensure_ascii=False) + "\n"


def _record_values(record: RoundRecord) -> dict[str, Any]:
    """A record without the fields that are empty in most runs, such as validation."""
    return {name: value for name, value in asdict(record).items() if name not in NOT_ALWAYS or value is not None}


def _record_checksum(record: RoundRecord) -> str:
    return checksum(_record_values(record))
