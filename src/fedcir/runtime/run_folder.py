"""The files of a run: how they are written, read and locked.

Every file except rounds.jsonl is written to a temporary file and renamed, so that a kill at any moment leaves either
the old file or the new one. Nothing is pickled: safetensors, JSON and TOML.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from fedcir import files
from fedcir.algorithms import add_new_fields
from fedcir.client.calibration import Calibration, SavedCalibration
from fedcir.client.prediction import Hits, SavedHits
from fedcir.client.state import GENERATIONS, STATE_FILE
from fedcir.config import Config, config_from_tables, config_to_tables, dump_toml, make_paths_absolute, read_toml
from fedcir.data.manifest import ARRAYS_FILE, load_manifest, save_manifest
from fedcir.data.splits import ImageHashes
from fedcir.errors import InputError
from fedcir.runtime import file_formats
from fedcir.tensor_files import compute_tensor_checksum, copy_shared_tensors, pack_groups, unpack_groups
from fedcir.types import RoundRecord, ServerState, Tensors
from fedcir.validation import check_type, format_value

FORMAT = 1
CHECKPOINT_NAME = "round-{:06d}.safetensors"
IMAGE_HASHES = "image_hashes.safetensors"
REWRITE_HINT = "delete summary.json there and resume the run, which writes the summary and the model again"
MODEL_HINT = "resume the run, which writes it again from the last checkpoint"
CALIBRATION_HINT = "delete it, and probabilities are not calibrated"
SUMS = "sums.json"
SUMS_HINT = "delete it, and the report leaves out metrics by label or class"
HITS_HINT = "delete it, and intervals rest on counts of test images"
RECORD_HINT = "delete this line and all lines after it and resume the run, which repeats their rounds"


class RunFolder:
    """The folder of a run."""

    LOCK = ".lock"
    FIRST_FILES = (LOCK, "manifest.json", ARRAYS_FILE, IMAGE_HASHES, "checkpoint", "clients", "releases")
    """Files that a run may write before its config.toml."""

    def __init__(self, path: Path, identity: str | None = None) -> None:
        self.path = path
        self.identity = identity
        """Identity of the run that trains in the folder; None to only read it."""

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    def check_start(self, resume: bool, from_round: int | None = None) -> None:
        """Refuse to begin a run where there is one already, and to go back in one that is not resumed."""
        if from_round is not None and not (resume and self.exists):
            cannot = f"is not resumed, so it cannot go back to round {from_round}"
            raise InputError(f"{self.path} {cannot}: resume it, or start anew")
        if self.exists and not resume:
            raise InputError(f"{self.path} already holds a run: resume it, or choose another folder")

    def create(
        self, config: Config, manifest: dict[str, Any], hashes: ImageHashes | None = None, frozen: str = ""
    ) -> None:
        """Write the first files of a run; config.toml comes last, so that its presence means that all are there.

        `frozen` is the hash of the tensors that never change, which no checkpoint holds.
        """
        from fedcir import __version__

        for folder in (self.path, self.path / "checkpoint"):
            files.make_private_folder(folder)
        save_manifest(self.path, manifest)
        if hashes is not None:
            files.write_file(self.path / IMAGE_HASHES, file_formats.pack_image_hashes(hashes))
        about = {"format": FORMAT, "version": __version__, "torch": torch.__version__}
        if (weights := file_formats.hash_weights(config.model)) is not None:
            about["weights"] = weights
        if frozen:
            about["frozen"] = frozen
        for kind, source in file_formats.find_custom_files(config).items():
            about[kind] = files.hash_file(source)
            files.write_file(self.path / source.name, source.read_bytes())
        tables = {"fedcir": about, **make_paths_absolute(config_to_tables(config))}
        about[files.CHECKSUM_KEY] = file_formats.compute_settings_checksum(tables)
        files.write_file(self.path / "config.toml", dump_toml(tables))

    def config(self) -> Config:
        files.check_no_links(self.path)
        tables = self._tables()
        with files.explain_read_errors(self.path / "config.toml", files.RESTORE_HINT):
            config = config_from_tables(tables)
            return replace(config, algorithm=add_new_fields(config.algorithm))

    def file_hash(self, kind: str) -> str | None:
        """Hash of the file that defined the algorithm or model when the run began; None if no file did."""
        return cast(str | None, self._tables()["fedcir"].get(kind))

    def _tables(self) -> dict[str, Any]:
        if not self.exists:
            raise InputError(f"{self.path} is not a run: it holds no config.toml")
        path = self.path / "config.toml"
        with files.explain_read_errors(path, files.RESTORE_HINT):
            tables = read_toml(path)
            about = check_type(tables.get("fedcir", {}), dict, "fedcir")
            version, checksum = about.get("format", "none"), about.pop(files.CHECKSUM_KEY, None)
            if checksum is not None and version == FORMAT:
                files.compare_checksums(checksum, file_formats.compute_settings_checksum(tables))
        if version != FORMAT:
            formats = f"{format_value(version)}, but this fedcir reads format {FORMAT}"
            raise InputError(f"{self.path} has run-folder format {formats}: use the version of fedcir that wrote it")
        return tables

    def manifest(self) -> dict[str, Any]:
        return load_manifest(self.path)

    def image_hashes(self) -> ImageHashes | None:
        """Hashes of the images that the run trained or validated on; None if it saved none."""
        path = self.path / IMAGE_HASHES
        return file_formats.read_image_hashes(path) if path.exists() else None

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        summary = files.read_json(path, file_formats.Summary, REWRITE_HINT)
        with files.explain_read_errors(path, REWRITE_HINT):
            file_formats.check_summary(summary)
        return summary

    def weights(self) -> Tensors:
        """Tensors of the saved model."""
        path = self.path / "model.safetensors"
        with files.explain_read_errors(path, MODEL_HINT):
            tensors = load_file(files.check_regular_file(path))
            if self.finished and (checksum := self.summary().get("model")) is not None:
                files.compare_checksums(checksum, compute_tensor_checksum(self._metadata(), tensors))
        return tensors

    def card(self) -> dict[str, Any]:
        """Metadata of the saved model: classes, image size, normalisation, network and algorithm."""
        with files.explain_read_errors(self.path / "model.safetensors", MODEL_HINT):
            card: dict[str, Any] = check_type(self._metadata(), file_formats.Card, "card")
            file_formats.check_card(card)
        return card

    def _metadata(self) -> Any:
        with safe_open(files.check_regular_file(self.path / "model.safetensors"), framework="pt") as file:
            return json.loads((file.metadata() or {}).get("fedcir", ""))

    def records(self, after: int = 0) -> list[RoundRecord]:
        """Records of the rounds after `after`. A last line without an end is still being written and is left out."""
        path, records = self.path / "rounds.jsonl", list[RoundRecord]()
        if not path.exists():
            return []
        with files.explain_read_errors(path, files.RESTORE_HINT):
            lines = files.check_regular_file(path).read_bytes().split(b"\n")[after:-1]
        for number, line in enumerate(lines, start=after + 1):
            with files.explain_read_errors(f"line {number} of {path}", RECORD_HINT):
                record = file_formats.parse_record(line)
                if record.round != number:
                    raise InputError(f"it holds round {record.round}")
                records.append(record)
        return records

    def append(self, record: RoundRecord) -> None:
        path = self.path / "rounds.jsonl"
        with files.name_in_errors(path), files.open_append(path) as file:
            file.write(file_formats.format_record(record).encode())

    def rewind(self, round: int, backup: bool = False) -> list[RoundRecord]:
        """Delete the rounds after `round`, which will be repeated, and return the records of the others.

        With `backup`, the old records are saved under another name, because repeated rounds may differ.
        """
        for leftover in (*self.path.glob(".*.tmp"), *(self.path / "checkpoint").glob(".*.tmp")):
            leftover.unlink()
        previous = self.records()
        records = [record for record in previous if record.round <= round]
        if backup and len(records) < len(previous):
            stem, numbers = f"rounds-{len(previous)}", itertools.count(2)
            backup_path = self.path / f"{stem}.old.jsonl"
            while backup_path.exists():
                backup_path = self.path / f"{stem}-{next(numbers)}.old.jsonl"
            files.write_file(backup_path, files.check_regular_file(self.path / "rounds.jsonl").read_bytes())
        files.write_file(self.path / "rounds.jsonl", "".join(file_formats.format_record(record) for record in records))
        (self.path / "summary.json").unlink(missing_ok=True)
        for saved in self.checkpoint_rounds():
            if saved > round:
                self._checkpoint_path(saved).unlink()
        return records

    def _checkpoint_path(self, round: int) -> Path:
        return self.path / "checkpoint" / CHECKPOINT_NAME.format(round)

    def save_checkpoint(
        self,
        state: ServerState,
        records: Sequence[RoundRecord] = (),
        client_rounds: Mapping[int, int] | None = None,
        record: RoundRecord | None = None,
    ) -> None:
        """Save a state with the record of its round. Delete all but the last two and the best of `records`.

        `client_rounds` holds the round of each client's state that belongs to it.
        """
        kinds = {"shared": state.shared, "private": state.private}
        checksum = None if record is None else file_formats.compute_record_checksum(record)
        data = pack_groups(kinds, state.round, client_rounds, run=self.identity, record=checksum)
        files.write_file(self._checkpoint_path(state.round), data)
        rounds = self.checkpoint_rounds()
        best = file_formats.find_best([record for record in records if record.round in rounds])
        for old in rounds[:-GENERATIONS]:
            if best is None or old != best.round:
                self._checkpoint_path(old).unlink()

    def checkpoint_rounds(self) -> list[int]:
        """Rounds that have a checkpoint, in ascending order."""
        matches = [STATE_FILE.fullmatch(path.name) for path in (self.path / "checkpoint").glob("round-*")]
        return sorted(int(match[1]) for match in matches if match)

    def load_checkpoint(self) -> ServerState | None:
        """Load the newest usable checkpoint; None if there is none."""
        return next((state for state, _ in self.checkpoints()), None)

    def checkpoints(
        self, on_damage: Callable[[str], None] = lambda fault: None
    ) -> Iterator[tuple[ServerState, Mapping[int, int]]]:
        """Load the undamaged checkpoints whose rounds are all on record, the newest first.

        Each comes with the round of each client's state. A checkpoint of another run is an error.
        """
        records = self.records()
        for round in reversed([saved for saved in self.checkpoint_rounds() if saved <= len(records)]):
            path = self._checkpoint_path(round)
            try:
                kinds, about = unpack_groups(path, "shared", "private")
                if about.round != round:
                    raise InputError(f"{path} holds round {about.round}")
            except InputError as error:
                on_damage(str(error).removesuffix(f"; {files.RESTORE_HINT}"))
                continue
            if None not in (about.run, self.identity) and about.run != self.identity:
                raise InputError(f"{path} was saved by a run with other settings or data: {files.RESTORE_HINT}")
            if about.record not in (None, file_formats.compute_record_checksum(records[round - 1])):
                raise InputError(f"{path} does not belong to line {round} of rounds.jsonl: {files.RESTORE_HINT}")
            client_rounds = {int(client): saved for client, saved in (about.kept or {}).items()}
            yield ServerState(round, kinds["shared"], kinds["private"]), client_rounds

    def finish(self, summary: dict[str, Any], model: Tensors, card: dict[str, Any]) -> None:
        """Write the model and then the summary, whose presence marks the run as finished."""
        self.save_json("summary.json", {**summary, "model": self.save_model(model, card)})

    def save_json(self, name: str, values: dict[str, Any]) -> None:
        files.write_file(self.path / name, json.dumps(files.add_checksum(values), indent=1, ensure_ascii=False) + "\n")

    def save_model(self, model: Tensors, card: dict[str, Any]) -> str:
        """Write the model and return its checksum."""
        # One metadata key: safetensors writes several in no fixed order, and equal runs must be equal files.
        metadata = json.dumps({"format": FORMAT, **card}, sort_keys=True, ensure_ascii=False)
        tensors = copy_shared_tensors(model)
        files.write_file(self.path / "model.safetensors", save(tensors, {"fedcir": metadata}))
        return compute_tensor_checksum(json.loads(metadata), tensors)

    def calibration(self) -> Calibration | None:
        """Calibration of the saved model on validation images; None if there is none, or only of another round."""
        path = self.path / "calibration.json"
        if not path.exists():
            return None
        values = files.read_json(path, SavedCalibration, CALIBRATION_HINT)
        with files.explain_read_errors(path, CALIBRATION_HINT):
            calibration = Calibration.from_json(values)
        summary = self.summary()
        saved = summary["saved"]["round"] if "saved" in summary else summary["rounds"]
        return calibration if calibration.round == saved else None

    def hits(self) -> Hits | None:
        """Result of the final evaluation for each image; None if there is none, or only of another round."""
        path = self.path / "hits.json"
        if not path.exists():
            return None
        values = files.read_json(path, SavedHits, HITS_HINT)
        with files.explain_read_errors(path, HITS_HINT):
            hits = Hits.from_json(cast(SavedHits, values))
        return hits if self.finished and hits.round == self.summary()["rounds"] else None

    def sums(self) -> dict[str, dict[str, float]]:
        """Sums of the final evaluation by domain; empty if there are none, or only of another round."""
        if not (path := self.path / SUMS).exists():
            return {}
        values = files.read_json(path, file_formats.SavedSums, SUMS_HINT)
        domains: dict[str, dict[str, float]] = values["domains"]
        return domains if self.finished and values["round"] == self.summary()["rounds"] else {}

    def has_model(self) -> bool:
        """Check whether there is an undamaged model."""
        try:
            self.card(), self.weights()
        except InputError:
            return False
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, so that no other process trains in it.

        If nothing was written to it, the lock is removed afterwards, and so is the folder if it is new.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file: choose another folder")
        names = [path.name for path in self.path.iterdir()] if self.path.exists() else []
        if not self.exists and any(name not in self.FIRST_FILES and not name.endswith(".tmp") for name in names):
            raise InputError(f"{self.path} holds other files and no run: choose another folder")
        files.check_no_links(self.path)
        lock, new = self.path / self.LOCK, not self.path.exists()
        file = files.acquire_lock(lock, files.LOCK_TIMEOUT)
        if file is None:
            raise InputError(f"another process is training in {self.path}: wait for it, or choose another folder")
        with file:
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # another process has just locked it
                    if list(self.path.iterdir()) == [lock]:
                        lock.unlink()
                        if new:
                            self.path.rmdir()
