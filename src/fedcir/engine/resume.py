"""Keeping a run in a folder, and whether the run that is already there may be continued."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcir.algorithms.algorithm import Algorithm
from fedcir.config import Config, differing
from fedcir.data.federation import Roster
from fedcir.engine.cohort import epsilon_after
from fedcir.engine.files import RESTORE, file_hash
from fedcir.engine.folder import RunFolder, own_files
from fedcir.engine.own import keeps_something
from fedcir.engine.rounds import summarise
from fedcir.engine.session import Session
from fedcir.engine.settling import hyper_parameters
from fedcir.engine.store import GENERATIONS, ClientStore
from fedcir.models.tensors import difference
from fedcir.types import InputError, ServerState

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

CODE = ("algorithm.name", "model.name", "model.arguments")
"""Settings that may name code of the user's."""

OPEN = {"server.active": None, "run.layout": "auto"}
"""Settings that are settled only when a run is opened."""


def kept_in(session: Session, out: Path, resume: bool, from_round: int | None = None) -> None:
    """Keep a session in a folder: from its first round on, or from where the run that is there was left.

    With `from_round`, it goes on from the newest checkpoint at or before that round, and what came after it is kept
    aside: across sites, a round that is repeated may come out differently.
    """
    config, roster = session.config, session.roster
    session.folder = folder = RunFolder(out, session.identity)
    if from_round is not None and not (resume and folder.exists):
        raise InputError(f"{out} is not resumed, so it cannot go back to round {from_round}: resume it, or start anew")
    if not folder.exists:
        if session.releases is not None:
            session.releases.start()
        folder.create(config, roster.manifest, roster.hash_images())
        return
    if not resume:
        raise InputError(f"{out} already holds a run: resume it, or choose another folder")
    check_settings(folder, config, session.algorithm)
    check_data(folder, config, roster)
    _check_epsilon(session, folder)
    store, damage = ClientStore(out / "clients"), list[str]()
    if (state := _to_go_on_from(folder, store, from_round, damage)) is not None:
        if state.round < config.server.rounds:
            check_tensors(folder, state, session)
        session.state = state
    elif from_round:
        raise InputError(_too_early(folder, from_round, damage))
    _check_kept(session, folder, from_round)
    session.notes = (*session.notes, *(f"{each}; continuing from round {session.state.round}" for each in damage))
    if not session.finished or not folder.finished:
        if from_round is not None:
            store.rewind(session.state.round)
        if (repeated := session.repeated(session.state.round)) > 0:
            said = f"{repeated} rounds after round {session.state.round} were begun before, and epsilon counts them too"
            session.notes = (*session.notes, said)
        session.records = folder.rewind(session.state.round, aside=from_round is not None)
        folder.create(config, roster.manifest, roster.hash_images())  # a longer run says so
        return
    session.records = folder.records()
    if _is_stale(folder, session):
        folder.finish(summarise(session), session.model, session.card)
        said = f"{out}/summary.json did not belong to rounds.jsonl, and was written again from it"
        session.notes = (*session.notes, said)
    elif not folder.has_model():
        folder.save_model(session.model, session.card)
        said = f"{out}/model.safetensors was missing or damaged, and was written again from the last checkpoint"
        session.notes = (*session.notes, said)


def _check_epsilon(session: Session, folder: RunFolder) -> None:
    """Refuse to continue if epsilon would be smaller than on record; a larger one is noted, and counts from then on."""
    config, records = session.config, folder.records()
    last = records[-1] if records else None
    begun = 0 if session.releases is None else session.releases.count()
    if last is None or last.epsilon is None:
        return
    if session.releases is not None and begun < last.round:
        raise InputError(f"{session.releases.path} counts {begun} rounds, but {last.round} are on record: {RESTORE}")
    epsilon = epsilon_after(config, session.roster, last.round, max(0, begun - last.round)) or 0.0
    recorded = f"{folder.path}/rounds.jsonl has epsilon {last.epsilon:.3g} after round {last.round}"
    if epsilon < last.epsilon * (1 - 1e-6):
        counted = "its settings add no noise" if not config.privacy.noise else f"its settings give {epsilon:.3g}"
        source = "" if session.releases is None else f" and {begun} rounds that `releases` counts"
        raise InputError(f"{recorded}, but {counted}{source}: one of its files was replaced; {RESTORE}")
    if epsilon > last.epsilon * (1 + 1e-6):
        session.notes = (*session.notes, f"{recorded}, and it counts as {epsilon:.3g} from now on")


