"""Keeping a run in a folder, and whether the run that is already there may be continued."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, differing
from fedcir.data.federation import Roster
from fedcir.engine.files import file_hash
from fedcir.engine.folder import RunFolder, own_files
from fedcir.engine.session import Session, hyper_parameters
from fedcir.types import InputError

MAY_DIFFER = {
    "server.rounds",
    "server.checkpoint_every",
    "data.root",
    "data.lists",
    "data.table",
    "partition.file",
    "privacy.epsilon",
    "run.device",
    "run.workers",
}
"""Settings that a resume may change."""

OPEN = {"server.active": None, "run.layout": "auto"}
"""Settings that are settled only when a run is opened."""


def kept_in(session: Session, out: Path, resume: bool) -> None:
    """Keep a session in a folder: from its first round on, or from where the run that is there was left."""
    config, roster = session.config, session.roster
    session.folder = folder = RunFolder(out)
    if not folder.exists:
        folder.create(config, roster.manifest)
        return
    if not resume:
        raise InputError(f"{out} already holds a run: resume it, or choose another folder")
    check_settings(folder, config, session.algorithm)
    check_data(folder, config, roster)
    if (state := folder.load_checkpoint()) is not None:
        session.state = state
    if not session.finished or not folder.finished:
        session.records = folder.rewind(session.state.round)
        folder.create(config, roster.manifest)  # a longer run says so
        return
    session.records = folder.records()
    if not folder.has_model():
        folder.save_model(session.model, session.card)
        said = f"{out}/model.safetensors was missing or damaged, and was written again from the last checkpoint"
        session.notes = (*session.notes, said)


def check_settings(folder: RunFolder, config: Config, algorithm: Algorithm) -> None:
    """Refuse to continue a run with other settings than it was started with."""
    asked = replace(config, algorithm=replace(config.algorithm, fields=hyper_parameters(algorithm)))
    _check_files(folder, config)
    for key, (old, new) in differing(folder.config(), asked).items():
        if key not in MAY_DIFFER and not (key in OPEN and new == OPEN[key]) and not _same_file(key, old, new):
            raise InputError(f"{folder.path} was started with {key}={old}, not {new}: choose another folder")
    old_rounds, new_rounds = folder.config().server.rounds, config.server.rounds
    if new_rounds < old_rounds:
        raise InputError(
            f"{folder.path} was started with {old_rounds} rounds, so it cannot end after {new_rounds}: ask for more"
        )
    if new_rounds > old_rounds and (algorithm.uses_total_rounds or config.local.schedule != "constant"):
        what = config.algorithm.name if algorithm.uses_total_rounds else f"the {config.local.schedule} schedule"
        raise InputError(
            f"{folder.path} cannot be extended to {new_rounds} rounds, because {what} depends on their number: "
            "choose another folder"
        )


def check_data(folder: RunFolder, config: Config, roster: Roster) -> None:
    """Refuse to continue a run on other data than it was started on."""
    if folder.manifest().get("hash") != roster.manifest["hash"]:
        raise InputError(
            f"{folder.path} was started on other data than {config.data.name} holds now: choose another folder"
        )


def _check_files(folder: RunFolder, config: Config) -> None:
    """Refuse a user's algorithm or model that has changed since the run's first round; its file may have moved."""
    begun, weights = folder.file_hash("weights"), config.model.weights
    if begun is not None and weights is not None and file_hash(Path(weights)) != begun:
        raise InputError(f"{weights} has changed since {folder.path} was started: choose another folder")
    for what, path in own_files(config).items():
        begun = folder.file_hash(what)
        if begun is not None and path.is_file() and file_hash(path) != begun and folder.records():
            raise InputError(
                f"{path} has changed since {folder.path} was started: choose another folder "
                f"(that run's copy is {folder.path / own_files(folder.config())[what].name})"
            )


def _same_file(key: str, old: Any, new: Any) -> bool:
    """Whether both name one file of the user's: its content is checked apart."""
    if key not in ("algorithm.name", "model.name") or not isinstance(old, str) or not isinstance(new, str):
        return False
    one, other = Path(old), Path(new)  # ./mine.py or ./mine.py:make
    return ".py" in one.name and one.name == other.name