def _is_stale(folder: RunFolder, session: Session) -> bool:
    """Whether a summary is damaged or tells of other rounds than those on record."""
    try:
        saved = folder.summary()
    except InputError:
        return True
    now = summarise(session)
    epsilon = [values.get("privacy", {}).get("epsilon") for values in (saved, now)]
    accuracy = [(values["final"] or {}).get("accuracy") for values in (saved, now)]
    return epsilon[0] != epsilon[1] or accuracy[0] != accuracy[1] or saved["rounds"] != now["rounds"]


def _to_go_on_from(
    folder: RunFolder, store: ClientStore, from_round: int | None, damage: list[str]
) -> ServerState | None:
    """The newest state at or before a round that reads back whole, with what clients kept then; None for the start."""
    for state, kept in folder.states(damage.append):
        if from_round is not None and state.round > from_round:
            continue
        if (fault := store.fault(state.round, kept)) is None:
            return state
        damage.append(fault.removesuffix(f"; {RESTORE}"))
    return None


def _too_early(folder: RunFolder, from_round: int, damage: Sequence[str]) -> str:
    there = " and ".join(map(str, folder.saved())) or "none"
    why = f" ({'; '.join(damage)})" if damage else ""
    return (
        f"{folder.path} has no checkpoint at or before round {from_round}, but of {there}{why}: "
        "choose a later round, or 0 to begin again"
    )


def _check_kept(session: Session, folder: RunFolder, from_round: int | None) -> None:
    """Refuse to go back further than sites keep what they need of earlier rounds; here checkpoints say what to keep."""
    reach = len(folder.records()) - GENERATIONS * session.config.server.checkpoint_every
    sites = "key" in session.roster.manifest and keeps_something(session.config, session.algorithm)
    if from_round is not None and sites and 0 < session.state.round < reach:
        raise InputError(
            f"sites keep what {session.config.algorithm.name} needs of earlier rounds, but no longer that of round "
            f"{session.state.round}: go back to round {reach} at most, or to 0 to begin again"
        )


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


def check_tensors(folder: RunFolder, state: ServerState, session: Session) -> None:
    """Refuse to continue from a checkpoint whose networks have other tensors than this version builds."""
    for saved, built in ((state.shared, session.state.shared), (state.private, session.state.private)):
        for name in session.modules.keys() & saved.keys() & built.keys():
            if (fault := difference({name: saved[name]}, {name: built[name]})) is not None:
                raise InputError(
                    f"{folder.path} was begun by another version of fedcir, which built its {name} differently "
                    f"({fault}): start anew in another folder, or resume it with that version"
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
    copies = {what: folder.path / file.name for what, file in own_files(folder.config()).items()}
    for what, path in own_files(config).items():
        begun, copy = folder.file_hash(what), copies.get(what)
        if begun is None or copy is None:
            continue
        if path.is_file() and file_hash(path) != begun and folder.records():
            raise InputError(
                f"{path} has changed since {folder.path} was started: choose another folder (that run's copy is {copy})"
            )
        if copy.is_file() and file_hash(copy) != begun:
            raise InputError(f"{copy} has changed since the run was started: restore it, or choose another folder")


def same_code(config: Config, out: Path) -> bool:
    """Whether a run's own code, if it names any, is what the user names: then it is trusted."""
    theirs = RunFolder(out).config()
    apart = {key: pair for key, pair in differing(theirs, config).items() if key in CODE}
    if any(not _same_file(key, *pair) for key, pair in apart.items()):
        return False
    return all(file_hash(out / path.name) == file_hash(path) for path in own_files(config).values())


def _same_file(key: str, old: Any, new: Any) -> bool:
    """Whether both name one file of the user's: its content is checked apart."""
    if key not in ("algorithm.name", "model.name") or not isinstance(old, str) or not isinstance(new, str):
        return False
    one, other = Path(old), Path(new)  # ./mine.py or ./mine.py:make
    return ".py" in one.name and one.name == other.name
